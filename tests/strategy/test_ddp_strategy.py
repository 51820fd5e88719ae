from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gloo import run_ranks
from hooktrain.checkpoint import load_file
from hooktrain.engine import SimpleTrainer
from hooktrain.model import StepDistributedDataParallel
from hooktrain.model.wrappers import unwrap_model
from hooktrain.solver import OptimWrapper
from hooktrain.strategy import DDPStrategy, SingleDeviceStrategy, build_strategy
from hooktrain.utils import comm
from hooktrain.utils.env import seed_step
from toys import SGD, Regression, batch, train_steps

HALVES = [slice(0, 4), slice(4, 8)]


def strategy(**kwargs: Any) -> DDPStrategy:
    return DDPStrategy(device="cpu", env_kwargs={"seed": 3}, **kwargs)


def single(**kwargs: Any) -> SingleDeviceStrategy:
    return SingleDeviceStrategy(device="cpu", env_kwargs={"seed": 3}, **kwargs)


def losses_of_this_rank() -> list[float]:
    made = build_strategy("auto", device="cpu", env_kwargs={"seed": 3})
    assert isinstance(made, DDPStrategy)
    model, wrapper = made.prepare({"type": "StrategyToy"}, optim_wrapper=SGD)
    assert isinstance(model, StepDistributedDataParallel)
    return train_steps(model, wrapper, range(5), HALVES[made.rank])


def equal_weights() -> Any:
    calls = []
    original = dist._broadcast_coalesced  # type: ignore[attr-defined]

    def counted(group: Any, tensors: list[Tensor], *args: Any) -> None:
        calls.append(len(tensors))
        original(group, tensors, *args)

    dist._broadcast_coalesced = counted  # type: ignore[attr-defined]
    made = DDPStrategy(device="cpu", env_kwargs={"seed": 3, "diff_rank_seed": True})
    made.setup()
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    first = model[0].weight.detach().clone()
    made.place_model(model)
    dist._broadcast_coalesced = original  # type: ignore[attr-defined]
    return made.seed, calls, first, model[0].weight.detach()


class Loss(nn.Linear):
    """A model that returns its loss."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


class OwnStep(Regression):
    """Owns its step."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        return super().train_step(data, optim_wrapper)


def wrappers() -> list[str]:
    models: list[nn.Module] = [nn.Linear(1, 1), OwnStep(), Regression()]
    return [type(strategy().prepare(model)).__name__ for model in models]


def options() -> float:
    mine = {"find_unused_parameters": True, "type": "StepDistributedDataParallel"}
    made = strategy(model_wrapper=mine)
    model = made.prepare(Regression())
    assert isinstance(model, StepDistributedDataParallel)
    assert model.find_unused_parameters
    assert not model.broadcast_buffers
    assert made.wrap_model(model) is model
    compressing = strategy(model_wrapper={"fp16_compression": True})
    compressed = compressing.prepare(nn.Linear(1, 1, bias=False))
    compressed(torch.tensor([[1.0 + 2**-13]])).sum().backward()
    gradient: float = compressed.module.weight.grad.item()
    return gradient


def save(folder: str) -> dict[str, Any]:
    made = strategy(work_dir=folder)
    options = {"type": "StrategyToy", "dropout": 0.5}
    model, wrapper = made.prepare(
        options, optim_wrapper={**SGD, "accumulative_counts": 2}
    )
    train_steps(model, wrapper, range(4), HALVES[made.rank])
    seed_step(made.seed, 4, made.rank)
    if made.rank == 0:
        made.save_checkpoint(Path(folder) / "a.pth", extra_ckpt={"meta": {"iter": 4}})
    expected = train_steps(model, wrapper, range(4, 8), HALVES[made.rank])
    made.load_or_resume(resume=True)
    again = train_steps(model, wrapper, range(4, 8), HALVES[made.rank])
    return {"equal": again == expected}


def accumulated(made: Any, share: slice = slice(None), **known: int) -> Tensor:
    """The weights after updates of four batches each, by a trainer that knows no such number."""
    accumulating = {**SGD, "accumulative_counts": 4}
    torch.manual_seed(0)
    model, wrapper = made.prepare(
        Loss(1, 1), optim_wrapper=accumulating, dispatch_kwargs=known
    )
    data = [batch(8, seed)[1][share] for seed in range(8)]
    SimpleTrainer(model, data, wrapper).train(0, 4)
    weights: Tensor = unwrap_model(model).weight.detach()
    return weights


def everything(folder: str) -> dict[str, Any]:
    return {
        "losses": losses_of_this_rank(),
        "weights": equal_weights(),
        "wrappers": wrappers(),
        "options": options(),
        "save": save(folder),
        "accumulated": accumulated(strategy(), HALVES[comm.get_rank()], max_iters=6),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ddp")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[Any]:
    return run_ranks(everything, 2, str(folder))


def test_losses_on_two_ranks_are_those_of_one_with_the_whole_batch(ranks: Any) -> None:
    model, wrapper = single().prepare({"type": "StrategyToy"}, optim_wrapper=SGD)
    mean = torch.tensor([rank["losses"] for rank in ranks]).mean(0)
    assert mean.tolist() == pytest.approx(
        train_steps(model, wrapper, range(5)), abs=1e-6
    )


def test_weights_are_those_of_the_first_rank(ranks: Any) -> None:
    (seed, calls, first, weight), other = (rank["weights"] for rank in ranks)
    assert seed == other[0] == 3
    # Two tensors of the linear layer, five of the batch norm.
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
    # The gradient as float16 has it.
    assert [rank["options"] for rank in ranks] == [1.0, 1.0]


def test_a_trainer_counts_its_passes_itself_whatever_the_strategy_knows(
    ranks: Any,
) -> None:
    first, second = (rank["accumulated"] for rank in ranks)
    assert torch.equal(first, second)
    alone = accumulated(single())
    assert torch.equal(accumulated(single(), max_iters=6), alone)
    torch.testing.assert_close(first, alone)


def test_all_ranks_go_on_from_what_the_main_process_alone_has_saved(ranks: Any) -> None:
    assert all(rank["save"]["equal"] for rank in ranks)


def test_a_checkpoint_of_two_ranks_resumes_on_one(ranks: Any, folder: Path) -> None:
    assert list(load_file(folder / "a.pth")["model"]) == list(Regression().state_dict())
    made = single(work_dir=folder)
    _, wrapper = made.prepare(
        {"type": "StrategyToy"}, optim_wrapper={**SGD, "accumulative_counts": 2}
    )
    made.load_or_resume(resume=True)
    assert isinstance(wrapper, OptimWrapper)
    assert wrapper.inner_count == 4


def test_one_process_without_a_launcher_needs_no_wrapper() -> None:
    model = Regression()
    assert strategy().prepare(model) is model
