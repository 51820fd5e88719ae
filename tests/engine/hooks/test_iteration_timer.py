import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hooktrain.engine.hooks import CallbackHook, IterationTimer, writing
from toys import Idle


def take(clock: SimpleNamespace, seconds: float) -> Callable[[object], None]:
    def advance(_: object) -> None:
        clock.now += seconds

    return advance


def test_times_of_the_steps_are_recorded_after_exactly_the_warm_up(
    clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Idle(
        IterationTimer(warmup_iter=3),
        CallbackHook(after_backward=take(clock, 2.0), after_step=take(clock, 0.5)),
    )
    with caplog.at_level(logging.INFO):
        trainer.train(0, 8)
    assert trainer.storage.history("time").values() == [(2.0, i) for i in range(3, 8)]
    assert (
        "Overall training speed: 5 iterations in 0:00:10 (2.0000 s / it)" in caplog.text
    )
    assert "Total training time: 0:00:20 (0:00:03 on hooks)" in caplog.text


def test_a_resumed_run_records_every_time_but_its_speed_is_without_the_warm_up(
    clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Idle(
        IterationTimer(warmup_iter=3), CallbackHook(after_backward=take(clock, 2.0))
    )
    with caplog.at_level(logging.INFO):
        trainer.train(10, 15)
    assert trainer.storage.history("time").values() == [(2.0, i) for i in range(10, 15)]
    assert "Overall training speed: 2 iterations in 0:00:04" in caplog.text


@pytest.mark.parametrize("watched", [True, False])
def test_who_watches_sees_a_bar_that_moves_with_each_iteration_and_the_time_that_is_left(
    watched: bool, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    draw = lambda *args: drawn.append(args) or watched  # noqa: E731
    monkeypatch.setattr(writing, "show_progress", draw)
    Idle(
        IterationTimer(warmup_iter=2), CallbackHook(after_step=take(clock, 2.0))
    ).train(0, 4)
    left = [None, None, 2.0, 0.0]
    bars = [("Training", i + 1, 4, left[i]) for i in range(4)]
    assert drawn == [("Training", 0, 4), *(bars if watched else [])]


def test_a_run_within_the_warm_up_has_no_speed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        Idle(IterationTimer()).train(0, 2)
    assert "Overall training speed" not in caplog.text
    assert "Total training time" in caplog.text
