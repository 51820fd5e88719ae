"""What all writers share, and the one for experiment trackers."""

from typing import Any

import pytest

from hooktrain.events import EventStorage, FunctionWriter

Log = list[tuple[dict[str, float], int]]


@pytest.fixture
def log() -> Log:
    return []


def make(log: Log, **options: Any) -> FunctionWriter:
    def take(metrics: dict[str, float], step: int) -> None:
        log.append((metrics, step))

    return FunctionWriter(take, **options)


def test_each_value_is_given_once_at_its_iteration(log: Log) -> None:
    writer = make(log, window_size=3)
    with EventStorage() as storage:
        for storage.iter, value in enumerate((9.0, 1.0, 2.0, 6.0)):
            storage.put_scalar("loss", value)
            storage.put_scalar("lr", value, smoothing_hint=False)
        storage.put_scalar("late", 5.0, smoothing_hint=False, cur_iter=1)
        writer.write()
        writer.write()
    assert log == [({"late": 5.0}, 1), ({"loss": 2.0, "lr": 6.0}, 3)]


def test_of_times_the_mean_is_given_since_one_iteration_waits_for_all(log: Log) -> None:
    writer = make(log, window_size=4)
    with EventStorage() as storage:
        for storage.iter, seconds in enumerate((9.0, 0.25, 0.25, 0.25, 3.25)):
            storage.put_scalars(time=seconds, data_time=seconds, loss=seconds)
        writer.write()
    assert log == [({"time": 1.0, "data_time": 1.0, "loss": 0.25}, 4)]


def test_what_the_function_has_refused_is_still_new(log: Log) -> None:
    def fail(metrics: dict[str, float], step: int) -> None:
        raise ConnectionError

    writer = FunctionWriter(fail)
    with EventStorage(4) as storage:
        storage.put_scalar("loss", 1.0)
        for _ in range(2):
            with pytest.raises(ConnectionError):
                writer.write()
