import time

import pytest

from hooktrain.utils.timer import Timer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_pauses_do_not_count_and_the_average_is_over_the_number_of_starts(
    clock: list[float],
) -> None:
    timer = Timer()
    clock[0] += 1
    assert (timer.seconds(), timer.avg_seconds(), timer.is_paused()) == (1, 1, False)
    with pytest.raises(ValueError, match="running; call pause"):
        timer.resume()
    timer.pause()
    with pytest.raises(ValueError, match="paused; call resume"):
        timer.pause()
    clock[0] += 10
    assert (timer.seconds(), timer.is_paused()) == (1, True)
    timer.resume()
    clock[0] += 5
    assert (timer.seconds(), timer.avg_seconds()) == (6, 3)
    timer.pause()
    timer.reset()
    clock[0] += 4
    assert (timer.seconds(), timer.avg_seconds(), timer.is_paused()) == (4, 4, False)
