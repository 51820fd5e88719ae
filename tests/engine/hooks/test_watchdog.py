"""Processes that hang end."""

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from hooktrain.engine.hooks import CallbackHook, Watchdog
from hooktrain.engine.hooks.watchdog import EXIT_HUNG
from hooktrain.evaluation import inference_on_dataset
from processes import wait_until
from toys import Idle

CALM_SECONDS = 30.0


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The codes by which the watchdog would have ended the process."""
    codes: list[int] = []
    monkeypatch.setattr("hooktrain.engine.hooks.watchdog.os._exit", codes.append)
    no_time = SimpleNamespace(sleep=lambda seconds: None, monotonic=time.monotonic)
    monkeypatch.setattr("hooktrain.utils.timer.time", no_time)
    return codes


def test_a_hang_ends_the_process_with_the_stack_of_every_thread(
    exits: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    def a_place_to_hang(trainer: Any) -> None:
        if trainer.iter == 3:
            wait_until(lambda: exits)

    Idle(Watchdog(0.05), CallbackHook(after_backward=a_place_to_hang)).train(0, 5)
    assert exits == [EXIT_HUNG] == [124]
    printed = capfd.readouterr().err
    assert printed.count("rank 0 has made no progress for 0.05 s") == 1
    assert "in a_place_to_hang" in printed
    assert "watchdog.py" in printed  # the watchdog's own thread


@pytest.mark.parametrize("fail_at", [-1, 1])
def test_the_thread_ends_with_the_run(fail_at: int, exits: list[int]) -> None:
    with pytest.raises(ValueError, match="broken") if fail_at > 0 else nullcontext():
        Idle(Watchdog(CALM_SECONDS), fail_at=fail_at).train(0, 3)
    assert exits == []
    assert "watchdog" not in [thread.name for thread in threading.enumerate()]


class Looks:
    """In place of the event that the thread waits for: lets it look so many times."""

    def __init__(self, meanwhile: list[Callable[[], object]]) -> None:
        self.meanwhile = iter(meanwhile)

    def wait(self, _: float) -> bool:
        step = next(self.meanwhile, None)
        if step is not None:
            step()
        return step is None


def watch(*meanwhile: Callable[[], object], first_s: float = 0) -> None:
    watchdog = Watchdog(8.0, first_s)  # four looks
    watchdog._end = Looks([*meanwhile])  # type: ignore[assignment]
    watchdog._watch()


def test_each_batch_of_an_evaluation_is_progress(exits: list[int]) -> None:
    def nothing() -> None:
        pass

    def evaluate() -> None:
        inference_on_dataset(abs, [1], None)

    watch(*[nothing] * 3, evaluate, *[nothing] * 3)
    assert exits == []
    watch(*[nothing] * 4)
    assert exits == [EXIT_HUNG]


def test_the_first_iteration_may_take_longer(exits: list[int]) -> None:
    def nothing() -> None:
        pass

    watch(*[nothing] * 5, first_s=12.0)
    assert exits == []
    watch(*[nothing] * 6, first_s=12.0)
    assert exits == [EXIT_HUNG]
    watchdog = Watchdog(8.0, first_s=12.0)
    limits: list[float] = []
    look = CallbackHook(before_step=lambda _: limits.append(watchdog._limit_s))
    Idle(watchdog, look).train(0, 3)
    assert limits == [12.0, 8.0, 8.0]


def test_a_process_that_was_suspended_does_not_seem_to_hang(
    exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def years_pass() -> None:
        monkeypatch.setattr(time, "monotonic", lambda: 1e9)

    watch(years_pass)
    assert exits == []
