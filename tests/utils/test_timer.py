import time

import pytest

from hooktrain.utils.timer import Timer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_seconds_are_counted_from_the_construction_on(clock: list[float]) -> None:
    timer = Timer()
    clock[0] += 2.5
    assert timer.seconds() == 2.5
    assert not timer.is_paused()


def test_pauses_do_not_count(clock: list[float]) -> None:
    timer = Timer()
    clock[0] += 1
    timer.pause()
    assert timer.is_paused()
    clock[0] += 10
    assert timer.seconds() == 1
    timer.resume()
    clock[0] += 2
    assert timer.seconds() == 3


def test_the_average_is_over_the_number_of_starts(clock: list[float]) -> None:
    timer = Timer()
    clock[0] += 1
    assert timer.avg_seconds() == 1
    timer.pause()
    timer.resume()
    clock[0] += 5
    assert timer.avg_seconds() == 3
    timer.pause()
    assert timer.avg_seconds() == 3


def test_a_reset_starts_again_from_zero_and_runs(clock: list[float]) -> None:
    timer = Timer()
    clock[0] += 1
    timer.pause()
    timer.resume()
    timer.pause()
    timer.reset()
    assert not timer.is_paused()
    clock[0] += 4
    assert timer.seconds() == 4
    assert timer.avg_seconds() == 4


def test_pausing_twice_is_an_error() -> None:
    timer = Timer()
    timer.pause()
    with pytest.raises(ValueError, match="paused; call resume"):
        timer.pause()


def test_resuming_a_running_timer_is_an_error() -> None:
    with pytest.raises(ValueError, match="running; call pause"):
        Timer().resume()


def test_the_wall_clock_plays_no_part(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    timer = Timer()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    clock[0] += 1
    assert timer.seconds() == 1
