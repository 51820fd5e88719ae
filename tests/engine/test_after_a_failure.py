"""What users meet who stop, break, or repeat a run, with the hooks that a run usually has."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_toys import Net, StopOnce, Stream, batches, make, sgd

from gloo import run_ranks
from hooktrain.checkpoint import Checkpointer
from hooktrain.engine import AMPTrainer, HookBase, SimpleTrainer
from hooktrain.engine.hooks import (
    BestCheckpointer,
    CallbackHook,
    EvalHook,
    LRScheduler,
    PeriodicCheckpointer,
    PeriodicWriter,
)
from hooktrain.solver import AmpOptimWrapper, ExponentialLR
from hooktrain.utils import comm
from hooktrain.utils.events import JSONWriter


def poisoned(count: int, at: int) -> list[torch.Tensor]:
    data = batches(count)
    data[at][0, 0] = math.nan
    return data


def test_a_bad_loss_in_a_last_period_that_is_cut_short_is_found_too() -> None:
    trainer = make(poisoned(3, at=1), async_write_metrics=True, gather_metric_period=20)
    with pytest.raises(FloatingPointError, match="iteration=1!"):
        trainer.train(0, 3)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_trainer_can_train_again_and_every_last_metric_reaches_the_file(
    tmp_path: Path, asynchronous: bool
) -> None:
    trainer = make(async_write_metrics=asynchronous)
    file = tmp_path / "metrics.json"
    trainer.register_hooks([PeriodicWriter([JSONWriter(file, window_size=1)])])
    trainer.train(0, 3)
    trainer.train(max_iter=5)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    history = {i: v for v, i in trainer.storage.history("total_loss").values()}
    assert [(line["iteration"], line["total_loss"]) for line in lines] == [
        (2, history[2]),
        (4, history[4]),
    ]


def test_a_run_that_fails_in_its_last_iteration_is_neither_evaluated_nor_saved(
    tmp_path: Path,
) -> None:
    evaluated = []

    def evaluate() -> dict[str, Any]:
        evaluated.append(trainer.iter)
        return {"accuracy": 1.0}

    trainer = make(poisoned(4, at=3))
    checkpointer = Checkpointer(trainer.model, str(tmp_path), trainer=trainer)
    put = CallbackHook(
        before_step=lambda t: t.storage.put_scalar("accuracy", 0.5, False)
    )
    trainer.register_hooks(
        [
            put,
            EvalHook(0, evaluate),
            BestCheckpointer(0, checkpointer, "accuracy"),
            PeriodicCheckpointer(checkpointer, period=100),
        ]
    )
    with pytest.raises(FloatingPointError, match="iteration=3!"):
        trainer.train(0, 4)
    assert evaluated == []
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_an_evaluation_that_leaves_the_model_in_evaluation_mode_is_told_at_the_next_step() -> (
    None
):
    trainer = make()
    trainer.register_hooks([EvalHook(2, lambda: trainer.model.eval() and None)])
    with pytest.raises(RuntimeError, match=r"model\.train\(\)"):
        trainer.train(0, 4)
    assert trainer.iter == 2


def test_an_evaluation_that_fails_leaves_a_trainer_that_goes_on() -> None:
    results: list[Any] = [{"accuracy": "high"}, {"accuracy": 0.5}, {"accuracy": 0.75}]
    trainer = make()
    trainer.register_hooks([EvalHook(2, lambda: results.pop(0))])
    with pytest.raises(ValueError, match=r"'accuracy'.*'high'"):
        trainer.train(0, 6)
    # Iteration 1 was finished when the evaluation after it failed.
    trainer.train(max_iter=6)
    values = trainer.storage.history("accuracy").values()
    assert values == [(0.5, 3), (0.75, 6)]


@pytest.mark.parametrize("kind", [SimpleTrainer, AMPTrainer])
def test_a_run_interrupted_inside_a_step_goes_on_with_that_step(
    kind: type[SimpleTrainer],
) -> None:
    def trained(*hooks: HookBase) -> SimpleTrainer:
        model = Net()
        model.dropout.p = 0.0
        trainer = kind(model, [batches(1)[0]], sgd(model))
        trainer.register_hooks(hooks)
        return trainer

    whole, interrupted = trained(), trained(StopOnce(at=1))
    whole.train(0, 4)
    with pytest.raises(KeyboardInterrupt):
        interrupted.train(0, 4)
    interrupted.train(1, 4)
    assert torch.equal(interrupted.model.fc.weight, whole.model.fc.weight)


@pytest.mark.parametrize("event", ["before_step", "after_backward", "after_step"])
def test_a_run_that_broke_off_goes_on_exactly_from_a_checkpoint_or_says_what_to_do(
    event: str,
) -> None:
    def trained(**interrupt: Any) -> SimpleTrainer:
        trainer = make(Stream())
        trainer.seed = 3
        schedule = ExponentialLR(trainer.optim_wrapper, 0.5, by_epoch=False)
        trainer.register_hooks(
            [CallbackHook(**interrupt), LRScheduler(scheduler=schedule)]
        )
        return trainer

    def ctrl_c(trainer: SimpleTrainer) -> None:
        if trainer.iter == 2 and not states[1:]:
            states.append({})
            raise KeyboardInterrupt

    whole, broken = trained(), trained(**{event: ctrl_c})
    whole.train(0, 5)
    states: list[Any] = []
    broken.train(0, 2)
    states.append(copy.deepcopy((broken.model.state_dict(), broken.state_dict())))
    with pytest.raises(KeyboardInterrupt):
        broken.train(max_iter=5)
    with pytest.raises(
        RuntimeError, match=r"broke off inside iteration 2.* load a checkpoint"
    ):
        broken.train(max_iter=5)
    broken.model.load_state_dict(states[0][0])
    broken.load_state_dict(states[0][1])
    broken.train(max_iter=5)
    assert torch.equal(broken.model.fc.weight, whole.model.fc.weight)
    for name in ("lr", "total_loss"):
        assert (
            broken.storage.history(name).values()
            == whole.storage.history(name).values()
        )


def test_a_scaler_goes_on_after_an_error_between_unscaling_and_update() -> None:
    def trained(*hooks: HookBase) -> SimpleTrainer:
        model = Net()
        model.dropout.p = 0.0
        wrapper = AmpOptimWrapper(sgd(model), "float16", clip_grad={"max_norm": 1.0})
        wrapper.grad_scaler = torch.amp.GradScaler(
            "cpu", init_scale=256.0
        )  # does not overflow
        trainer = SimpleTrainer(model, [batches(1)[0]], wrapper)
        trainer.register_hooks(hooks)
        return trainer

    whole, interrupted = trained(), trained(StopOnce(at=1))
    whole.train(0, 4)
    with pytest.raises(KeyboardInterrupt):
        interrupted.train(0, 4)
    interrupted.train(1, 4)
    assert torch.equal(interrupted.model.fc.weight, whole.model.fc.weight)
    scaler = whole.optim_wrapper.state_dict()["grad_scaler"]
    assert interrupted.optim_wrapper.state_dict()["grad_scaler"] == scaler


def test_the_losses_of_a_second_run_from_the_start_are_checked_too() -> None:
    trainer = make(async_write_metrics=True)
    trainer.train(0, 8)
    trainer.data_loader = poisoned(3, at=1)
    with pytest.raises(FloatingPointError, match="iteration=1!"):
        trainer.train(0, 3)


def test_a_failure_to_begin_is_no_success_though_nothing_was_left_to_do() -> None:
    def fail(_: Any) -> None:
        raise OSError("no disk")

    evaluated: list[int] = []
    trainer = make()
    trainer.train(0, 2)
    evaluate = EvalHook(
        0, lambda: {"calls": len(evaluated)} if evaluated.append(1) else {}
    )  # type: ignore[func-returns-value]
    trainer.register_hooks([evaluate, CallbackHook(before_train=fail)])
    with pytest.raises(OSError, match="no disk"):
        trainer.train(max_iter=2)
    assert evaluated == []


def evaluate_badly(folder: Path) -> str:
    """The final evaluation fails on rank 1, where rank 0 waits for its part of the results."""

    def evaluate() -> dict[str, Any]:
        if comm.get_rank() == 1:
            raise ValueError("no such label")
        comm.all_gather("results of rank 0")
        return {"accuracy": 1.0}

    trainer = make(batches(3))
    checkpointer = Checkpointer(trainer.model, folder, trainer=trainer, background=True)
    trainer.register_hooks(
        [
            EvalHook(0, evaluate),
            BestCheckpointer(0, checkpointer, "accuracy"),
            HookBase(),
        ]
    )
    try:
        trainer.train(0, 3)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "succeeded"


def test_a_final_evaluation_that_fails_on_one_rank_ends_all(tmp_path: Path) -> None:
    first, second = run_ranks(evaluate_badly, 2, tmp_path, limit_seconds=30)
    assert second == "ValueError: no such label"
    assert "Connection" in first
