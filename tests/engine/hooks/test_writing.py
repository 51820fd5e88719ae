import errno
import logging
import math
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer
from torch import distributed as dist, nn
from torch.nn.parallel import DistributedDataParallel

from gloo import run_ranks
from hooktrain.checkpoint import Checkpointer
from hooktrain.data import build_train_loader
from hooktrain.engine import HookBase, SimpleTrainer
from hooktrain.engine.hooks import (
    BestCheckpointer,
    CallbackHook,
    EarlyStopping,
    EvalHook,
    IterationTimer,
    PeriodicCheckpointer,
    PeriodicWriter,
    Preemption,
)
from hooktrain.events import (
    CommonMetricPrinter,
    EventWriter,
    FunctionWriter,
    JSONWriter,
    TensorboardXWriter,
    get_event_storage,
    load_json_metrics,
)
from toys import Idle, LinearLoss, batches, linear_trainer, sgd


def take(clock: SimpleNamespace, seconds: float) -> Callable[[object], None]:
    def advance(_: object) -> None:
        clock.now += seconds

    return advance


def test_times_of_the_steps_are_recorded_after_the_warm_up(
    clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Idle(
        IterationTimer(warmup_iter=3),
        CallbackHook(after_backward=take(clock, 2.0), after_step=take(clock, 0.5)),
    )
    with caplog.at_level(logging.INFO):
        trainer.train(0, 8)
    assert trainer.storage.history("time").values() == [(2.0, i) for i in range(3, 8)]
    told = "Total training time: 0:00:16 for 8 iterations (steps 0:00:16)"
    assert told in caplog.messages


def test_a_resumed_run_records_every_time(clock: SimpleNamespace) -> None:
    step = CallbackHook(after_backward=take(clock, 2.0))
    trainer = Idle(IterationTimer(warmup_iter=3), step)
    trainer.train(10, 15)
    assert trainer.storage.history("time").values() == [(2.0, i) for i in range(10, 15)]


def test_the_time_of_a_run_that_was_killed_and_resumed_is_told_by_its_parts(
    clock: SimpleNamespace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A step takes 4 seconds, an evaluation 7, a save 3."""

    class SlowCheckpointer(Checkpointer):
        def save(self, *args: Any, **options: Any) -> None:
            super().save(*args, **options)
            clock.now += 3

    def make(*hooks: CallbackHook) -> tuple[SimpleTrainer, Checkpointer]:
        def evaluate() -> dict[str, float]:
            clock.now += 7
            return {"accuracy": 0.5}

        trainer = linear_trainer(CallbackHook(after_backward=take(clock, 4)), *hooks)
        saver = SlowCheckpointer(trainer.model, str(tmp_path), trainer=trainer)
        trainer.register_hooks(
            [
                IterationTimer(),
                EvalHook(4, evaluate),
                BestCheckpointer(saver, "accuracy", "max"),
                PeriodicCheckpointer(saver, 4),
            ]
        )
        return trainer, saver

    kill = CallbackHook(before_step=lambda t: 1 // (t.iter != 6))
    with pytest.raises(ZeroDivisionError):
        make(kill)[0].train(0, 12)
    trainer, saver = make()
    saver.resume_or_load("")
    with caplog.at_level(logging.INFO):
        trainer.train(max_iter=12)
    # Of the saves those of the best and at 8 and 12: no checkpoint has its own.
    parts = "steps 0:00:48, evaluation 0:00:21, save 0:00:09"
    assert f"Total training time: 0:01:18 for 12 iterations ({parts})" in caplog.text


@pytest.mark.parametrize(
    ("stop_at", "is_sharded", "best"),
    [
        (-1, False, "The best accuracy is 9, from iteration 2, in model_best.pth"),
        (3, True, "The best accuracy is 9, from iteration 2, in model_best"),
    ],
)
def test_the_best_model_is_named_at_the_end(
    stop_at: int,
    is_sharded: bool,
    best: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def work(trainer: Any) -> None:
        if trainer.iter == stop_at:
            trainer.request_stop("tired")

    trainer = Idle(CallbackHook(after_backward=work))
    saver = Checkpointer(nn.Linear(1, 1), tmp_path, sharded=is_sharded)
    evaluate = EvalHook(3, lambda: {"accuracy": 9.0 if trainer.iter == 2 else 1.0})
    best_model = BestCheckpointer(saver, "accuracy", "max")
    trainer.register_hooks([evaluate, best_model])
    with caplog.at_level(logging.INFO):
        trainer.train(max_iter=8)
    assert f"{best}; the model has the last weights" in caplog.messages


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
def test_writers_write_each_period_and_at_the_end(
    period: int, within: list[str]
) -> None:
    writer = Recorder()
    Idle(PeriodicWriter([writer], period=period)).train(2, 8)
    assert writer.log == ["rewind 2", *within, "write 7", "write 8", "close"]


def test_every_writer_is_closed_even_if_one_fails() -> None:
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
    evaluate = lambda: {"accuracy": trainer.iter / 100}  # noqa: E731
    trainer.register_hooks(
        [
            CallbackHook(after_step=put),
            EvalHook(3, evaluate, eval_after_train=False),
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
    names = events.Tags()["scalars"]
    return {n: [(e.step, e.value) for e in events.Scalars(n)] for n in names}


@pytest.mark.parametrize(
    "how", [*({"preempted_at": i} for i in (10, 19, 30, 59)), {"broken_at": 32}]
)
def test_the_files_of_a_resumed_run_are_those_of_an_undisturbed_one(
    how: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Count files from 0: within a second TensorBoard reads the tenth before the ninth.
    counter = event_file_writer.AtomicCounter(0)
    monkeypatch.setattr(event_file_writer, "_global_uid", counter)
    once, twice = tmp_path / "once", tmp_path / "twice"
    train(once)
    lines = load_json_metrics(once / "metrics.json")
    assert [m["iteration"] for m in lines if "accuracy" in m] == list(range(2, 60, 3))
    assert [m["iteration"] for m in lines if "lr" in m] == [19, 39, 59]

    train(twice, **how)
    train(twice)
    assert (twice / "metrics.json").read_text() == (once / "metrics.json").read_text()
    assert points(twice) == points(once)
    assert len(points(once)["accuracy"]) == 20


def train_with_four(folder: Path, end: int, log: list[Any]) -> Any:
    """Two files and two functions, each with a period of its own."""

    def put(trainer: Any) -> None:
        trainer.storage.put_scalar("loss", math.sin(trainer.iter))

    def note(period: int) -> FunctionWriter:
        def take(metrics: Any, step: int) -> None:
            log.append((period, step))

        return FunctionWriter(take, name=f"every {period}")

    trainer = Idle(CallbackHook(after_step=put))
    checkpointer = Checkpointer(nn.Linear(1, 1), folder, trainer=trainer)
    for period, name in ((2, "often"), (5, "seldom")):
        file = JSONWriter(folder / f"{name}.json")
        trainer.register_hooks([PeriodicWriter([file, note(period)], period)])
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, 3)])
    checkpointer.resume_or_load("")
    trainer.train(max_iter=end)
    return trainer


def test_writers_of_several_names_go_on_each_by_itself(tmp_path: Path) -> None:
    logs: tuple[list[Any], ...] = ([], [])
    train_with_four(tmp_path / "once", 12, logs[0])
    train_with_four(tmp_path / "twice", 9, logs[1])
    (tmp_path / "twice" / "model_final.pth").unlink()  # the run goes back to 5
    del logs[1][:]
    train_with_four(tmp_path / "twice", 12, logs[1])
    for name in ("often.json", "seldom.json"):
        once, twice = (tmp_path / run / name for run in ("once", "twice"))
        assert twice.read_text() == once.read_text()
    assert logs[1] == [entry for entry in logs[0] if entry[1] > 5]


def test_two_writers_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    both = [JSONWriter(path), JSONWriter(tmp_path / "other" / "metrics.json")]
    with pytest.raises(ValueError, match=r"named 'metrics\.json'.*attribute 'name'"):
        Idle(PeriodicWriter(both[:1]), PeriodicWriter(both[1:])).train(0, 1)
    assert not path.exists()
    both[1].name = "other"
    put = CallbackHook(after_step=lambda t: t.storage.put_scalar("loss", 1.0))
    Idle(put, PeriodicWriter(both)).train(0, 1)
    assert (
        path.read_bytes() == (tmp_path / "other" / "metrics.json").read_bytes() != b""
    )
    path.unlink()
    trainer = Idle(PeriodicWriter(both[:1], 2), PeriodicWriter(both[:1], 3))
    trainer.train(0, 4)  # one writer with two periods
    assert list(trainer.storage.info) == ["metrics.json"]


class Full(Recorder):
    """Finds the disk full in iterations 2 and 3."""

    def write(self) -> None:
        super().write()
        if get_event_storage().iter in (2, 3):
            raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_an_error_at_the_end_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    writer = Full()
    Idle(PeriodicWriter([writer], period=1)).train(0, 5)
    assert writer.log[-3:] == ["write 4", "write 5", "close"]
    assert caplog.text.count("Full: NOT WRITTEN") == 2
    with pytest.raises(OSError, match="No space left"):
        Idle(PeriodicWriter([Full()], period=9)).train(0, 3)


class Service:
    """A tracker that is away up to some iteration."""

    def __init__(self, back_at: float) -> None:
        self.back_at = back_at
        self.rows: list[tuple[int, float]] = []

    def log(self, metrics: dict[str, float], step: int) -> None:
        if get_event_storage().iter < self.back_at:
            raise ConnectionError("the service is away")
        self.rows.append((step, metrics["loss"]))


def train_with_a_service(folder: Path, service: Service) -> None:
    def put(trainer: Any) -> None:
        trainer.storage.put_scalar("loss", float(trainer.iter))

    trainer = Idle(CallbackHook(after_step=put))
    checkpointer = Checkpointer(nn.Linear(1, 1), folder, trainer=trainer)
    writers = [FunctionWriter(service.log, 1), JSONWriter(folder / "metrics.json")]
    save = PeriodicCheckpointer(checkpointer, 2)
    trainer.register_hooks([PeriodicWriter(writers, 2), save])
    checkpointer.resume_or_load("")
    trainer.train(max_iter=8)


SERVED = [(1, 1.0), (3, 3.0), (5, 5.0), (7, 7.0)]


def test_a_tracker_that_is_away_ends_no_run_and_gets_all_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service = Service(back_at=5)
    train_with_a_service(tmp_path, service)
    assert service.rows == SERVED
    assert caplog.text.count("the service is away") == 2  # once a period
    rows = load_json_metrics(tmp_path / "metrics.json")
    assert [row["iteration"] for row in rows] == [1, 3, 5, 7]


def test_what_a_tracker_has_missed_is_told_at_the_end_and_delivered_by_a_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train_with_a_service(tmp_path, Service(math.inf))
    assert "NOT WRITTEN" in caplog.messages[-1]
    caplog.clear()
    service = Service(0)
    train_with_a_service(tmp_path, service)
    assert service.rows == SERVED
    assert not caplog.messages


def test_a_tracker_that_cannot_be_closed_ends_no_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Stuck(FunctionWriter):
        def close(self) -> None:
            raise ConnectionError("stuck")

    Idle(PeriodicWriter([Stuck(print)])).train(0, 2)
    assert "stuck" in caplog.text


def test_a_printer_learns_the_end_of_each_run(caplog: pytest.LogCaptureFixture) -> None:
    trainer = Idle(PeriodicWriter([CommonMetricPrinter()], period=5))
    with caplog.at_level(logging.INFO):
        trainer.train(0, 10)
        trainer.train(max_iter=20)
    lines = [message for message in caplog.messages if "iter: " in message]
    assert [line[:4] for line in lines] == ["iter", "eta:", "iter", "eta:"]


def train_linear(folder: Path, bend: float = 0.0, dies_at: int = -1) -> None:
    """40 iterations, or those that are left, on all ranks; a weight may be bent at the start."""
    model: Any = LinearLoss()
    weight = model.fc.weight
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    samples = list(batches(1, 32)[0])
    loader = build_train_loader(samples, total_batch_size=4, num_workers=0, seed=1)
    trainer = SimpleTrainer(model, loader, sgd(model, lr=0.01))
    checkpointer = Checkpointer(model, folder, trainer=trainer)

    def die(trainer: Any) -> None:
        if trainer.iter == dies_at:
            raise RuntimeError("killed")

    writers = [JSONWriter(folder / "metrics.json")]
    trainer.register_hooks(
        [
            CallbackHook(before_step=die),
            PeriodicWriter(writers, period=10),
            PeriodicCheckpointer(checkpointer, period=18),
        ]
    )
    checkpointer.resume_or_load("")
    weight.data.view(-1)[4] *= 1 + bend
    with suppress(RuntimeError):
        trainer.train(max_iter=40)


def verdicts(folder: Path) -> list[str]:
    """What is logged when killed runs go on: one as it was, and one with a bent weight."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("hooktrain.events")
    for bend in (0.0, 1e-7):
        out = folder / str(bend)
        train_linear(out, dies_at=33)
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        train_linear(out, bend)
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    return [text for text in said if "esumed exactly" in text]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resume_proves_itself_and_finds_a_weight_that_is_bent_by_one_bit(
    ranks: int, tmp_path: Path
) -> None:
    if ranks == 1:
        said = verdicts(tmp_path)
    else:
        said, nothing = run_ranks(verdicts, 2, tmp_path)
        assert nothing == []  # the main process speaks
    exact, warning = said
    # Two ranks exchange losses every 20 iterations only.
    assert exact == f"Resumed exactly: {3 - ranks} rows computed again are equal"
    assert "mean_loss of iteration 19" in warning


def test_an_early_stop_writes_no_row_behind_its_last_one(tmp_path: Path) -> None:
    def evaluate() -> dict[str, float]:
        return {"accuracy": 1.0}

    file = tmp_path / "metrics.json"
    trainer = linear_trainer(
        EvalHook(2, evaluate),
        EarlyStopping("accuracy", "max", patience=1),
        PeriodicWriter([CommonMetricPrinter(), JSONWriter(file)], period=2),
    )
    trainer.train(max_iter=20)
    assert trainer.done == 4
    assert [row["iteration"] for row in load_json_metrics(file)] == [1, 3]


@pytest.mark.parametrize(("phase", "is_late"), [("run", False), ("end", True)])
def test_a_metric_that_is_put_after_the_writers_is_told_of_once(
    phase: str, is_late: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"metric of the phase {phase}"

    class Put(HookBase):
        def after_step(self) -> None:
            self.trainer.storage.put_scalar(name, 1.0)

    put = Put()
    put.phase = phase
    trainer = Idle(PeriodicWriter([JSONWriter(tmp_path / "metrics.json")], 2), put)
    evaluation = EvalHook(2, lambda: {"accuracy": 1.0})
    trainer.register_hooks([evaluation])
    with caplog.at_level(logging.INFO):
        trainer.train(0, 6)
    told = [m for m in caplog.messages if "recorded after the writers" in m]
    assert len(told) == is_late
    assert all(repr(name) in m for m in told)
    rows = load_json_metrics(tmp_path / "metrics.json")
    at = [row["iteration"] for row in rows if name in row]
    assert at == ([0, 2, 4, 5] if is_late else [1, 3, 5])


def test_no_metric_is_late_in_a_run_that_goes_back_to_an_iteration_that_was_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put = CallbackHook(after_step=lambda t: t.storage.put_scalar("again", 1.0))
    trainer = Idle(put, PeriodicWriter([JSONWriter(tmp_path / "metrics.json")], 2))
    with caplog.at_level(logging.INFO):
        trainer.train(0, 4)
        trainer.load_state_dict({**trainer.state_dict(), "iteration": 1})
        trainer.train(max_iter=4)
    assert "recorded after the writers" not in caplog.text


@pytest.mark.parametrize("stops_at", [None, 4])
def test_a_finished_run_that_is_extended_keeps_the_row_of_its_last_evaluation(
    stops_at: int | None, tmp_path: Path
) -> None:
    def train(max_iter: int, stops_at: int | None = None) -> None:
        def stop(trainer: Any) -> None:
            if trainer.iter == stops_at:
                trainer.request_stop("enough")

        trainer = Idle(CallbackHook(after_step=stop))
        saver = Checkpointer(nn.Linear(1, 1), tmp_path, trainer=trainer)
        trainer.register_hooks(
            [
                EvalHook(4, lambda: {"accuracy": float(trainer.done)}),
                PeriodicWriter([JSONWriter(tmp_path / "metrics.json")], 4),
                PeriodicCheckpointer(saver, 4),
            ]
        )
        saver.resume_or_load("")
        trainer.train(max_iter=max_iter)

    train(7, stops_at)
    end = 5 if stops_at else 7
    for max_iter in (end, 9):  # it is complete, and then goes on
        train(max_iter)
    rows = load_json_metrics(tmp_path / "metrics.json")
    assert [row["iteration"] for row in rows] == [3, end - 1, 7, 8]
    assert [row["accuracy"] for row in rows] == [4, end, 8, 9]


@pytest.mark.parametrize("background", [False, True])
def test_rows_are_on_the_disk_before_the_checkpoint_that_counts_them(
    background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.json"
    flushed: list[str] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if name == str(path):
            flushed.append("rows")
            assert len(load_json_metrics(path)) >= 2 * flushed.count("rows")
        elif "model_" in name:
            flushed.append("model")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    put = CallbackHook(after_step=lambda t: t.storage.put_scalar("loss", 0.5))
    trainer = Idle(put, PeriodicWriter([JSONWriter(path)], 1))
    model = nn.Linear(1, 1)
    saver = Checkpointer(model, tmp_path, background=background, trainer=trainer)
    trainer.register_hooks([PeriodicCheckpointer(saver, 2)])
    trainer.train(0, 4)
    assert flushed == ["rows", "model"] * 2
