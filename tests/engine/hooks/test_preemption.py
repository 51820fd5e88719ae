import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from gloo import run_ranks
from hooktrain.checkpoint import Checkpointer
from hooktrain.checkpoint.files import write_file
from hooktrain.checkpoint.loading import read_checkpoint
from hooktrain.engine import HookBase, SimpleTrainer
from hooktrain.engine.hooks import CallbackHook, EvalHook, PeriodicCheckpointer
from hooktrain.engine.hooks.checkpointing import Preemption
from hooktrain.utils import comm
from toys import linear_trainer


def signal_at(number: int, iteration: int, rank: int = 0) -> HookBase:
    def send(trainer: Any) -> None:
        if trainer.iter == iteration and comm.get_rank() == rank:
            os.kill(os.getpid(), number)

    return CallbackHook(after_backward=send)


def preemptible(
    folder: Path,
    *hooks: HookBase,
    background: bool = False,
    sharded: bool = False,
    time_limit_s: float = 0,
    **kwargs: Any,
) -> SimpleTrainer:
    trainer = linear_trainer(*hooks, **kwargs)
    how = {"background": background, "sharded": sharded}
    checkpointer = Checkpointer(trainer.model, folder, trainer=trainer, **how)
    periodic = PeriodicCheckpointer(checkpointer, period=4)
    preemption = Preemption(checkpointer, time_limit_s=time_limit_s)
    trainer.register_hooks([periodic, preemption])
    checkpointer.resume_or_load("")
    return trainer


def wait_for_ever(begun: Any) -> None:
    begun.set()  # Python drops signals that come while a process is being forked
    while True:  # a signal that comes before one long sleep would not end it
        time.sleep(0.01)


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)]
)
def test_a_signal_saves_at_the_end_of_the_iteration_and_exits_with_its_code(
    tmp_path: Path, number: int, code: int
) -> None:
    before, evaluated = handlers(), []
    evaluate = EvalHook(0, lambda: evaluated.append(True))
    trainer = preemptible(tmp_path, evaluate, signal_at(number, 5))
    with pytest.raises(SystemExit) as caught:
        trainer.train(max_iter=10)
    assert caught.value.code == code
    assert (trainer.iter, trainer.max_iter) == (5, 10)
    assert not evaluated
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000005.pth"
    assert not (tmp_path / "model_final.pth").exists()
    assert handlers() == before


@pytest.mark.parametrize("second", [None, signal.SIGTERM])
def test_a_time_limit_saves_and_exits_as_a_signal_does(
    tmp_path: Path, second: signal.Signals | None
) -> None:
    before, left = signal.getsignal(signal.SIGALRM), []
    watch = CallbackHook(
        before_step=lambda _: left.append(signal.getitimer(signal.ITIMER_REAL))
    )
    expire = [signal_at(signal.SIGALRM, 5), *([signal_at(second, 5)] if second else [])]
    trainer = preemptible(tmp_path, watch, *expire, time_limit_s=900)
    with pytest.raises(SystemExit) as caught:
        trainer.train(max_iter=10)
    assert caught.value.code == 128 + (second or signal.SIGALRM)
    assert 800 < left[0][0] <= 900
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000005.pth"
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) == before


@pytest.mark.parametrize("iteration", [7, 9])
def test_the_run_goes_on_bit_for_bit_also_after_a_signal_in_the_last_iteration(
    iteration: int, tmp_path: Path
) -> None:
    expected = linear_trainer()
    expected.train(max_iter=10)
    before = handlers()
    preempted = preemptible(tmp_path, signal_at(signal.SIGTERM, iteration))
    with pytest.raises(SystemExit):
        preempted.train(max_iter=10)
    assert preempted.iter < preempted.max_iter
    trainer = preemptible(tmp_path)  # its four batches begin anew
    trainer.train(max_iter=10)
    assert (trainer.start_iter, trainer.iter) == (iteration + 1, 10)
    assert torch.equal(trainer.model.fc.weight, expected.model.fc.weight)
    assert handlers() == before  # also without a signal


def test_where_the_process_lives_on_as_in_a_notebook_the_same_trainer_goes_on(
    tmp_path: Path,
) -> None:
    expected = linear_trainer()
    expected.train(max_iter=10)
    seen: list[int] = []
    trainer = preemptible(tmp_path, signal_at(signal.SIGINT, 5))
    trainer.register_hooks([CallbackHook(after_step=lambda t: seen.append(t.iter))])
    with pytest.raises(SystemExit):
        trainer.train(max_iter=10)
    trainer.train(max_iter=10)
    assert seen == list(range(10))
    assert torch.equal(trainer.model.fc.weight, expected.model.fc.weight)


@pytest.mark.parametrize("reason", ["preempted by SIGTERM", "preempted by hand"])
def test_a_stop_that_somebody_else_asks_for_is_no_preemption(
    tmp_path: Path, reason: str
) -> None:
    trainer = preemptible(
        tmp_path, CallbackHook(after_step=lambda t: t.request_stop(reason))
    )
    trainer.train(max_iter=10)
    assert trainer.succeeded
    assert trainer.stop_reason == reason
    assert (tmp_path / "last_checkpoint").read_text() == "model_final.pth"


def test_a_second_signal_ends_at_once_by_the_handlers_from_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(
        "hooktrain.engine.hooks.checkpointing.time.monotonic", lambda: clock[0]
    )

    def interrupt(trainer: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        clock[0] = 0.9
        os.kill(os.getpid(), signal.SIGINT)  # the same one, handed on by a launcher
        trainer.storage.put_scalar("seen", 1.0)
        clock[0] = 1.1
        os.kill(os.getpid(), signal.SIGINT)
        trainer.storage.put_scalar("not seen", 1.0)

    trainer = preemptible(tmp_path, CallbackHook(after_backward=interrupt))
    with pytest.raises(KeyboardInterrupt):
        trainer.train(max_iter=2)
    assert "seen" in trainer.storage.histories()
    assert "not seen" not in trainer.storage.histories()
    assert list(tmp_path.iterdir()) == []


def test_another_signal_right_after_the_first_ends_at_once(tmp_path: Path) -> None:
    def interrupt(trainer: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)

    trainer = preemptible(tmp_path, CallbackHook(after_backward=interrupt))
    with pytest.raises(KeyboardInterrupt):
        trainer.train(max_iter=2)


def test_a_failing_save_is_the_error_and_not_a_successful_exit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space")

    trainer = preemptible(tmp_path, signal_at(signal.SIGTERM, 1))
    monkeypatch.setattr(Checkpointer, "save", fail)
    with pytest.raises(OSError, match="no space"):
        trainer.train(max_iter=3)


def test_a_forked_child_ends_by_a_signal_as_ever(tmp_path: Path) -> None:
    codes: list[int | None] = []

    def fork(trainer: Any) -> None:
        context = multiprocessing.get_context("fork")
        begun = context.Event()
        child = context.Process(target=wait_for_ever, args=(begun,))
        child.start()
        assert begun.wait(30)
        child.terminate()
        child.join(30)
        codes.append(child.exitcode)
        child.kill()

    trainer = preemptible(tmp_path, CallbackHook(after_backward=fork))
    trainer.train(max_iter=1)
    assert codes == [-signal.SIGTERM]


def test_a_second_hook_leaves_the_signals_to_the_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = handlers()
    trainer = preemptible(tmp_path, signal_at(signal.SIGTERM, 1))
    trainer.register_hooks([Preemption(Checkpointer(trainer.model, tmp_path))])
    with pytest.raises(SystemExit):
        trainer.train(max_iter=3)
    assert handlers() == before
    assert "handled by another Preemption hook" in caplog.text


def test_in_another_thread_it_says_that_it_ignores_signals(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, before = preemptible(tmp_path), handlers()
    thread = threading.Thread(target=trainer.train, kwargs={"max_iter": 2})
    thread.start()
    thread.join()
    assert trainer.iter == 2
    assert handlers() == before
    assert "does not run in the main thread" in caplog.text


def test_the_process_outlives_what_it_saves_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = threading.Event()

    def save_late(*args: Any) -> None:
        assert waited.wait(30)
        write_file(*args)

    def wait(checkpointer: Checkpointer) -> None:
        waited.set()
        real_wait(checkpointer)

    real_wait = Checkpointer.wait
    monkeypatch.setattr("hooktrain.checkpoint.checkpointer.write_file", save_late)
    monkeypatch.setattr(Checkpointer, "wait", wait)
    trainer = preemptible(tmp_path, signal_at(signal.SIGTERM, 1), background=True)
    waited.clear()  # nothing is being saved yet
    with pytest.raises(SystemExit):
        trainer.train(max_iter=3)
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000001.pth"


def preempt_one_rank(folder: Path, shards: bool) -> tuple[Any, int, list[int]]:
    # The exchanges follow iterations 3 and 7.
    hook = signal_at(signal.SIGTERM, 4, rank=1)
    how = {"background": shards, "sharded": shards}
    trainer = preemptible(folder, hook, gather_metric_period=4, **how)
    code = None
    try:
        trainer.train(max_iter=20)
    except SystemExit as error:
        code = error.code
    state = read_checkpoint(
        str(folder / ("model_0000007" if shards else "model_0000007.pth"))
    )
    return code, trainer.iter, state["trainer"]["iteration"]


@pytest.mark.parametrize("shards", [False, True])
def test_one_ranks_signal_ends_all_ranks_at_the_same_iteration(
    shards: bool, tmp_path: Path
) -> None:
    assert run_ranks(preempt_one_rank, 2, tmp_path, shards) == [(143, 7, 7)] * 2
