import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from filelock import FileLock, Timeout
from fsspec.implementations.memory import MemoryFileSystem

from gloo import run_ranks
from hooktrain.checkpoint import Checkpointer, checkpointer, folders
from hooktrain.checkpoint.files import write_file
from hooktrain.checkpoint.loading import read_checkpoint
from hooktrain.engine import HookBase, SimpleTrainer, StepTrainer
from hooktrain.engine.hooks import (
    CallbackHook,
    EvalHook,
    PeriodicCheckpointer,
    Preemption,
    preemption,
)
from hooktrain.utils import comm
from toys import ToyModel, batch, linear_trainer, sgd_wrapper


def signal_at(number: int, iteration: int, rank: int = 0) -> HookBase:
    def send(trainer: Any) -> None:
        if trainer.iter == iteration and comm.get_rank() == rank:
            signal.raise_signal(number)

    return CallbackHook(after_backward=send)


def preemptible(
    folder: Path,
    *hooks: HookBase,
    gather_metric_period: int = 1,
    period: int = 4,
    **options: Any,
) -> SimpleTrainer:
    trainer = linear_trainer(*hooks, gather_metric_period=gather_metric_period)
    saver = Checkpointer(trainer.model, folder, trainer=trainer, **options)
    trainer.register_hooks([PeriodicCheckpointer(saver, period), Preemption(saver)])
    saver.resume_or_load("")
    return trainer


def pointer(folder: Path) -> str:
    return (folder / "last_checkpoint").read_text()


def handlers() -> list[Any]:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    return [signal.getsignal(number) for number in numbers]


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)],
)
def test_a_signal_saves_at_the_end_of_the_iteration(
    tmp_path: Path, number: int, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    before, evaluated = handlers(), []
    evaluate = EvalHook(0, lambda: evaluated.append(True))
    trainer = preemptible(tmp_path, evaluate, signal_at(number, 5))
    with pytest.raises(SystemExit) as caught:
        trainer.train(max_iter=10)
    assert caught.value.code == code
    assert (trainer.iter, trainer.max_iter) == (5, 10)
    assert not evaluated
    assert pointer(tmp_path) == "model_0000005.pth"
    assert not (tmp_path / "model_final.pth").exists()
    assert handlers() == before
    assert capfd.readouterr().err.count("A second signal ends it at once") == 1


def test_under_nohup_a_closed_terminal_changes_nothing(tmp_path: Path) -> None:
    trainer = preemptible(tmp_path, signal_at(signal.SIGHUP, 5))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        trainer.train(max_iter=10)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert trainer.succeeded


def test_of_two_hooks_the_first_one_listens(tmp_path: Path) -> None:
    before = handlers()
    trainer = preemptible(tmp_path, signal_at(signal.SIGTERM, 5))
    trainer.register_hooks([Preemption(Checkpointer(trainer.model))])
    with pytest.raises(SystemExit):
        trainer.train(max_iter=10)
    assert pointer(tmp_path) == "model_0000005.pth"
    assert handlers() == before


def test_it_names_and_keeps_checkpoints_as_the_run_does(tmp_path: Path) -> None:
    for at in (1, 4, 7):
        trainer = linear_trainer(signal_at(signal.SIGTERM, at))
        saver = Checkpointer(trainer.model, tmp_path, trainer=trainer)
        best = PeriodicCheckpointer(Checkpointer(trainer.model), 1, file_prefix="best")
        saving = PeriodicCheckpointer(saver, 100, max_to_keep=2, file_prefix="net")
        trainer.register_hooks([best, saving, Preemption(saver)])
        saver.resume_or_load("")
        with pytest.raises(SystemExit):
            trainer.train(max_iter=10)
    names = sorted(path.name for path in tmp_path.glob("*.pth"))
    assert names == ["net_0000004.pth", "net_0000007.pth"]


def test_without_a_periodic_checkpointer_it_saves_too(tmp_path: Path) -> None:
    trainer = linear_trainer(signal_at(signal.SIGTERM, 1))
    saver = Checkpointer(trainer.model, tmp_path, trainer=trainer)
    trainer.register_hooks([Preemption(saver)])
    with pytest.raises(SystemExit):
        trainer.train(max_iter=10)
    assert pointer(tmp_path) == "model_0000001.pth"


# The ranks know of it at the next exchange, which is that of the last iteration.
@pytest.mark.parametrize(("ranks", "iteration"), [(1, 7), (2, 5)])
def test_a_signal_in_the_last_iteration_lets_the_run_finish(
    ranks: int, iteration: int, tmp_path: Path
) -> None:
    assert run_ranks(finish, ranks, tmp_path, iteration) == [(True, 1)] * ranks
    files = sorted(path.name for path in tmp_path.glob("*.pth"))
    assert files == ["model_0000003.pth", "model_final.pth"]


def finish(folder: Path, iteration: int) -> tuple[bool, int]:
    evaluated: list[bool] = []
    evaluate = EvalHook(0, lambda: evaluated.append(True))
    signals = signal_at(signal.SIGTERM, iteration)
    trainer = preemptible(folder, evaluate, signals, gather_metric_period=4)
    trainer.train(max_iter=8)
    return trainer.succeeded, len(evaluated)


@pytest.mark.parametrize(
    "options", [{}, {"background": True}, {"background": True, "sharded": True}]
)
@pytest.mark.parametrize("is_full", [False, True])
def test_an_iteration_that_is_saved_anyway_is_saved_once_unless_the_disk_was_full(
    is_full: bool,
    options: dict[str, bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved = []
    writer = folders if "sharded" in options else checkpointer
    name = "save_folder" if "sharded" in options else "write_file"
    write = getattr(writer, name)

    def note(state: Any, path: str, *args: Any) -> None:
        saved.append(Path(path).stem)
        if is_full and len(saved) == 1:
            raise OSError(errno.ENOSPC, "full", path)
        write(state, path, *args)

    monkeypatch.setattr(writer, name, note)
    trainer = preemptible(tmp_path, signal_at(signal.SIGTERM, 3), **options)
    with pytest.raises(SystemExit):
        trainer.train(max_iter=10)
    assert saved == ["model_0000003"] * (1 + is_full)
    assert pointer(tmp_path).startswith("model_0000003")


def test_with_a_store_the_process_ends_when_all_is_there_or_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = "memory://bucket/preempted"
    trainer = preemptible(tmp_path / "a", signal_at(signal.SIGTERM, 5), store=store)
    with pytest.raises(SystemExit):
        trainer.train(max_iter=10)
    assert preemptible(tmp_path / "b", store=store).done == 6

    def refuse(*_: Any) -> None:
        raise PermissionError("refused")

    monkeypatch.setattr(MemoryFileSystem, "put_file", refuse)
    trainer = preemptible(tmp_path / "b", signal_at(signal.SIGTERM, 8), store=store)
    with pytest.raises(PermissionError):
        trainer.train(max_iter=20)
    assert preemptible(tmp_path / "b", store=store).done == 9
    MemoryFileSystem.store.clear()


def test_a_run_that_begins_anew_is_saved_again(tmp_path: Path) -> None:
    trainer = linear_trainer(signal_at(signal.SIGTERM, 3))
    trainer.register_hooks([Preemption(Checkpointer(trainer.model, tmp_path))])
    for _ in range(2):  # as in a notebook
        with pytest.raises(SystemExit):
            trainer.train(0, max_iter=10)
        (tmp_path / "model_0000003.pth").unlink()


@pytest.mark.parametrize("again", ["in a new process", "as in a notebook"])
@pytest.mark.parametrize("iteration", [3, 7])
def test_a_preempted_run_goes_on_bit_for_bit(
    iteration: int, again: str, tmp_path: Path
) -> None:
    expected = linear_trainer()
    expected.train(max_iter=10)
    before = handlers()
    trainer = preemptible(tmp_path, signal_at(signal.SIGTERM, iteration))
    with pytest.raises(SystemExit):
        trainer.train(max_iter=10)
    if again == "in a new process":
        trainer = preemptible(tmp_path)  # its four batches begin anew
    trainer.train(max_iter=10)
    assert (trainer.start_iter, trainer.iter) == (iteration + 1, 10)
    assert torch.equal(trainer.model.fc.weight, expected.model.fc.weight)
    assert handlers() == before  # also without a signal


@pytest.mark.parametrize("reason", ["preempted by SIGTERM", "preempted by hand"])
def test_a_stop_that_somebody_else_asks_for_is_no_preemption(
    tmp_path: Path, reason: str
) -> None:
    stop = CallbackHook(after_step=lambda t: t.request_stop(reason))
    trainer = preemptible(tmp_path, stop)
    trainer.train(max_iter=10)
    assert trainer.succeeded
    assert pointer(tmp_path) == "model_final.pth"


def test_a_signal_saves_also_if_stderr_is_closed(tmp_path: Path) -> None:
    def ask(trainer: Any) -> None:
        stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_RDONLY)
        os.dup2(nowhere, 2)  # what is written there fails
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            os.close(nowhere)

    trainer = preemptible(tmp_path, CallbackHook(after_backward=ask))
    with pytest.raises(SystemExit):
        trainer.train(max_iter=2)
    assert pointer(tmp_path) == "model_0000000.pth"


def test_a_second_signal_ends_at_once_by_the_handlers_from_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(preemption.time, "monotonic", lambda: clock[0])
    seen = []

    def interrupt(_: Any) -> None:
        for clock[0] in (0.0, 0.9, 1.1):  # the second one is handed on by a launcher
            signal.raise_signal(signal.SIGINT)
            seen.append(clock[0])

    trainer = preemptible(tmp_path, CallbackHook(after_backward=interrupt))
    # A shell has its background jobs ignore SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        trainer.train(max_iter=2)
    signal.signal(signal.SIGINT, before)
    assert seen == [0.0, 0.9]
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_dies_of_the_signal_as_without_the_hook(tmp_path: Path) -> None:
    statuses = []

    def fork(trainer: Any) -> None:
        if trainer.iter == 1:
            child = os.fork()
            if child == 0:
                signal.raise_signal(signal.SIGTERM)
                os._exit(0)
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    trainer = preemptible(tmp_path, CallbackHook(after_backward=fork))
    trainer.train(max_iter=3)
    assert statuses == [-signal.SIGTERM]
    assert trainer.succeeded


def accumulating(folder: Path, *hooks: HookBase) -> StepTrainer:
    torch.manual_seed(0)
    model = ToyModel()
    wrapper = sgd_wrapper(model, accumulative_counts=3)
    trainer = StepTrainer(model, [batch(4, i) for i in range(3)], wrapper)
    saver = Checkpointer(model, folder, trainer=trainer)
    trainer.register_hooks([*hooks, Preemption(saver)])
    saver.resume_or_load("")
    return trainer


@pytest.mark.parametrize(("at", "end"), [(3, 5), (4, 5), (5, 5)])
def test_inside_of_an_accumulation_a_signal_waits_for_its_end(
    at: int, end: int, tmp_path: Path
) -> None:
    whole = accumulating(tmp_path / "whole")
    whole.train(max_iter=9)
    send = CallbackHook(
        before_step=lambda t: t.iter == at and signal.raise_signal(signal.SIGTERM)
    )
    trainer = accumulating(tmp_path, send)
    with pytest.raises(SystemExit):
        trainer.train(max_iter=9)
    assert pointer(tmp_path) == f"model_000000{end}.pth"
    resumed = accumulating(tmp_path)
    resumed.train(max_iter=9)
    assert torch.equal(resumed.model.linear.weight, whole.model.linear.weight)


def test_in_another_thread_it_says_that_it_ignores_signals(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, before = preemptible(tmp_path), handlers()
    thread = threading.Thread(target=trainer.train, kwargs={"max_iter": 2})
    thread.start()
    thread.join()
    assert trainer.iter == 2
    assert handlers() == before
    assert "SIGTERM ends the run at once" in caplog.text


def test_the_process_outlives_what_it_saves_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited, waits = threading.Event(), []
    real_wait = Checkpointer.wait

    def save_late(*args: Any) -> None:
        assert waited.wait(30)
        write_file(*args)

    def wait(saver: Checkpointer) -> None:
        waits.append(saver)
        if len(waits) == 2:  # the first one is before the save
            waited.set()
        real_wait(saver)

    monkeypatch.setattr(checkpointer, "write_file", save_late)
    monkeypatch.setattr(Checkpointer, "wait", wait)
    trainer = preemptible(tmp_path, signal_at(signal.SIGTERM, 1), background=True)
    waits.clear()  # nothing is being saved yet
    with pytest.raises(SystemExit):
        trainer.train(max_iter=3)
    assert pointer(tmp_path) == "model_0000001.pth"


def preempt_one_rank(folder: Path, shards: bool) -> tuple[Any, int, int]:
    # The exchanges follow iterations 3 and 7.
    hook = signal_at(signal.SIGTERM, 4, rank=1)
    how = {"background": shards, "sharded": shards}
    trainer = preemptible(folder, hook, gather_metric_period=4, **how)
    with pytest.raises(SystemExit) as caught:
        trainer.train(max_iter=20)
    name = "model_0000007" if shards else "model_0000007.pth"
    state = read_checkpoint(str(folder / name))
    return caught.value.code, trainer.iter, state["trainer"]["iteration"]


@pytest.mark.parametrize("shards", [False, True])
def test_one_ranks_signal_ends_all_ranks_at_the_same_iteration(
    shards: bool, tmp_path: Path
) -> None:
    assert run_ranks(preempt_one_rank, 2, tmp_path, shards) == [(143, 7, 7)] * 2


def preempt_a_rank_whose_weights_are_broken(folder: Path) -> bool:
    def poison(trainer: Any) -> None:
        if trainer.iter == 1 and comm.get_rank() == 1:
            trainer.model.fc.weight.data.fill_(torch.nan)

    hooks = signal_at(signal.SIGTERM, 1), CallbackHook(after_step=poison)
    trainer = preemptible(folder, *hooks)
    with pytest.raises(FloatingPointError, match=r"fc\.weight is nan"):
        trainer.train(max_iter=20)
    return (folder / "last_checkpoint").exists()


def test_no_rank_saves_if_the_weights_of_one_are_broken(tmp_path: Path) -> None:
    saved = run_ranks(preempt_a_rank_whose_weights_are_broken, 2, tmp_path)
    assert saved == [False, False]


def leave_while_the_main_process_writes(folder: Path) -> bool:
    left = folder / "left"

    def write_when_somebody_has_left(state: Any, path: str) -> None:
        # If nobody leaves before the file is there, half a second passes.
        for _ in range(50):
            if left.exists():
                break
            threading.Event().wait(0.01)
        write_file(state, path)

    with patch.object(checkpointer, "write_file", write_when_somebody_has_left):
        trainer = preemptible(folder, signal_at(signal.SIGTERM, 1, rank=1))
        with pytest.raises(SystemExit):
            trainer.train(max_iter=20)
    is_saved = (folder / "last_checkpoint").exists()
    left.touch()
    return is_saved


def test_no_rank_leaves_before_the_main_process_has_saved(tmp_path: Path) -> None:
    saved = run_ranks(leave_while_the_main_process_writes, 2, tmp_path)
    assert saved == [True, True]


def preempt_all_ranks(folder: Path) -> tuple[Any, int, float]:
    rank = comm.get_rank()
    hook = signal_at(signal.SIGTERM, 4 + rank, rank)
    trainer = preemptible(folder, hook, gather_metric_period=4)
    with pytest.raises(SystemExit) as caught:
        trainer.train(max_iter=20)
    return caught.value.code, trainer.iter, trainer.model.fc.weight.sum().item()


def test_a_signal_that_reaches_the_ranks_in_turn_ends_them_at_the_next_exchange(
    tmp_path: Path,
) -> None:
    first, second = run_ranks(preempt_all_ranks, 2, tmp_path)
    assert first == second
    assert first[:2] == (143, 7)
    assert pointer(tmp_path) == "model_0000007.pth"


def preempt_long_iterations(folder: Path, seconds: float) -> tuple[int, list[int]]:
    """The last iteration, and those inside of periods after which ranks exchanged metrics."""
    rank, clock = comm.get_rank(), SimpleNamespace(now=0.0)

    def compute(_: Any) -> None:
        clock.now += seconds * rank  # the slowest rank counts

    asked = []
    synchronize = SimpleTrainer.synchronize

    def note(trainer: SimpleTrainer) -> None:
        if trainer.done % 4:
            asked.append(trainer.iter)
        synchronize(trainer)

    hooks = CallbackHook(before_step=compute), signal_at(signal.SIGTERM, 4, rank=1)
    # Only the last save exchanges metrics too.
    trainer = preemptible(folder, *hooks, gather_metric_period=4, period=20)
    trainer.clock.read = lambda: clock.now
    with patch.object(SimpleTrainer, "synchronize", note), pytest.raises(SystemExit):
        trainer.train(max_iter=20)
    return trainer.iter, asked


@pytest.mark.parametrize(
    ("seconds", "end", "asked"),
    [(0.0, 7, [0]), (2.6, 6, [0, 6, 6]), (12.0, 4, [0, 1, 2, 4, 4])],
)
def test_where_iterations_are_long_the_ranks_ask_each_other_more_often(
    seconds: float, end: int, asked: list[int], tmp_path: Path
) -> None:
    ranks = run_ranks(preempt_long_iterations, 2, tmp_path, seconds)
    assert ranks == [(end, asked)] * 2
    assert pointer(tmp_path) == f"model_000000{end}.pth"


def preempt_in_evaluation(folder: Path) -> int:
    def evaluate() -> None:
        if comm.get_rank() == 1:
            signal.raise_signal(signal.SIGTERM)

    hook = EvalHook(4, evaluate)
    trainer = preemptible(folder, hook, gather_metric_period=4, period=20)
    with pytest.raises(SystemExit):
        trainer.train(max_iter=20)
    return trainer.iter


def test_a_signal_in_an_evaluation_ends_the_ranks_when_it_is_done(
    tmp_path: Path,
) -> None:
    assert run_ranks(preempt_in_evaluation, 2, tmp_path) == [3, 3]


class Scheduler:
    """Handles signals as submitit does: SIGTERM is ignored, SIGUSR2 requeues the job on rank 0."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.saved: list[str] = []  # what was saved last when a handler was called
        signal.signal(signal.SIGTERM, self.bypass)
        signal.signal(signal.SIGUSR2, self.requeue)

    def bypass(self, number: int, _frame: Any) -> None:
        self.saved.append(pointer(self.folder))

    def requeue(self, number: int, _frame: Any) -> None:
        self.saved.append(pointer(self.folder))
        if comm.is_main_process():  # the other ranks are told nothing
            sys.exit(99)


for name in ("bypass", "requeue"):
    getattr(Scheduler, name).__module__ = "submitit.core.job_environment"


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[Scheduler]:
    numbers = signal.SIGTERM, signal.SIGUSR2
    before = [signal.getsignal(number) for number in numbers]
    yield Scheduler(tmp_path)
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("listens", [(signal.SIGINT,), (signal.SIGTERM,)])
def test_the_schedulers_handler_is_called_when_all_is_saved(
    listens: tuple[int], scheduler: Scheduler, tmp_path: Path
) -> None:
    trainer = linear_trainer(signal_at(signal.SIGUSR2, 5))
    saver = Checkpointer(trainer.model, tmp_path, trainer=trainer)
    trainer.register_hooks([Preemption(saver, listens)])
    saver.resume_or_load("")
    with pytest.raises(SystemExit) as caught:
        trainer.train(max_iter=10)
    assert caught.value.code == 99
    assert trainer.iter == 5
    assert scheduler.saved == ["model_0000005.pth"]
    assert signal.getsignal(signal.SIGUSR2) == scheduler.requeue


def test_a_signal_that_the_scheduler_ignores_saves_and_the_run_goes_on(
    scheduler: Scheduler, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hooks = signal_at(signal.SIGTERM, 1), signal_at(signal.SIGTERM, 5)

    def try_to_lock(trainer: Any) -> None:
        if trainer.iter == 6:
            with pytest.raises(Timeout):
                FileLock(tmp_path / ".lock", timeout=0).acquire()

    trainer = preemptible(tmp_path, *hooks, CallbackHook(before_step=try_to_lock))
    trainer.train(max_iter=8)
    assert scheduler.saved == ["model_0000001.pth", "model_0000005.pth"]
    assert trainer.succeeded
    assert capfd.readouterr().err == ""  # it does not end


@pytest.mark.parametrize(
    "numbers", [(signal.SIGTERM, signal.SIGUSR2), (signal.SIGUSR2, signal.SIGTERM)]
)
def test_the_job_is_requeued_by_the_second_of_two_signals_too(
    numbers: tuple[int, int], scheduler: Scheduler, tmp_path: Path
) -> None:
    both = [signal_at(number, 5) for number in numbers]
    trainer = preemptible(tmp_path, *both)
    with pytest.raises(SystemExit, match="99"):
        trainer.train(max_iter=8)
    assert scheduler.saved == ["model_0000005.pth"]


def requeue_one_of_three(folder: Path) -> tuple[Any, int, list[str]]:
    """All ranks get SIGTERM, and rank 0 alone has got SIGUSR2 too before the exchange."""
    scheduler = Scheduler(folder)
    rank = comm.get_rank()
    hooks = [signal_at(signal.SIGUSR2, 4), signal_at(signal.SIGTERM, 5, rank)]
    trainer = preemptible(folder, *hooks, gather_metric_period=4, period=40)
    with pytest.raises(SystemExit) as caught:
        trainer.train(max_iter=20)
    return caught.value.code, trainer.iter, scheduler.saved


def test_all_ranks_end_when_the_main_process_has_requeued_the_job(
    tmp_path: Path,
) -> None:
    saved = ["model_0000007.pth", "model_0000011.pth"]  # at SIGTERM, at SIGUSR2
    ranks = run_ranks(requeue_one_of_three, 3, tmp_path)
    assert ranks == [(99, 11, saved)] * 3


def stop_file_at(folder: Path, iteration: int) -> HookBase:
    def write(trainer: Any) -> None:
        if trainer.iter == iteration and comm.is_main_process():
            (folder / "stop").write_text("it is good enough")

    return CallbackHook(before_step=write)


def test_a_file_stops_the_run_in_order_at_the_end_of_a_period(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    evaluated = []
    trainer = preemptible(
        tmp_path,
        EvalHook(0, lambda: evaluated.append(1)),
        stop_file_at(tmp_path, 3),
        gather_metric_period=5,
        period=100,
    )
    with caplog.at_level("INFO"):
        trainer.train(max_iter=50)
    assert trainer.succeeded
    assert trainer.done == 5
    assert evaluated == [1]
    assert pointer(tmp_path) == "model_final.pth"
    assert f"{tmp_path / 'stop'} exists. it is good enough" in caplog.text


def test_a_stop_file_in_any_encoding_stops_the_run_and_a_folder_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "latin").mkdir()
    (tmp_path / "latin" / "stop").write_bytes("schön genug".encode("latin-1"))
    stopped = preemptible(tmp_path / "latin")
    with caplog.at_level("INFO"):
        stopped.train(max_iter=6)
    assert stopped.done == 0
    assert "stop exists. sch\N{REPLACEMENT CHARACTER}n genug" in caplog.text
    (tmp_path / "folder" / "stop").mkdir(parents=True)
    trainer = preemptible(tmp_path / "folder")
    trainer.train(max_iter=6)
    assert trainer.done == 6


def test_a_stopped_run_goes_on_when_the_file_is_removed(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    trainer = preemptible(tmp_path)
    trainer.train(max_iter=6)
    assert trainer.done == 0
    (tmp_path / "stop").unlink()
    trainer.train(max_iter=6)
    assert trainer.done == 6


def stop_two_ranks(folder: Path) -> None:
    trainer = preemptible(
        folder, stop_file_at(folder, 3), gather_metric_period=2, period=100
    )
    trainer.train(max_iter=50)
    assert trainer.succeeded
    # One exchange sees the file, and the next one tells the other rank.
    assert trainer.done == 6


def test_all_ranks_stop_by_the_file_after_the_same_iteration(tmp_path: Path) -> None:
    run_ranks(stop_two_ranks, 2, tmp_path)


def test_without_a_folder_no_file_stops_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stop").touch()
    trainer = linear_trainer()
    trainer.register_hooks([Preemption(Checkpointer(trainer.model))])
    trainer.train(max_iter=3)
    assert trainer.done == 3
