"""What one rank alone sees, knows or asks for ends or changes the run alike on all ranks."""

import errno
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau
from trainer_toys import Net, batches, sgd

from gloo import run_ranks
from hooktrain.checkpoint import Checkpointer, checkpointer
from hooktrain.checkpoint.files import write_file
from hooktrain.engine import SimpleTrainer
from hooktrain.engine.hooks import (
    BestCheckpointer,
    CallbackHook,
    EvalHook,
    LRScheduler,
    PeriodicCheckpointer,
)
from hooktrain.model.sharding import shard_model
from hooktrain.solver import OptimWrapper
from hooktrain.utils import comm
from hooktrain.utils.tensors import local_tensor
from toys import LinearLoss, linear_trainer


def plateau_of_the_main_rank() -> float:
    trainer = linear_trainer(lr=1.0)
    scheduler = ReduceLROnPlateau(trainer.optimizer, factor=0.5, patience=0)
    evaluate = EvalHook(2, lambda: {"loss": 1.0} if comm.is_main_process() else {})
    trainer.register_hooks([evaluate, LRScheduler(scheduler=scheduler, metric="loss")])
    trainer.train(0, 8)
    return float(trainer.optimizer.param_groups[0]["lr"])


def test_what_the_main_rank_evaluates_moves_the_rates_of_all() -> None:
    assert run_ranks(plateau_of_the_main_rank, 2) == [0.25, 0.25]


def values_of_a_buffer() -> list[float]:
    class Counting(LinearLoss):
        def __init__(self) -> None:
            super().__init__()
            self.count: Tensor
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Any:
            self.count += 1
            return {"loss": super().forward(x), "count": self.count}

    model = Counting()
    trainer = SimpleTrainer(model, batches(4), sgd(model))
    trainer.train(0, 3)
    return [value for value, _ in trainer.storage.history("count").values()]


def metrics_of_any_kind() -> list[float]:
    class Telling(LinearLoss):
        def forward(self, x: Tensor) -> Any:
            loss = super().forward(x)
            # An integer and a number that float32 cannot hold, and a loss with a dimension.
            count, share = (
                torch.tensor(16777217),
                torch.tensor(0.1, dtype=torch.float64),
            )
            return {"loss": loss.reshape(1), "count": count, "share": share}

    model = Telling()
    trainer = SimpleTrainer(model, batches(1), sgd(model))
    trainer.train(0, 1)
    return [trainer.storage.history(name).latest() for name in ("count", "share")]


def test_metrics_of_several_ranks_are_as_precise_as_those_of_one() -> None:
    assert (
        run_ranks(metrics_of_any_kind, 2)
        == [[16777217.0, 0.1]] * 2
        == [metrics_of_any_kind()] * 2
    )


def test_a_metric_that_the_model_goes_on_writing_into_keeps_its_value() -> None:
    assert run_ranks(values_of_a_buffer, 2) == [[1.0, 2.0, 3.0]] * 2


def stop_before_the_first_step() -> int:
    def ask(trainer: Any) -> None:
        if comm.get_rank() == 1:
            trainer.request_stop("nothing to do")

    trainer = linear_trainer(CallbackHook(before_train=ask))
    trainer.train(0, 50)
    return trainer.iter


def test_a_stop_asked_for_by_one_rank_before_the_first_step_runs_none_on_any() -> None:
    assert run_ranks(stop_before_the_first_step, 2) == [0, 0]


def bad_loss_before_a_checkpoint_of_the_main_rank(folder: Path) -> str:
    class BadOnce(LinearLoss):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            bad = comm.get_rank() == 1 and self.calls == 3
            return super().forward(x) * (math.nan if bad else 1.0)

    model = BadOnce()
    trainer = SimpleTrainer(model, batches(4), sgd(model), gather_metric_period=8)
    trainer.register_hooks(
        [
            CallbackHook(
                after_backward=lambda _: [p.grad.zero_() for p in model.parameters()]
            )
        ]
    )
    if comm.is_main_process():
        checkpointer = Checkpointer(model, folder, trainer=trainer)
        trainer.register_hooks([PeriodicCheckpointer(checkpointer, 5)])
    try:
        trainer.train(0, 8)
    except FloatingPointError as error:
        return str(error).partition("!")[0]
    return "trained to the end"


def test_a_checkpoint_of_the_main_rank_alone_does_not_change_its_verdict(
    tmp_path: Path,
) -> None:
    verdicts = run_ranks(bad_loss_before_a_checkpoint_of_the_main_rank, 2, tmp_path)
    assert verdicts == ["Loss became infinite or NaN at iteration=2"] * 2


def trained_after_half_a_window(folder: Path) -> list[float]:
    model: nn.Module = Net()
    generator = torch.Generator().manual_seed(comm.get_rank())
    data = [torch.randn(8, 4, generator=generator) for _ in range(4)]
    wrapper = OptimWrapper(sgd(model), accumulative_counts=2)
    trainer = SimpleTrainer(DistributedDataParallel(model), data, wrapper)
    # What an error between the two backward passes of a step leaves behind.
    wrapper.backward(model(data[0]))
    trainer.train(0, 3)
    return model.fc.weight.flatten().tolist()  # type: ignore[operator, union-attr]


def test_a_window_that_an_error_cut_short_does_not_shift_those_that_follow(
    tmp_path: Path,
) -> None:
    first, second = run_ranks(trained_after_half_a_window, 2, tmp_path)
    assert first == second


def best_on_a_full_disk(folder: Path, background: bool) -> float | None:
    trainer = linear_trainer()
    saver = Checkpointer(trainer.model, folder, background=background, trainer=trainer)
    calls = []

    def full_at_first(state: dict[str, Any], path: str) -> None:
        calls.append(path)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_file(state, path)

    checkpointer.write_file = full_at_first  # of this process only
    values = iter([0.5, 0.25, 0.125])
    best = BestCheckpointer(1, saver, "acc")
    trainer.register_hooks([EvalHook(1, lambda: {"acc": next(values)}), best])
    trainer.train(0, 3)
    return best.best_metric


@pytest.mark.parametrize("background", [False, True])
def test_a_best_model_that_the_main_rank_could_not_save_is_forgotten_by_all(
    background: bool, tmp_path: Path
) -> None:
    assert run_ranks(best_on_a_full_disk, 2, tmp_path, background) == [0.25, 0.25]
    assert torch.load(tmp_path / "model_best.pth", weights_only=True)["iteration"] == 1


def spoil_the_shard_of_rank_1(folder: Path) -> tuple[str, list[str]]:
    def spoil(trainer: Any) -> None:
        if trainer.iter == 1 and comm.get_rank() == 1:
            local_tensor(trainer.model.get_parameter("fc.weight"))[0, 0] = math.nan

    model = shard_model(LinearLoss())
    trainer = SimpleTrainer(model, batches(4), sgd(model))
    checkpointer = Checkpointer(model, folder, sharded=True, trainer=trainer)
    saving = PeriodicCheckpointer(checkpointer, 1)
    trainer.register_hooks([CallbackHook(after_step=spoil), saving])
    with pytest.raises(FloatingPointError, match=r"fc\.weight") as caught:
        trainer.train(0, 4)
    return str(caught.value), sorted(path.name for path in folder.glob("[!.]*"))


def test_a_shard_with_nan_ends_the_run_on_all_ranks_before_a_save(
    tmp_path: Path,
) -> None:
    main, other = run_ranks(spoil_the_shard_of_rank_1, 2, tmp_path)
    assert main == other
    assert main[1] == ["last_checkpoint", "model_0000000"]
