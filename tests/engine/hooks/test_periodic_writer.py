import errno
import json
import logging
import math
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer
from torch import nn

from hooktrain.checkpoint import Checkpointer
from hooktrain.engine.hooks import (
    CallbackHook,
    EvalHook,
    PeriodicCheckpointer,
    PeriodicWriter,
    Preemption,
)
from hooktrain.utils import comm
from hooktrain.utils.events import (
    CommonMetricPrinter,
    EventWriter,
    JSONWriter,
    TensorboardXWriter,
    get_event_storage,
    load_json_metrics,
)
from toys import Idle


class Recorder(EventWriter):
    def __init__(self, fail_at: int = -1) -> None:
        self.log: list[str] = []
        self.fail_at = fail_at

    def write(self) -> None:
        self.log.append(f"write {get_event_storage().iter}")
        if get_event_storage().iter == self.fail_at:
            raise OSError("disk on fire")

    def close(self) -> None:
        self.log.append("close")

    def rewind(self, iteration: int) -> None:
        self.log.append(f"rewind {iteration}")


@pytest.mark.parametrize(("period", "within"), [(3, ["write 2", "write 5"]), (0, [])])
def test_writers_write_each_period_at_the_last_iteration_and_at_the_end(
    period: int, within: list[str]
) -> None:
    writer = Recorder()
    Idle(PeriodicWriter([writer], period=period)).train(2, 8)
    assert writer.log == ["rewind 2", *within, "write 7", "write 8", "close"]


def test_values_of_the_end_of_training_reach_the_file(tmp_path: Path) -> None:
    put = CallbackHook(
        after_step=lambda t: t.storage.put_scalar("x", t.iter, smoothing_hint=False),
        after_train=lambda t: t.storage.put_scalar("final", 1.0),
    )
    Idle(put, PeriodicWriter([JSONWriter(str(tmp_path / "m.json"))], period=20)).train(
        0, 50
    )
    lines = [
        json.loads(line) for line in (tmp_path / "m.json").read_text().splitlines()
    ]
    assert [line["iteration"] for line in lines] == [19, 39, 49, 50]
    assert lines[-1] == {"iteration": 50, "final": 1.0}


def test_every_writer_is_closed_even_if_one_fails_at_the_end_and_the_error_comes_back() -> (
    None
):
    first, second = Recorder(fail_at=3), Recorder()
    with pytest.raises(OSError, match="disk on fire"):
        Idle(PeriodicWriter([first, second], period=100)).train(0, 3)
    assert first.log == second.log == ["rewind 0", "write 2", "write 3", "close"]


def train(folder: Path, preempted_at: int = -1, broken_at: int = -1) -> None:
    """60 iterations, or those that are left."""

    def put(trainer: Any) -> None:
        if trainer.iter == broken_at:
            raise ValueError("broken")
        trainer.storage.put_scalar("loss", math.sin(trainer.iter))
        trainer.storage.put_scalar("lr", 1 / (1 + trainer.iter), smoothing_hint=False)
        if trainer.iter == preempted_at:
            signal.raise_signal(signal.SIGTERM)

    trainer = Idle()
    checkpointer = Checkpointer(nn.Linear(1, 1), folder, trainer=trainer)
    writers = [JSONWriter(folder / "metrics.json"), TensorboardXWriter(folder)]
    trainer.register_hooks(
        [
            CallbackHook(after_step=put),
            EvalHook(
                3, lambda: {"accuracy": trainer.iter / 100}, eval_after_train=False
            ),
            PeriodicWriter(writers, period=20),
            PeriodicCheckpointer(checkpointer, period=8),
            Preemption(checkpointer),
        ]
    )
    checkpointer.resume_or_load("", resume=True)
    with suppress(SystemExit, ValueError):
        trainer.train(max_iter=60)


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {
        n: [(e.step, e.value) for e in events.Scalars(n)]
        for n in events.Tags()["scalars"]
    }


@pytest.mark.parametrize(
    "how",
    [
        *({"preempted_at": i} for i in (10, 19, 30, 59)),
        {"broken_at": 32},
        {"broken_at": 34},
    ],
)
def test_a_preempted_or_failed_run_ends_with_each_evaluation_and_the_rows_of_an_undisturbed_one(
    how: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Count files from 0: within a second TensorBoard reads the tenth before the ninth.
    monkeypatch.setattr(
        event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0)
    )
    once, twice = tmp_path / "once", tmp_path / "twice"
    train(once)
    lines = load_json_metrics(once / "metrics.json")
    assert [m["iteration"] for m in lines if "accuracy" in m] == list(range(2, 60, 3))
    assert [m["iteration"] for m in lines if "loss" in m or "lr" in m] == [19, 39, 59]

    train(twice, **how)
    train(twice)
    assert (twice / "metrics.json").read_text() == (once / "metrics.json").read_text()
    assert points(twice) == points(once)
    assert len(points(once)["accuracy"]) == 20


class Full(Recorder):
    """Finds the disk full in iterations 2 and 3."""

    def write(self) -> None:
        super().write()
        if get_event_storage().iter in (2, 3):
            raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_logged_and_tried_again_and_an_error_at_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    writer = Full()
    Idle(PeriodicWriter([writer], period=1)).train(0, 5)
    assert writer.log[-3:] == ["write 4", "write 5", "close"]
    assert caplog.text.count("Full: NOT WRITTEN") == 2
    with pytest.raises(OSError, match="No space left"):
        Idle(PeriodicWriter([Full()], period=9)).train(0, 3)


@pytest.mark.parametrize(("ranks", "warned"), [(1, False), (2, True)])
def test_a_period_between_the_exchanges_of_the_ranks_is_worth_a_warning(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    ranks: int,
    warned: bool,
) -> None:
    trainer = Idle(hook := PeriodicWriter([], period=10))
    trainer.sync_period = 20
    monkeypatch.setattr(comm, "get_world_size", lambda: ranks)
    hook.before_train()
    told = "every 10 iterations, but the ranks bring theirs together every 20"
    assert (told in caplog.text) is warned


def test_a_printer_that_was_not_told_the_end_learns_it_in_each_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = Idle(PeriodicWriter([CommonMetricPrinter()], period=5))
    with caplog.at_level(logging.INFO):
        trainer.train(0, 10)
        trainer.train(max_iter=20)
    lines = [message for message in caplog.messages if "iter: " in message]
    assert [line[:4] for line in lines] == ["iter", "eta:", "iter", "eta:"]
