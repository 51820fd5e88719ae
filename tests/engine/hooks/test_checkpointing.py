import math
import signal
import threading
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gloo import run_ranks
from hooktrain.checkpoint import Checkpointer, checkpointer, load_checkpoint
from hooktrain.checkpoint.files import write_file
from hooktrain.checkpoint.loading import read_checkpoint
from hooktrain.engine import HookBase, SimpleTrainer
from hooktrain.engine.hooks import (
    EMA,
    BestCheckpointer,
    CallbackHook,
    EvalHook,
    PeriodicCheckpointer,
    Preemption,
)
from hooktrain.utils import comm
from toys import Idle, LinearLoss, linear_trainer


@pytest.fixture(params=[False, True], ids=["at once", "in the background"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Of the checkpointer."""
    return {"background": request.param}


def run(
    folder: Path,
    max_iter: int,
    *hooks: Any,
    options: Any = None,
    resume: bool = True,
    **kwargs: Any,
) -> Any:
    trainer = linear_trainer(*hooks, gather_metric_period=1)
    saver = Checkpointer(trainer.model, folder, **(options or {}), trainer=trainer)
    trainer.register_hooks([PeriodicCheckpointer(saver, **kwargs)])
    saver.resume_or_load("", resume=resume)
    trainer.train(max_iter=max_iter)
    return trainer


def names(folder: Path) -> list[str]:
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.name not in ("last_checkpoint", ".lock")
    )


def pointer(folder: Path) -> str:
    return (folder / "last_checkpoint").read_text()


def test_it_saves_each_period_and_at_the_end(
    options: dict[str, Any], tmp_path: Path
) -> None:
    run(tmp_path, 6, options=options, period=2)
    numbered = ["model_0000001.pth", "model_0000003.pth"]
    assert names(tmp_path) == [*numbered, "model_final.pth"]
    assert pointer(tmp_path) == "model_final.pth"
    final = torch.load(tmp_path / "model_final.pth", weights_only=True)
    assert final["iteration"] == final["trainer"]["iteration"] == 5


def test_a_subclass_may_override_step(tmp_path: Path) -> None:
    class AtOddIterations(PeriodicCheckpointer):
        def step(self, iteration: int, **extra: Any) -> None:
            if iteration % 2:
                self.save(f"odd_{iteration}", iteration=iteration)

    trainer = linear_trainer()
    saver = Checkpointer(trainer.model, tmp_path, trainer=trainer)
    trainer.register_hooks([AtOddIterations(saver, 100)])
    trainer.train(0, 4)
    assert names(tmp_path) == ["odd_1.pth", "odd_3.pth"]


@pytest.mark.parametrize("sharded", [False, True])
def test_a_run_goes_on_when_its_folder_is_gone(
    sharded: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    def strike(trainer: Any) -> None:
        if trainer.iter == 3:  # perhaps while it is being saved to
            (tmp_path / "out").rename(tmp_path / "gone")

    options = {**options, "sharded": sharded}
    strikes = CallbackHook(before_step=strike)
    run(tmp_path / "out", 6, strikes, options=options, period=2)
    assert run(tmp_path / "out", 6, options=options, period=2).start_iter == 6


@pytest.mark.parametrize("sharded", [False, True])
def test_a_failed_run_completes_the_checkpoint_that_was_under_way(
    options: dict[str, Any], sharded: bool, tmp_path: Path
) -> None:
    options = {**options, "sharded": sharded}
    fail = CallbackHook(before_step=lambda trainer: 1 // (trainer.iter != 3))
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, 6, fail, options=options, period=3)
    assert names(tmp_path) == ["model_0000002" if sharded else "model_0000002.pth"]
    assert pointer(tmp_path) == names(tmp_path)[0]


class Accumulating(Idle):
    """A trainer that accumulates over some iterations."""

    open_after: tuple[int, ...] = ()

    @property
    def can_save(self) -> bool:
        return self.iter not in self.open_after


@pytest.mark.parametrize(
    ("open_after", "saved"),
    [((1,), [2, 3]), ((3, 4), [1]), ((1, 2, 3), [3]), ((1, 2), [3])],
    ids=["put off", "until the end", "for a period at most", "to the next"],
)
def test_inside_of_an_accumulation_a_save_is_put_off(
    open_after: tuple[int, ...], saved: list[int], tmp_path: Path
) -> None:
    saver = Checkpointer(nn.Linear(1, 1), tmp_path)
    trainer = Accumulating(PeriodicCheckpointer(saver, period=2))
    trainer.open_after = open_after
    trainer.train(max_iter=6)
    numbered = [f"model_{i:07d}.pth" for i in saved]
    assert names(tmp_path) == [*numbered, "model_final.pth"]


@pytest.mark.parametrize("max_iter", [6, 4], ids=["a period", "the end"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["fc.bias", "statistic"])
def test_what_has_become_infinite_or_nan_is_never_saved(
    name: str, value: float, max_iter: int, tmp_path: Path
) -> None:
    def begin(trainer: Any) -> None:
        mask = torch.tensor([0.0, -math.inf])  # meant so
        trainer.model.register_buffer("mask", mask)
        trainer.model.register_buffer("statistic", torch.zeros(2))

    def spoil(trainer: Any) -> None:  # the losses are finite
        if trainer.iter == 3:
            model = trainer.model
            spoilt = model.statistic if name == "statistic" else model.fc.bias.grad
            spoilt[0] = value

    hook = CallbackHook(before_train=begin, after_backward=spoil)
    with pytest.raises(FloatingPointError, match=rf"iteration=3, .*'{name}'"):
        run(tmp_path, max_iter, hook, period=2, max_to_keep=1)
    assert names(tmp_path) == ["model_0000001.pth"]


class WithState(HookBase):
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}


def test_a_state_that_could_not_be_saved_is_refused_before_the_first_step(
    tmp_path: Path,
) -> None:
    steps: list[int] = []
    count = CallbackHook(before_step=lambda trainer: steps.append(trainer.iter))
    expected = r"trainer\.hooks\.WithState\.state of type .*deque"
    with pytest.raises(TypeError, match=expected):
        run(tmp_path, 2, WithState(deque()), count, period=2)
    assert steps == []


def test_a_hook_with_state_behind_the_checkpointer_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = linear_trainer(WithState(1))
    saver = Checkpointer(trainer.model, tmp_path, trainer=trainer)
    trainer.register_hooks([PeriodicCheckpointer(saver, 2), CallbackHook()])
    trainer.train(max_iter=1)
    assert "an iteration before" not in caplog.text
    trainer.register_hooks([WithState(2)])
    trainer.train(max_iter=2)
    assert "['WithState'] come after PeriodicCheckpointer" in caplog.text


def shards_on_main_only(folder: Path) -> None:
    trainer = linear_trainer()
    saver = Checkpointer(trainer.model, folder, sharded=True, trainer=trainer)
    hook = PeriodicCheckpointer(saver, 2) if comm.is_main_process() else None
    trainer.register_hooks([hook])
    trainer.train(0, 4)


def test_shards_on_the_main_rank_only_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="register PeriodicCheckpointer on every"):
        run_ranks(shards_on_main_only, 2, tmp_path)


# The best checkpoint


def best_of(
    folder: Path, values: list[float], state: Any = None, **options: Any
) -> tuple[BestCheckpointer, Any]:
    """Train one iteration a value, each evaluated to that value."""
    trainer = linear_trainer()
    mode = options.pop("mode", None)
    saver = Checkpointer(trainer.model, folder, **options, trainer=trainer)
    hook = BestCheckpointer(1, saver, "acc", mode)
    value = lambda: values[min(trainer.iter - trainer.start_iter, len(values) - 1)]  # noqa: E731
    evaluation = EvalHook(1, lambda: {"acc": value()}, eval_after_train=False)
    trainer.register_hooks([evaluation, hook])
    if state is not None:
        trainer.load_state_dict(state)
    trainer.train(max_iter=trainer.state_dict()["iteration"] + 1 + len(values))
    return hook, trainer


def saved_iteration(folder: Path) -> int:
    path = next(folder.glob("model_best*"))
    file = read_checkpoint(str(path))
    assert file["trainer"]["iteration"] == file["iteration"]
    return int(file["iteration"])


@pytest.mark.parametrize(("mode", "best"), [(None, 1), ("max", 1), ("min", 2)])
def test_the_best_value_decides_what_is_in_the_file(
    tmp_path: Path, mode: str, best: int
) -> None:
    hook, _ = best_of(tmp_path, [0.5, 0.75, 0.25, 0.5, 0.5], mode=mode)
    assert saved_iteration(tmp_path) == best == hook.best_iter


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_never_the_best(
    tmp_path: Path, value: float
) -> None:
    hook, _ = best_of(tmp_path, [value, 0.5, value, value])
    assert saved_iteration(tmp_path) == 1
    assert hook.best_metric == 0.5


def test_the_best_value_survives_a_resume(tmp_path: Path) -> None:
    _, trainer = best_of(tmp_path, [0.9, 0.5])
    best_of(tmp_path, [0.5, 0.6, 0.5], state=trainer.state_dict())
    assert saved_iteration(tmp_path) == 0


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("saved_after", [True, False])
def test_a_better_model_saved_after_the_resumed_checkpoint_is_kept(
    tmp_path: Path, saved_after: bool, sharded: bool
) -> None:
    _, first = best_of(tmp_path, [0.5, 0.5], sharded=sharded)
    state = first.state_dict()
    state["hooks"] = {}  # as in a checkpoint from before the evaluation
    if not saved_after:
        state["iteration"] = -1  # a run from the start knows of no other
    best_of(tmp_path, [0.25, 0.125, 0.125], state=state, sharded=sharded)
    assert saved_iteration(tmp_path) == 0
    name = "model_best" if sharded else "model_best.pth"
    value = 0.5 if saved_after else 0.25
    assert read_checkpoint(str(tmp_path / name))["best"]["best_metric"] == value


def test_a_broken_best_file_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, first = best_of(tmp_path, [0.5, 0.5])
    state = first.state_dict()
    state["hooks"] = {}
    (tmp_path / "model_best.pth").write_bytes(b"broken")
    best_of(tmp_path, [0.25, 0.25], state=state)
    assert "model_best.pth" in caplog.text
    assert saved_iteration(tmp_path) == 2


@pytest.mark.parametrize(
    "options", [{}, {"background": True}, {"background": True, "sharded": True}]
)
def test_the_best_of_the_final_evaluation_is_there_when_the_run_has_ended(
    tmp_path: Path, options: dict[str, bool]
) -> None:
    trainer = linear_trainer()
    saver = Checkpointer(trainer.model, tmp_path, **options, trainer=trainer)
    evaluation = EvalHook(0, lambda: {"acc": 1.0})
    trainer.register_hooks([evaluation, BestCheckpointer(0, saver, "acc")])
    trainer.train(0, 3)
    assert saved_iteration(tmp_path) == 2
    assert not (tmp_path / "last_checkpoint").exists()


@pytest.mark.parametrize(
    ("eval_period", "metric", "message"),
    [(3, "acc", "'acc' was measured at 2"), (2, "accuracy", "no metric 'accuracy'")],
)
def test_weights_that_were_not_evaluated_are_not_the_best(
    eval_period: int, metric: str, message: str, tmp_path: Path
) -> None:
    trainer = linear_trainer(EvalHook(eval_period, lambda: {"acc": trainer.iter}))
    saver = Checkpointer(trainer.model, tmp_path, trainer=trainer)
    trainer.register_hooks([BestCheckpointer(4, saver, metric)])
    with pytest.raises(ValueError, match=message):
        trainer.train(0, 9)
    assert list(tmp_path.iterdir()) == []


def test_the_best_of_an_average_holds_the_average_as_the_model(tmp_path: Path) -> None:
    trainer = linear_trainer()
    saver = Checkpointer(trainer.model, tmp_path, trainer=trainer)
    value = iter([2.0, 1.0, 3.0])
    evaluation = EvalHook(1, lambda: {"ema": {"val_loss": next(value)}})
    ema = EMA(trainer.model, 0.5)
    best = BestCheckpointer(1, saver, "ema/val_loss", ema=ema)
    averages = []

    def copy(trainer: SimpleTrainer) -> None:
        with ema.swap():
            averages.append(trainer.model.fc.bias.clone())

    trainer.register_hooks([ema, evaluation, best, CallbackHook(after_step=copy)])
    trainer.train(0, 3)
    model = LinearLoss()
    load_checkpoint(model, tmp_path / "model_best.pth")
    assert torch.equal(model.fc.bias, averages[1])
    assert not torch.equal(trainer.model.fc.bias, averages[1])


def metric_on_main_only(folder: Path) -> Any:
    def put(trainer: Any) -> None:
        if comm.is_main_process():
            trainer.storage.put_scalar("acc", trainer.iter)

    trainer = linear_trainer(CallbackHook(after_step=put))
    saver = Checkpointer(trainer.model, folder, trainer=trainer)
    hook = BestCheckpointer(1, saver, "acc")
    trainer.register_hooks([hook])
    trainer.train(0, 4)
    return hook.best_metric


def test_all_ranks_follow_the_main_one_that_alone_knows_the_metric(
    tmp_path: Path,
) -> None:
    assert run_ranks(metric_on_main_only, 2, tmp_path) == [3.0, 3.0]
    assert torch.load(tmp_path / "model_best.pth", weights_only=True)["iteration"] == 3


# Preemption


def signal_at(number: int, iteration: int, rank: int = 0) -> HookBase:
    def send(trainer: Any) -> None:
        if trainer.iter == iteration and comm.get_rank() == rank:
            signal.raise_signal(number)

    return CallbackHook(after_backward=send)


def preemptible(
    folder: Path,
    *hooks: HookBase,
    time_limit_s: float = 0,
    gather_metric_period: int = 1,
    **options: Any,
) -> SimpleTrainer:
    trainer = linear_trainer(*hooks, gather_metric_period=gather_metric_period)
    saver = Checkpointer(trainer.model, folder, trainer=trainer, **options)
    periodic = PeriodicCheckpointer(saver, period=4)
    preemption = Preemption(saver, time_limit_s=time_limit_s)
    trainer.register_hooks([periodic, preemption])
    saver.resume_or_load("")
    return trainer


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)]
)
def test_a_signal_saves_at_the_end_of_the_iteration(
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
    assert pointer(tmp_path) == "model_0000005.pth"
    assert not (tmp_path / "model_final.pth").exists()
    assert handlers() == before


@pytest.mark.parametrize("second", [None, signal.SIGTERM])
def test_a_time_limit_ends_the_run_as_a_signal_does(
    tmp_path: Path, second: signal.Signals | None
) -> None:
    before, left = signal.getsignal(signal.SIGALRM), []
    watch = CallbackHook(
        before_step=lambda _: left.append(signal.getitimer(signal.ITIMER_REAL))
    )
    numbers = [signal.SIGALRM] if second is None else [signal.SIGALRM, second]
    expire = [signal_at(number, 5) for number in numbers]
    trainer = preemptible(tmp_path, watch, *expire, time_limit_s=900)
    with pytest.raises(SystemExit) as caught:
        trainer.train(max_iter=10)
    assert caught.value.code == 128 + numbers[-1]
    assert 800 < left[0][0] <= 900
    assert pointer(tmp_path) == "model_0000005.pth"
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) == before


@pytest.mark.parametrize("iteration", [7, 9])
def test_a_preempted_run_goes_on_bit_for_bit(iteration: int, tmp_path: Path) -> None:
    expected = linear_trainer()
    expected.train(max_iter=10)
    before = handlers()
    preempted = preemptible(tmp_path, signal_at(signal.SIGTERM, iteration))
    with pytest.raises(SystemExit):
        preempted.train(max_iter=10)
    trainer = preemptible(tmp_path)  # its four batches begin anew
    trainer.train(max_iter=10)
    assert (trainer.start_iter, trainer.iter) == (iteration + 1, 10)
    assert torch.equal(trainer.model.fc.weight, expected.model.fc.weight)
    assert handlers() == before  # also without a signal


def test_the_same_trainer_goes_on_as_in_a_notebook(tmp_path: Path) -> None:
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
    stop = CallbackHook(after_step=lambda t: t.request_stop(reason))
    trainer = preemptible(tmp_path, stop)
    trainer.train(max_iter=10)
    assert trainer.succeeded
    assert pointer(tmp_path) == "model_final.pth"


def test_a_second_signal_ends_at_once_by_the_handlers_from_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    path = "hooktrain.engine.hooks.preemption.time.monotonic"
    monkeypatch.setattr(path, lambda: clock[0])
    seen = []

    def interrupt(_: Any) -> None:
        for clock[0] in (0.0, 0.9, 1.1):  # the second one is handed on by a launcher
            signal.raise_signal(signal.SIGINT)
            seen.append(clock[0])

    trainer = preemptible(tmp_path, CallbackHook(after_backward=interrupt))
    with pytest.raises(KeyboardInterrupt):
        trainer.train(max_iter=2)
    assert seen == [0.0, 0.9]
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


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
    real_wait = Checkpointer.wait

    def save_late(*args: Any) -> None:
        assert waited.wait(30)
        write_file(*args)

    def wait(saver: Checkpointer) -> None:
        waited.set()
        real_wait(saver)

    monkeypatch.setattr(checkpointer, "write_file", save_late)
    monkeypatch.setattr(Checkpointer, "wait", wait)
    trainer = preemptible(tmp_path, signal_at(signal.SIGTERM, 1), background=True)
    waited.clear()  # nothing is being saved yet
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
