"""Periods in time: they end by the seconds of the steps, on all ranks alike."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from gloo import run_ranks
from hooktrain.checkpoint import Checkpointer
from hooktrain.engine import HookBase
from hooktrain.engine.clock import Clock
from hooktrain.engine.hooks import (
    BestCheckpointer,
    CallbackHook,
    EvalHook,
    IterationTimer,
    PeriodicCheckpointer,
    Preemption,
)
from hooktrain.strategy import create_ddp_model
from hooktrain.utils import comm
from hooktrain.utils.periods import Period
from toys import Idle, linear_trainer


class SlowSteps(HookBase):
    """By the trainer's clock each step takes so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.time = 5.0

    def before_train(self) -> None:
        self.trainer.clock.read = lambda: self.time

    def after_backward(self) -> None:
        self.time += self.seconds


@pytest.mark.parametrize(
    ("every", "due"),
    [
        ("2 minutes", [3, 6, 8, 11, 14, 16, 19]),
        ("90 seconds", [2, 4, 6, 8, 10, 12, 14, 16, 18, 20]),
        ("0.1 hours", [8, 16]),
        ("1 second", [*range(1, 21)]),
    ],
)
def test_a_period_in_time_is_due_where_a_multiple_of_it_passes_in_the_steps(
    every: str, due: list[int]
) -> None:
    seen = []
    slow = SlowSteps(45)

    def look(trainer: Any) -> None:
        if Period(every).is_due(trainer):
            assert Period(every).is_due(trainer)  # all hooks see the same
            seen.append(trainer.done)
            slow.time += 1000  # as an evaluation that takes longer than its period

    Idle(slow, CallbackHook(after_step=look)).train(0, 20)
    assert seen == due


def test_evaluations_and_checkpoints_may_come_by_time(tmp_path: Path) -> None:
    trainer = linear_trainer()
    evaluated = []

    def evaluate() -> dict[str, float]:
        evaluated.append(trainer.done)
        return {"accuracy": len(evaluated)}

    saver = Checkpointer(trainer.model, str(tmp_path), trainer=trainer)
    every = "10 minutes"
    trainer.register_hooks(
        [
            SlowSteps(130),
            EvalHook(every, evaluate),
            BestCheckpointer(saver, "accuracy", "max"),
            PeriodicCheckpointer(saver, every),
        ]
    )
    trainer.train(0, 12)
    assert evaluated == [5, 10, 12]
    names = {path.name for path in tmp_path.glob("*.pth")}
    numbered = {"model_0000004.pth", "model_0000009.pth"}
    assert names == {*numbered, "model_final.pth", "model_best.pth"}


def due_on_ranks(folder: str) -> list[int]:
    """Where a period in time ends if the first rank takes the most time."""
    seen = []

    def look(trainer: Any) -> None:
        if Period("10 minutes").is_due(trainer):
            seen.append(trainer.done)

    trainer = linear_trainer(gather_metric_period=3)
    trainer.model = create_ddp_model(trainer.model)
    saver = Checkpointer(trainer.model, folder, trainer=trainer)
    slow = SlowSteps(70 if comm.get_rank() else 250)
    trainer.register_hooks([slow, CallbackHook(after_step=look), Preemption(saver)])
    trainer.train(0, 10)
    return seen


def test_all_ranks_see_a_period_in_time_end_after_the_same_iteration(
    tmp_path: Path,
) -> None:
    assert run_ranks(due_on_ranks, 2, str(tmp_path)) == [[3, 6, 9, 10]] * 2


def due_after_resume(folder: str) -> list[int]:
    """Where a period in time ends in a run that was killed before it was seen to."""
    due = []

    def look(trainer: Any) -> None:
        if Period("10 minutes").is_due(trainer):
            due.append(trainer.done)

    def make() -> tuple[Any, Checkpointer]:
        trainer = linear_trainer(gather_metric_period=4)
        trainer.model = create_ddp_model(trainer.model)
        saver = Checkpointer(trainer.model, folder, trainer=trainer)
        save = PeriodicCheckpointer(saver, 3)
        trainer.register_hooks([SlowSteps(250), CallbackHook(after_step=look), save])
        return trainer, saver

    def kill(trainer: Any) -> None:
        if trainer.done == 3:
            raise KeyboardInterrupt

    first, _ = make()
    first.register_hooks([CallbackHook(after_step=kill, phase="end")])
    with pytest.raises(KeyboardInterrupt):
        first.train(0, 4)
    again, saver = make()
    saver.resume_or_load("", resume=True)
    again.train(max_iter=4)
    return due


def test_a_period_that_ends_between_a_save_and_an_exchange_is_due_after_a_kill(
    tmp_path: Path,
) -> None:
    # The exchange of the save has told the ranks of 750 seconds, but no hook.
    assert run_ranks(due_after_resume, 2, str(tmp_path)) == [[4]] * 2


class SlowDevice(HookBase):
    """A device of 20 milliseconds a step, which the host waits for as it reads the losses."""

    def __init__(self) -> None:
        self.now = self.ready = 0.0

    def before_train(self) -> None:
        self.trainer.clock.read = lambda: self.now
        exchange = self.trainer.synchronize

        def wait_and_exchange() -> None:
            self.now = max(self.now, self.ready)
            exchange()

        self.trainer.synchronize = wait_and_exchange

    def after_backward(self) -> None:
        self.ready = max(self.now, self.ready) + 0.02
        self.now += 1e-5


def test_the_wait_for_the_device_is_part_of_the_steps() -> None:
    due = []

    def look(trainer: Any) -> None:
        if Period("1 second").is_due(trainer):
            due.append(trainer.done)

    hooks = SlowDevice(), IterationTimer(), CallbackHook(after_step=look)
    trainer = linear_trainer(*hooks, gather_metric_period=10)
    trainer.train(0, 200)
    times = trainer.storage.history("time")
    assert round(times.avg(10), 4) == 0.02
    assert due == [50, 100, 150, 200]
    assert round(trainer.clock.own, 2) == 4.0


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("saved", [{"now": 700.0}, {}])  # older ones have no "now"
def test_a_period_that_a_resume_loads_has_not_passed_once_more(
    is_shared: bool, saved: dict[str, float]
) -> None:
    clock = Clock()
    clock.is_shared = is_shared
    clock.load_state_dict({"step": 700.0, **saved})
    passed = [clock.has_passed(Fraction(600))]
    clock.advance()
    passed.append(clock.has_passed(Fraction(600)))
    for seconds in (750.0, 1300.0):
        clock.own = clock.agreed = seconds
        clock.advance()
        passed.append(clock.has_passed(Fraction(600)))
    assert passed == [False, False, False, True]


def test_the_clock_goes_on_in_a_resumed_run() -> None:
    def make() -> Any:
        return linear_trainer(SlowSteps(1), EvalHook(2, lambda: {"accuracy": 1.0}))

    first, second = make(), make()
    first.train(0, 4)
    second.load_state_dict(first.state_dict())
    assert second.clock.own == 4.0
    second.train(max_iter=6)
    assert second.clock.own == 6.0
    assert second.clock.pauses == {"evaluation": 0.0}
