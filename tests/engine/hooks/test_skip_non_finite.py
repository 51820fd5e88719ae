import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gloo import run_ranks
from hooktrain.checkpoint import Checkpointer
from hooktrain.engine import SimpleTrainer, StepTrainer, hooks
from hooktrain.engine.losses import WHERE_IT_BEGINS
from hooktrain.model.sharding import shard_model
from hooktrain.solver import AmpOptimWrapper, OptimWrapper, OptimWrapperDict
from hooktrain.strategy import create_ddp_model
from hooktrain.utils import comm
from hooktrain.utils.tensors import full_tensor
from toys import LinearLoss, Two, batches


def data(poisoned: set[int], value: float = math.nan) -> list[Tensor]:
    factors = [value if i in poisoned else 1.0 for i in range(8)]
    return [
        batch * factor for batch, factor in zip(batches(8, 4), factors, strict=True)
    ]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)


def run(
    model: nn.Module,
    loader: list[Any],
    optimizer: Any = None,
    *skip: Any,
    max_iter: int = 4,
) -> SimpleTrainer:
    kind = StepTrainer if isinstance(model, Two) else SimpleTrainer
    trainer = kind(model, loader, optimizer or adam(model))
    trainer.register_hooks([hooks.SkipNonFinite(*skip)])
    trainer.train(max_iter=max_iter)
    return trainer


def train(
    poisoned: set[int], *skip: Any, value: float = math.nan, **options: Any
) -> SimpleTrainer:
    model = LinearLoss()
    wrapper = OptimWrapper(adam(model), **options)
    return run(model, data(poisoned, value=value), wrapper, *skip, max_iter=8)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    "clip", [None, {"max_norm": 1.0}, {"type": "value", "clip_value": 0.1}]
)
def test_a_run_goes_on_as_if_the_update_had_not_been_asked_for(
    value: float, clip: Any
) -> None:
    trainer = train({2, 5}, value=value, clip_grad=clip)
    model = LinearLoss()
    optimizer = adam(model)
    for i, batch in enumerate(data(set())):
        if i not in (2, 5):
            optimizer.zero_grad()
            model(batch).backward()
            if clip == {"max_norm": 1.0}:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            elif clip is not None:
                nn.utils.clip_grad_value_(model.parameters(), 0.1)
            optimizer.step()
    pairs = zip(trainer.model.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    losses = [value for value, _ in trainer.storage.history("total_loss").values()]
    assert [i for i, loss in enumerate(losses) if not math.isfinite(loss)] == [2, 5]
    assert trainer.optim_wrapper.skipped_updates == 2
    assert trainer.storage.history("skipped_updates").values() == [(1.0, 2), (2.0, 5)]


def test_too_many_in_a_row_raise() -> None:
    train({1, 2, 4, 5}, 2)
    with pytest.raises(FloatingPointError, match="iteration 3"):
        train({3}, 0)
    with pytest.raises(FloatingPointError, match="iteration 3") as caught:
        train({1, 2, 3}, 2)
    assert WHERE_IT_BEGINS in str(caught.value)


def test_a_scaler_skips_by_itself() -> None:
    model = LinearLoss()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    wrapper = AmpOptimWrapper(adam(model), "float16", grad_scaler=scaler)
    run(model, data({2}), wrapper)
    assert wrapper.skipped_updates == 1
    assert wrapper.grad_scaler.get_scale() == 2.0
    assert all(parameter.isfinite().all() for parameter in model.parameters())


class Lookup(nn.Module):
    """The sum of embeddings, times a factor; its gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 2, sparse=True)

    def forward(self, factor: float) -> Tensor:
        loss: Tensor = self.table(torch.tensor([1, 1, 3])).sum() * factor
        return loss


def test_sparse_gradients_are_looked_at() -> None:
    model = Lookup()
    # The squares of 1e25 are infinite in float32.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-26)
    trainer = run(model, [1e25, math.nan, 1e25, math.inf], optimizer)
    assert trainer.optim_wrapper.skipped_updates == 2
    assert model.table.weight.isfinite().all()


class WithAnEmptyTable(LinearLoss):
    """A parameter without elements takes part, as of a vocabulary that is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.nothing.sum()


def test_a_parameter_without_elements_counts_as_finite(tmp_path: Path) -> None:
    model = WithAnEmptyTable()
    trainer = run(model, data({1}))
    assert trainer.optim_wrapper.skipped_updates == 1
    assert model.nothing.grad is not None
    trainer.register_hooks(
        [hooks.PeriodicCheckpointer(Checkpointer(model, tmp_path), 1)]
    )
    trainer.train(max_iter=5)  # a save looks at all weights


@pytest.mark.parametrize("counts", [1, 2])
def test_of_several_optimizers_only_the_one_concerned_skips(counts: int) -> None:
    model, before = Two(), Two()
    wrappers = OptimWrapperDict(
        one=OptimWrapper(adam(model.one)),
        two=OptimWrapper(adam(model.two), accumulative_counts=counts),
    )
    trainer = run(
        model, data({0}), wrappers, max_iter=counts
    )  # in the first pass of an accumulation
    assert not torch.equal(model.one.weight, before.one.weight)
    assert torch.equal(model.two.weight, before.two.weight)
    assert (wrappers["one"].skipped_updates, wrappers["two"].skipped_updates) == (0, 1)
    assert trainer.storage.history("two.skipped_updates").values() == [
        (1.0, counts - 1)
    ]
    trainer.train(max_iter=2 * counts)
    assert model.two.weight.isfinite().all()
    assert not torch.equal(model.two.weight, before.two.weight)


def test_a_run_without_the_hook_tolerates_nothing_that_one_with_it_did() -> None:
    trainer = train({1})
    trainer._hooks = []  # as scripts for detectron2 do
    with pytest.raises(FloatingPointError, match="iteration=1"):
        trainer.train(0, 4)


def test_a_poisoned_buffer_is_not_saved_and_ends_the_run(tmp_path: Path) -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), LinearLoss())
    trainer = SimpleTrainer(model, data({1}), adam(model))
    saver = Checkpointer(model, tmp_path, trainer=trainer)
    trainer.register_hooks(
        [hooks.SkipNonFinite(), hooks.PeriodicCheckpointer(saver, 4)]
    )
    with pytest.raises(FloatingPointError, match="running_mean is nan"):
        trainer.train(max_iter=8)
    assert trainer.iter == 3
    assert not [*tmp_path.glob("*.pth")]


def test_a_loss_that_is_not_finite_although_its_gradients_are_ends_the_run() -> None:
    model = LinearLoss()
    model.register_forward_hook(lambda module, _, loss: loss + math.inf)
    with pytest.raises(FloatingPointError, match="iteration=0") as caught:
        run(model, data(set()))
    assert WHERE_IT_BEGINS in str(caught.value)


def two_ranks(kind: str, poisoned_rank: int) -> tuple[list[Tensor], int, list[float]]:
    model: Any = LinearLoss()
    model = create_ddp_model(model) if kind == "ddp" else shard_model(model)
    mine = {2} if comm.get_rank() == poisoned_rank else set()
    trainer = SimpleTrainer(model, data(mine), adam(model), gather_metric_period=4)
    trainer.register_hooks([hooks.SkipNonFinite()])
    trainer.train(max_iter=8)
    losses = [value for value, _ in trainer.storage.history("total_loss").values()]
    weights = [full_tensor(parameter).clone() for parameter in model.parameters()]
    return weights, trainer.optim_wrapper.skipped_updates, losses


@pytest.mark.parametrize(("kind", "poisoned_rank"), [("ddp", 1), ("fsdp", 0)])
def test_all_ranks_skip_what_one_has_poisoned(kind: str, poisoned_rank: int) -> None:
    alone = train({2})
    for weights, skipped, losses in run_ranks(two_ranks, 2, kind, poisoned_rank):
        # Both ranks have the same data but for the poison: the means are those of one.
        pairs = zip(weights, alone.model.parameters(), strict=True)
        assert all(torch.allclose(ours, theirs, atol=1e-6) for ours, theirs in pairs)
        assert skipped == 1
        assert [i for i, loss in enumerate(losses) if not math.isfinite(loss)] == [2]


def one_accumulation_is_open(folder: str) -> int:
    """Rank 1 poisons the accumulation of one optimizer while the other one updates."""
    model = Two()
    for name in ("one", "two"):
        setattr(model, name, create_ddp_model(getattr(model, name)))
    wrappers = OptimWrapperDict(
        one=OptimWrapper(adam(model.one)),
        two=OptimWrapper(adam(model.two), accumulative_counts=2),
    )
    mine = {0} if comm.get_rank() == 1 else set()
    trainer = StepTrainer(model, data(mine), wrappers, gather_metric_period=4)
    trainer.register_hooks([hooks.SkipNonFinite()])
    trainer.train(max_iter=4)
    return wrappers["two"].skipped_updates


def test_gradients_of_an_open_accumulation_are_not_looked_at(tmp_path: Path) -> None:
    assert run_ranks(one_accumulation_is_open, 2, str(tmp_path)) == [1, 1]
