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


def test_a_second_function_needs_another_name(log: Log) -> None:
    with EventStorage() as storage:
        storage.put_scalar("loss", 1.0)
        make(log).write()
        with pytest.raises(ValueError, match="named 'function'"):
            make(log).write()
        make(log, name="second").write()
    assert log == [({"loss": 1.0}, 0)] * 2


class Service:
    """A tracker that is away at some calls."""

    def __init__(self, *away: int) -> None:
        self.away = away
        self.calls = 0
        self.rows: Log = []

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.calls += 1
        if self.calls - 1 in self.away:
            raise ConnectionError("away")
        self.rows.append((dict(metrics), step))


def put(storage: EventStorage, *iterations: int) -> None:
    for storage.iter in iterations:
        storage.put_scalar("loss", float(storage.iter))
        if storage.iter % 2 == 0:
            storage.put_scalar("accuracy", storage.iter / 8, smoothing_hint=False)


ROWS = [
    ({"accuracy": 0.0}, 0),
    ({"loss": 1.0}, 1),
    ({"accuracy": 0.25}, 2),
    ({"loss": 3.0}, 3),
    ({"accuracy": 0.5}, 4),
    ({"loss": 5.0}, 5),
]


def test_what_a_tracker_refuses_is_delivered_later_once_and_in_order() -> None:
    service = Service(1, 2)  # the second row, and again in the next period
    writer = FunctionWriter(service.log, window_size=1)
    with EventStorage() as storage:
        for period in ((0, 1), (2, 3)):
            put(storage, *period)
            with pytest.raises(ConnectionError):
                writer.write()
        assert service.rows == ROWS[:1]
        put(storage, 4, 5)
        writer.write()
        writer.write()
    assert service.rows == ROWS


def test_of_the_rows_that_wait_for_a_tracker_the_newest_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hooktrain.events.writer._MAX_UNDELIVERED", 3)
    service = Service(0, 1)
    writer = FunctionWriter(service.log, window_size=1)
    with EventStorage() as storage:
        for period in ((0, 1), (2, 3)):
            put(storage, *period)
            with pytest.raises(ConnectionError):
                writer.write()
        put(storage, 4, 5)
        writer.write()
    assert service.rows == ROWS[3:]


def test_what_waits_for_a_tracker_is_in_the_checkpoint() -> None:
    service = Service(1)
    with EventStorage() as storage:
        put(storage, 0, 1)
        with pytest.raises(ConnectionError):
            FunctionWriter(service.log, window_size=1).write()
    saved = storage.state_dict()
    for _ in range(2):  # what a state has is not changed by who loads it
        loaded = EventStorage()
        loaded.load_state_dict(saved)
        with loaded:
            writer = FunctionWriter(service.log, window_size=1)
            writer.rewind(2)
            put(loaded, 2, 3)
            writer.write()
    assert service.rows == [*ROWS[:1], *ROWS[1:4], *ROWS[1:4]]
