"""What a run has spent its time on."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from hooktrain.checkpoint import Checkpointer
from hooktrain.engine import HookBase, SimpleTrainer
from hooktrain.engine.hooks import (
    BestCheckpointer,
    CallbackHook,
    EvalHook,
    Hours,
    IterationTimer,
    PeriodicCheckpointer,
    PeriodicWriter,
)
from hooktrain.events import JSONWriter, load_json_metrics
from hooktrain.utils.periods import Period
from toys import linear_trainer


class Slow(HookBase):
    """Lets a step take 4 seconds, and tells the time of the other parts."""

    now = 0.0

    def before_train(self) -> None:
        self.trainer.clock.read = lambda: self.now

    def before_step(self) -> None:
        self.now += 4


def trainer_in(folder: Path, kill_at: int = -1) -> SimpleTrainer:
    """Evaluates every 4 iterations for 7 seconds and saves every 4 for 3, twice if it is best."""
    slow = Slow()

    class SlowCheckpointer(Checkpointer):
        def save(self, *args: Any, **options: Any) -> None:
            super().save(*args, **options)
            slow.now += 3

    def evaluate() -> dict[str, float]:
        slow.now += 7
        return {"accuracy": 0.5}

    def kill(trainer: Any) -> None:
        if trainer.iter == kill_at:
            raise KeyboardInterrupt

    trainer = linear_trainer()
    saver = SlowCheckpointer(trainer.model, str(folder), trainer=trainer)
    trainer.checkpointer = saver
    trainer.register_hooks(
        [
            slow,
            EvalHook(4, evaluate),
            BestCheckpointer(saver, "accuracy", "max"),
            PeriodicWriter([JSONWriter(folder / "metrics.json")], 1),
            PeriodicCheckpointer(saver, 4),
            CallbackHook(after_step=kill, phase="end"),
            Hours(),
        ]
    )
    return trainer


def parts(caplog: pytest.LogCaptureFixture) -> dict[str, tuple[str, float]]:
    found = re.findall(r"(\w+): (\S+), (\S+) %", caplog.text)
    return {name: (text, float(share)) for name, text, share in found}


def test_the_parts_of_a_run_that_was_killed_and_resumed_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hooktrain.engine.hooks.hours")
    killed = trainer_in(tmp_path, kill_at=6)
    with pytest.raises(KeyboardInterrupt):
        killed.train(0, 12)
    caplog.clear()
    resumed = trainer_in(tmp_path)
    resumed.checkpointer.resume_or_load("")
    assert resumed.done == 4
    resumed.train(max_iter=12)
    # 12 steps, 3 evaluations, and iterations 4 to 6 again. Of the saves the one of the best and
    # those at 8 and 12: no checkpoint has its own.
    total = 48 + 21 + 9 + 12
    assert parts(caplog) == {
        "step": ("0:00:48", round(4800 / total, 1)),
        "evaluation": ("0:00:21", round(2100 / total, 1)),
        "save": ("0:00:09", round(900 / total, 1)),
        "again": ("0:00:12", round(1200 / total, 1)),
        "data": ("0:00:00", 0.0),
    }


class Steady(HookBase):
    """Lets a step take 1 second up to iteration 8, and then 2; an evaluation takes 100."""

    now = 0.0

    def before_train(self) -> None:
        self.trainer.clock.read = lambda: self.now

    def before_step(self) -> None:
        self.now += 1 if self.trainer.iter < 9 else 2

    def after_step(self) -> None:
        self.now += 100


def test_rates_are_those_of_the_steps_of_a_period_and_stand_in_the_row_of_its_end(
    tmp_path: Path,
) -> None:
    rates = Hours(samples_per_second=64, mfu=0.5)
    file = tmp_path / "metrics.json"
    writer = PeriodicWriter([JSONWriter(file, window_size=1)], 5)
    trainer = linear_trainer(Steady(), writer, rates, gather_metric_period=5)
    trainer.train(0, 15)
    rows = load_json_metrics(file)
    found = [(r["iteration"], r.get("samples_per_second"), r.get("mfu")) for r in rows]
    assert found == [(4, None, None), (9, 64.0, 0.5), (14, 32.0, 0.25)]

    trainer.train(max_iter=26)  # from the middle of a period
    history = trainer.storage.history("samples_per_second").values()
    assert history == [(64.0, 9), (32.0, 14), (32.0, 24)]


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

    trainer = linear_trainer(
        SlowDevice(),
        CallbackHook(after_step=look),
        Hours(samples_per_second=8),
        gather_metric_period=10,
    )
    trainer.train(0, 200)
    history = trainer.storage.history("samples_per_second").values()
    assert [round(rate) for rate, _ in history[1:]] == [400] * 18
    assert due == [50, 100, 150, 200]
    assert round(trainer.clock.own, 2) == 4.0


def test_the_clock_goes_on_in_a_resumed_run() -> None:
    def make() -> Any:
        return linear_trainer(Steady(), EvalHook(2, lambda: {"accuracy": 1.0}))

    first, second = make(), make()
    first.train(0, 4)
    second.load_state_dict(first.state_dict())
    assert second.clock.own == 4.0
    second.train(max_iter=6)
    assert second.clock.own == 6.0
    assert second.clock.pauses == {"evaluation": 0.0}


def test_without_the_hook_nothing_is_recorded() -> None:
    trainer = linear_trainer(IterationTimer(), EvalHook(2, lambda: {"accuracy": 1.0}))
    trainer.train(0, 6)
    assert "samples_per_second" not in trainer.storage.histories()
