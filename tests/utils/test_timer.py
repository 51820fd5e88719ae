from types import SimpleNamespace

import pytest

from hooktrain.utils.timer import Timer


def test_pauses_do_not_count_and_the_average_is_over_the_number_of_starts(
    clock: SimpleNamespace,
) -> None:
    timer = Timer()
    clock.now += 1
    assert (timer.seconds(), timer.avg_seconds(), timer.is_paused()) == (1, 1, False)
    with pytest.raises(ValueError, match="running; call pause"):
        timer.resume()
    timer.pause()
    with pytest.raises(ValueError, match="paused; call resume"):
        timer.pause()
    clock.now += 10
    assert (timer.seconds(), timer.is_paused()) == (1, True)
    timer.resume()
    clock.now += 5
    assert (timer.seconds(), timer.avg_seconds()) == (6, 3)
    timer.pause()
    timer.reset()
    clock.now += 4
    assert (timer.seconds(), timer.avg_seconds(), timer.is_paused()) == (4, 4, False)
