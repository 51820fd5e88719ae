from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from equality import assert_equal
from gloo import run_ranks, torchrun
from hooktrain.checkpoint import Checkpointer
from hooktrain.config import LazyCall
from hooktrain.data import build_train_loader
from hooktrain.engine import SimpleTrainer, StepTrainer, create_ddp_model
from hooktrain.engine.hooks import CallbackHook, PeriodicCheckpointer
from hooktrain.model import (
    NamingDistributedDataParallel,
    SeparateDistributedDataParallel,
    StepDistributedDataParallel,
)
from hooktrain.solver import OptimWrapperDict
from hooktrain.strategy import (
    DDPStrategy,
    FSDPStrategy,
    SingleDeviceStrategy,
    build_strategy,
)
from toys import Regression, sgd_wrapper, toy_gan, train_steps

HALVES = [slice(0, 4), slice(4, 8)]


def strategy(**kwargs: Any) -> DDPStrategy:
    return DDPStrategy(device="cpu", seed=3, **kwargs)


def losses_of_this_rank() -> list[float]:
    made = build_strategy("auto", device="cpu", seed=3)
    assert isinstance(made, DDPStrategy)
    model = made.prepare(Regression)
    assert isinstance(model, StepDistributedDataParallel)
    return train_steps(model, sgd_wrapper(model), range(5), HALVES[made.rank])


def equal_weights() -> Any:
    calls = []
    original = dist._broadcast_coalesced  # type: ignore[attr-defined]

    def counted(group: Any, tensors: list[Tensor], *args: Any) -> None:
        calls.append(len(tensors))
        original(group, tensors, *args)

    dist._broadcast_coalesced = counted  # type: ignore[attr-defined]
    made = DDPStrategy(device="cpu", seed=3, diff_rank_seed=True)
    made.setup()
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    first = model[0].weight.detach().clone()
    made.place_model(model)
    dist._broadcast_coalesced = original  # type: ignore[attr-defined]
    return made.seed, calls, first, model[0].weight.detach()


class OwnStep(Regression):
    """A model with a step of its own."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        return super().train_step(data, optim_wrapper)


def wrappers() -> list[str]:
    models: list[nn.Module] = [nn.Linear(1, 1), OwnStep(), Regression()]
    return [type(strategy().prepare(model)).__name__ for model in models]


def options() -> float:
    mine = {"find_unused_parameters": True, "wrapper": NamingDistributedDataParallel}
    made = strategy(ddp=mine)
    model = made.prepare(Regression())
    assert type(model) is NamingDistributedDataParallel
    assert model.find_unused_parameters
    assert not model.broadcast_buffers
    assert made.wrap_model(model) is model
    compressing = strategy(ddp={"fp16_compression": True})
    compressed: Any = compressing.prepare(nn.Linear(1, 1, bias=False))
    compressed(torch.tensor([[1.0 + 2**-13]])).sum().backward()
    gradient: float = compressed.module.weight.grad.item()
    return gradient


def everything() -> dict[str, Any]:
    return {
        "losses": losses_of_this_rank(),
        "weights": equal_weights(),
        "wrappers": wrappers(),
        "options": options(),
    }


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return run_ranks(everything, 2)


def test_losses_on_two_ranks_are_those_of_one_with_the_whole_batch(ranks: Any) -> None:
    model = SingleDeviceStrategy(device="cpu", seed=3).prepare(Regression)
    mean = torch.tensor([rank["losses"] for rank in ranks]).mean(0)
    alone = train_steps(model, sgd_wrapper(model), range(5))
    assert mean.tolist() == pytest.approx(alone, abs=1e-6)


def test_weights_are_those_of_the_first_rank(ranks: Any) -> None:
    (seed, calls, first, weight), other = (rank["weights"] for rank in ranks)
    assert seed == other[0] == 3
    # The linear layer has two tensors, the batch norm five.
    assert calls == other[1] == [7]
    assert not torch.equal(first, other[2])
    assert torch.equal(first, weight)
    assert torch.equal(first, other[3])


def test_the_wrapper_is_chosen_by_the_step_of_the_model(ranks: Any) -> None:
    assert ranks[0]["wrappers"] == [
        "NamingDistributedDataParallel",
        "SeparateDistributedDataParallel",
        "StepDistributedDataParallel",
    ]


def test_the_options_of_ddp_are_reached(ranks: Any) -> None:
    # The gradient, rounded to float16.
    assert [rank["options"] for rank in ranks] == [1.0, 1.0]


def test_one_process_without_a_launcher_needs_no_wrapper() -> None:
    model = Regression()
    assert strategy().prepare(model) is model


STATIC = {"static_graph": True}


def test_auto_is_a_single_device_for_one_process() -> None:
    made = build_strategy("auto", ddp=STATIC, seed=3)
    assert isinstance(made, SingleDeviceStrategy)
    assert made.seed == 3


def test_auto_is_data_parallel_for_several_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in torchrun(world_size=2).items():
        monkeypatch.setenv(name, value)
    made = build_strategy("auto", ddp=STATIC)
    assert isinstance(made, DDPStrategy)
    assert made.ddp == STATIC


def test_a_lazy_call_wins_over_the_defaults() -> None:
    config = LazyCall(DDPStrategy)(seed=1, ddp={})
    before = dict(config)
    made = build_strategy(config, seed=2, device="cpu", ddp=STATIC)
    assert isinstance(made, DDPStrategy)
    assert made.seed == 1
    assert made.ddp == {}
    assert config == before
    saved = {"_target_": "hooktrain.strategy.FSDPStrategy", "wrap": ["Block"]}
    assert isinstance(build_strategy(saved, ddp=STATIC), FSDPStrategy)


@pytest.mark.parametrize("name", ["FSDPStrategy", "hooktrain.strategy.FSDPStrategy"])
def test_a_strategy_is_built_by_its_name(name: str) -> None:
    assert isinstance(build_strategy(name, ddp=STATIC), FSDPStrategy)


def test_what_describes_no_strategy_is_refused() -> None:
    # The other arguments would not reach a strategy that is already built.
    with pytest.raises(TypeError, match="SingleDeviceStrategy object"):
        build_strategy(SingleDeviceStrategy())  # type: ignore[arg-type]
    with pytest.raises(ImportError, match="DDPStratgy"):
        build_strategy("DDPStratgy")
    with pytest.raises(TypeError, match="LazyCall"):
        build_strategy({"type": "DDPStrategy"})
    with pytest.raises(TypeError, match="wrk_dir"):
        build_strategy("SingleDeviceStrategy", wrk_dir=".")


class Noisy(nn.Module):
    """Batch norm and dropout between two layers, with weights of many digits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(
            self.norm(self.first(x)).relu(), 0.3, self.training
        )
        return (self.last(hidden)[:, 0] - x.sum(1)).square().mean()


def run(
    folder: Path, max_iter: int, model: nn.Module, rows: list[Tensor], trainer: Any
) -> tuple[int, dict[str, Tensor]]:
    """Save after each iteration; give the first iteration, and the weights at the end."""
    trainer.data_loader = build_train_loader(rows, total_batch_size=6, seed=5)
    trainer.seed = 5
    saver = Checkpointer(model, folder, trainer=trainer)
    trainer.register_hooks([PeriodicCheckpointer(saver, 1)])
    saver.resume_or_load("")
    trainer.train(max_iter=max_iter)
    return trainer.start_iter, model.state_dict()


def drawn(*shape: int) -> list[Tensor]:
    return list(torch.randn(*shape, generator=torch.Generator().manual_seed(3)))


def train_noisy(folder: Path, max_iter: int) -> Any:
    model = Noisy()
    optimizer = sgd_wrapper(model, accumulative_counts=2)
    trainer = SimpleTrainer(create_ddp_model(model), [], optimizer)
    return run(folder, max_iter, model, drawn(50, 6), trainer)


def train_pairs(folder: Path, max_iter: int) -> Any:
    """A model with a step of its own and two optimizers."""
    model = toy_gan(1)
    parts = {name: getattr(model, name) for name in ("generator", "discriminator")}
    ddp = SeparateDistributedDataParallel(model)
    wrappers = {name: sgd_wrapper(part) for name, part in parts.items()}
    trainer = StepTrainer(ddp, [], OptimWrapperDict(**wrappers))
    return run(folder, max_iter, model, drawn(50, 3), trainer)


@pytest.mark.parametrize(
    ("kind", "broken_off_at"), [(train_noisy, 1), (train_noisy, 2), (train_pairs, 1)]
)
def test_three_ranks_resume_bit_for_bit(
    kind: Any, broken_off_at: int, tmp_path: Path
) -> None:
    whole = run_ranks(kind, 3, tmp_path / "whole", 4)
    run_ranks(kind, 3, tmp_path / "resumed", broken_off_at)
    resumed = run_ranks(kind, 3, tmp_path / "resumed", 4)
    assert resumed[0][0] == broken_off_at
    # Batch norms of other ranks have their own.
    assert_equal(resumed[0][1], whole[0][1])


class Halves(nn.Module):
    """Two layers, of which one may be frozen for a while."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.head(self.body(x).tanh())[:, 0] - x.sum(1)).square().mean()


def freeze(model: Halves) -> None:
    model.body.requires_grad_(False)


def unfreeze(model: Halves) -> None:
    model.body.requires_grad_(True)


def swap(model: Halves) -> None:
    model.requires_grad_(True)
    model.head.requires_grad_(False)


def replace(model: Halves) -> None:
    model.head = nn.Linear(4, 1)


def nothing(model: Halves) -> None:
    pass


UNUSED = {"find_unused_parameters": True}
# What is done before the wrapper is made, after it, and before the fourth iteration.
WRONG = [
    (create_ddp_model, {}, freeze, nothing, unfreeze),
    (create_ddp_model, UNUSED, freeze, nothing, swap),
    (create_ddp_model, UNUSED, nothing, nothing, replace),
    (create_ddp_model, {}, freeze, unfreeze, nothing),
    (SeparateDistributedDataParallel, {}, freeze, nothing, unfreeze),
    (nn.parallel.DistributedDataParallel, {}, freeze, nothing, unfreeze),
]
RIGHT = [
    (create_ddp_model, {}, nothing, nothing, nothing),
    (create_ddp_model, {}, freeze, nothing, nothing),
    (create_ddp_model, UNUSED, nothing, nothing, freeze),
    (create_ddp_model, UNUSED, nothing, freeze, unfreeze),
    (nn.parallel.DistributedDataParallel, UNUSED, nothing, freeze, unfreeze),
]


def weights_of(wrap: Any, options: Any, before: Any, after: Any, later: Any) -> Any:
    model = Halves()
    before(model)
    wrapped = wrap(model, **options) if dist.is_initialized() else model
    after(model)
    data = build_train_loader(drawn(16, 4), total_batch_size=4, seed=5)  # type: ignore[arg-type]
    trainer = SimpleTrainer(wrapped, data, torch.optim.SGD(model.parameters(), 0.1))
    changes = {3: later}

    def change(trainer: SimpleTrainer) -> None:
        changes.get(trainer.iter, nothing)(model)

    trainer.register_hooks([CallbackHook(before_step=change)])
    trainer.sync_period = 5
    trainer.train(max_iter=10)
    return model.state_dict()


def refused() -> list[str]:
    errors = []
    for case in WRONG:
        name = "head.weight" if replace in case else "body.weight"
        with pytest.raises(
            ValueError, match=f"{name}.*unused_parameters=True"
        ) as error:
            weights_of(*case)
        errors.append(str(error.value))
    return errors


def test_layers_whose_gradients_the_ranks_do_not_exchange_are_refused() -> None:
    one, other = run_ranks(refused, 2)
    assert one == other


def trained_together() -> list[dict[str, Tensor]]:
    return [weights_of(*case) for case in RIGHT]


def test_layers_that_are_frozen_for_a_while_are_trained_as_by_one_process() -> None:
    alone = trained_together()
    for found, other in zip(*run_ranks(trained_together, 2), strict=True):
        assert_equal(found, other)
        wanted = alone.pop(0)
        for name, weight in found.items():
            torch.testing.assert_close(weight, wanted[name], rtol=0, atol=1e-6)
