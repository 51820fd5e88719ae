import math
import resource
import socket
import subprocess
import sys
import time
from collections import deque
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from hooktrain.checkpoint import Checkpointer
from hooktrain.engine import HookBase, SimpleTrainer, StepTrainer
from hooktrain.engine.hooks import (
    EMA,
    CallbackHook,
    EarlyStopping,
    EvalHook,
    PeriodicCheckpointer,
)
from hooktrain.solver import OptimWrapper
from hooktrain.utils.file_io import lock_folder, unlock_folder
from processes import LIMIT_SECONDS, end, start, wait_until
from toys import LinearLoss, batches, linear_trainer


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
        if path.name not in ("last_checkpoint", ".last_iteration", ".lock")
    )


def pointer(folder: Path) -> str:
    return (folder / "last_checkpoint").read_text()


def test_a_subclass_may_override_step(tmp_path: Path) -> None:
    class AtOddIterations(PeriodicCheckpointer):
        def step(self, iteration: int, **extra: Any) -> None:
            if iteration % 2:
                self.checkpointer.save(f"odd_{iteration}", iteration=iteration)

    trainer = linear_trainer()
    saver = Checkpointer(trainer.model, tmp_path, trainer=trainer)
    trainer.register_hooks([AtOddIterations(saver, 100)])
    trainer.train(0, 4)
    assert names(tmp_path) == ["odd_1.pth", "odd_3.pth"]


def test_a_period_of_0_saves_only_the_final_checkpoint(tmp_path: Path) -> None:
    trainer = linear_trainer()
    saver = Checkpointer(trainer.model, tmp_path, trainer=trainer)
    trainer.register_hooks([PeriodicCheckpointer(saver, 0)])
    trainer.train(0, 4)
    assert names(tmp_path) == ["model_final.pth"]


def test_a_step_without_a_trainer_says_what_a_loop_of_ones_own_calls() -> None:
    hook = PeriodicCheckpointer(Checkpointer(LinearLoss()), 2)
    with pytest.raises(RuntimeError, match=r"checkpointer\.save\(name"):
        hook.step(1)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_run_goes_on_when_its_folder_is_gone(
    sharded: bool,
    options: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def strike(trainer: Any) -> None:
        if trainer.iter == 3:  # perhaps while it is being saved to
            (tmp_path / "out").rename(tmp_path / "gone")

    options = {**options, "sharded": sharded}
    strikes = CallbackHook(before_step=strike)
    run(tmp_path / "out", 6, strikes, options=options, period=2)
    (told,) = [text for text in caplog.messages if "renamed or deleted" in text]
    assert told.startswith(str(tmp_path / "out"))
    assert run(tmp_path / "out", 6, options=options, period=2).start_iter == 6


def use_the_folder(folder: Path) -> None:
    """A new run begins in a folder, and goes on until it is killed."""
    folder.mkdir()
    lock_folder(folder)
    (folder / "there").touch()
    time.sleep(LIMIT_SECONDS)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_run_whose_folder_was_renamed_leaves_the_new_one_to_another_run(
    sharded: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    others = []

    def strike(trainer: Any) -> None:
        if trainer.iter == 3:
            trainer.hooks[-1].checkpointer.wait()
            (tmp_path / "out").rename(tmp_path / "moved")
            others.append(start(use_the_folder, tmp_path / "out"))
            wait_until((tmp_path / "out" / "there").exists)

    options = {**options, "sharded": sharded}
    strikes = CallbackHook(before_step=strike)
    try:
        with pytest.raises(RuntimeError, match=r"/out' is in use by another run"):
            run(tmp_path / "out", 6, strikes, options=options, period=2)
        assert names(tmp_path / "out") == ["there"]
        lock_folder(tmp_path / "moved")  # it is free
        unlock_folder(tmp_path / "moved")
    finally:
        others[0].kill()
        end(others[0])


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


def test_a_stopped_run_that_was_killed_in_its_final_evaluation_is_completed(
    options: dict[str, Any], tmp_path: Path
) -> None:
    def start(evaluate: Any) -> Any:
        losses = CallbackHook(after_step=lambda t: t.after_evaluation({"loss": 1.0}))
        stopping = EarlyStopping("loss", "min", patience=3)
        evaluation = EvalHook(0, evaluate)
        return run(tmp_path, 9, losses, stopping, evaluation, options=options, period=2)

    def kill() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(kill)
    assert names(tmp_path) == ["model_0000001.pth", "model_0000003.pth"]
    assert start(dict).iter == 4
    assert pointer(tmp_path) == "model_final.pth"
    file = torch.load(tmp_path / "model_final.pth", weights_only=True)
    assert file["iteration"] == file["trainer"]["iteration"] == 3


@pytest.mark.parametrize("max_iter", [6, 4], ids=["a period", "the end"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fc.bias", math.nan),
        ("fc.bias", math.inf),
        ("statistic", math.nan),
        ("statistic", math.inf),
        ("mask", math.nan),
    ],
)
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
            spoilt = model.fc.bias.grad if "." in name else getattr(model, name)
            spoilt[0] = value

    hook = CallbackHook(before_train=begin, after_backward=spoil)
    with pytest.raises(FloatingPointError, match=f"iteration=3, .*{name} is {value}"):
        run(tmp_path, max_iter, hook, period=2, max_to_keep=1)
    assert names(tmp_path) == ["model_0000001.pth"]


def test_a_mask_of_minus_infinity_may_come_later(tmp_path: Path) -> None:
    model = LinearLoss()
    model.register_buffer("mask", torch.zeros(2))
    trainer = SimpleTrainer(model, batches(4), torch.optim.SGD(model.parameters()))

    def fill(trainer: Any) -> None:
        if trainer.iter == 2:
            model.mask[0] = -math.inf

    saver = Checkpointer(model, tmp_path, trainer=trainer)
    saving = PeriodicCheckpointer(saver, period=2)
    trainer.register_hooks([EMA(model), CallbackHook(before_step=fill), saving])
    trainer.train(max_iter=6)
    assert names(tmp_path)[-1] == "model_final.pth"


def test_an_average_that_was_poisoned_once_is_never_saved(tmp_path: Path) -> None:
    model = LinearLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = SimpleTrainer(model, batches(4), optimizer)
    ema = EMA(model)

    def poison(trainer: Any) -> None:  # the weights are finite
        if trainer.iter == 2:
            ema.average.module.fc.bias.fill_(math.nan)

    saver = Checkpointer(model, tmp_path, trainer=trainer)
    saving = PeriodicCheckpointer(saver, period=2)
    trainer.register_hooks([ema, CallbackHook(after_step=poison), saving])
    with pytest.raises(FloatingPointError, match=r"hooks\.EMA\..*fc\.bias is nan"):
        trainer.train(max_iter=6)
    assert names(tmp_path) == ["model_0000001.pth"]


def test_an_optimizer_that_one_spike_has_made_infinite_is_never_saved(
    tmp_path: Path,
) -> None:
    def spoil(
        trainer: Any,
    ) -> None:  # the loss, the gradient and the weights are finite
        if trainer.iter == 3:
            trainer.model.fc.bias.grad[0] = 1e22

    model = LinearLoss()
    trainer = SimpleTrainer(model, batches(4), torch.optim.Adam(model.parameters()))
    saver = Checkpointer(model, tmp_path, trainer=trainer)
    saving = PeriodicCheckpointer(saver, period=2)
    trainer.register_hooks([CallbackHook(after_backward=spoil), saving])
    with pytest.raises(FloatingPointError, match="exp_avg_sq is inf"):
        trainer.train(0, 6)
    assert names(tmp_path) == ["model_0000001.pth"]
    assert all(value.isfinite().all() for value in model.parameters())


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
    with pytest.raises(TypeError, match="WithState"):
        run(tmp_path, 2, WithState(deque()), count, period=2)
    assert steps == []


class Keeps(torch.optim.SGD):
    """An optimizer with a state that no file can hold, once it has one."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["losses"] = deque([1.0])


class BecomesUnstorable(WithState):
    def after_step(self) -> None:
        self.state = deque()


class Extra(LinearLoss):
    """A model whose extra state comes with the first batch."""

    seen: Any = None

    def forward(self, batch: Any) -> Any:
        self.seen = deque()
        return super().forward(batch)

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


@pytest.mark.parametrize(
    ("kind", "key"),
    [("optimizer", "optimizer"), ("hook", "Becomes"), ("model", "_extra_state")],
)
@pytest.mark.parametrize("start", [0, 3])
def test_a_state_that_cannot_be_saved_ends_the_run_after_its_first_iteration(
    kind: str, key: str, start: int, tmp_path: Path
) -> None:
    model = Extra() if kind == "model" else LinearLoss()
    optimizer = Keeps if kind == "optimizer" else torch.optim.SGD
    trainer = SimpleTrainer(model, batches(9), optimizer(model.parameters(), lr=0.1))
    saver = Checkpointer(model, tmp_path, trainer=trainer)
    if kind == "hook":
        trainer.register_hooks([BecomesUnstorable(0)])
    trainer.register_hooks([PeriodicCheckpointer(saver, 500)])
    with pytest.raises(TypeError, match=f"cannot save .*{key}.* of type .*deque"):
        trainer.train(start, 1000)
    assert trainer.iter == start


class Step(LinearLoss):
    def train_step(self, data: Any, optim_wrapper: OptimWrapper) -> dict[str, Any]:
        loss = self(data)
        optim_wrapper.update_params(loss)
        return {"loss": loss}


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, Keeps])
def test_states_are_tried_after_the_first_update_when_no_gradients_are_accumulated(
    optimizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Step()
    wrapper = OptimWrapper(optimizer(model.parameters(), lr=0.1), 4)
    trainer = StepTrainer(model, batches(9), wrapper)
    saver = Checkpointer(model, tmp_path, trainer=trainer)
    trainer.register_hooks([PeriodicCheckpointer(saver, 8)])
    with suppress(TypeError) if optimizer is Keeps else nullcontext():
        trainer.train(max_iter=16)
    assert trainer.iter == (3 if optimizer is Keeps else 16)
    assert "accumulated" not in caplog.text


def test_a_hook_with_state_is_saved_with_its_iteration_wherever_it_is_registered(
    tmp_path: Path,
) -> None:
    class Counts(WithState):
        key = "Counts"

        def after_step(self) -> None:
            self.state += 1

    trainer = linear_trainer()
    saver = Checkpointer(trainer.model, tmp_path, trainer=trainer)
    trainer.register_hooks([PeriodicCheckpointer(saver, 2), Counts(0)])
    trainer.train(max_iter=3)
    file = torch.load(tmp_path / "model_0000001.pth", weights_only=True)
    assert file["trainer"]["hooks"]["Counts"] == {"state": 2}


def test_what_a_process_leaves_that_ends_during_the_run_is_removed(
    tmp_path: Path,
) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    left = tmp_path / f".config.json.tmp-hooktrain-{process.pid}-{socket.gethostname()}"
    left.touch()

    def end(trainer: Any) -> None:
        if trainer.iter == 1:
            assert left.exists()
            process.communicate(b"\n")

    run(tmp_path, 3, CallbackHook(before_step=end), period=5)
    assert process.returncode == 0
    assert names(tmp_path) == ["model_final.pth"]


def sweep_many(folder: Path) -> None:
    """Runs of a sweep, each in a folder of its own, of which every other one fails."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))
    for number in range(100):
        trainer = linear_trainer()
        saver = Checkpointer(trainer.model, folder / str(number), trainer=trainer)
        fail = CallbackHook(after_step=lambda _, number=number: 1 / (number % 2))
        trainer.register_hooks([PeriodicCheckpointer(saver, 9), fail])
        with suppress(ZeroDivisionError):
            trainer.train(max_iter=1)
    (folder / "swept").touch()


def test_a_folder_is_free_and_no_file_stays_open_when_a_run_has_ended(
    tmp_path: Path,
) -> None:
    assert end(start(sweep_many, tmp_path)) == 0
    assert (tmp_path / "swept").exists()
