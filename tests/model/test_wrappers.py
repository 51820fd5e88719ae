import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from gloo import run_ranks
from hooktrain.checkpoint import Checkpointer
from hooktrain.demos.gan import DigitsGAN
from hooktrain.model import (
    SeparateDistributedDataParallel,
    StepDistributedDataParallel,
)
from hooktrain.model.wrappers import unwrap_model
from hooktrain.solver import OptimWrapper, OptimWrapperDict
from toys import PairPreprocessor, Pairs, ToyModel, batch, sgd_wrapper, toy_gan

State = dict[str, Tensor]


def toy(seed: int, preprocessor: nn.Module | None = None) -> ToyModel:
    torch.manual_seed(seed)
    return ToyModel(preprocessor)


def close(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(
        torch.allclose(a[k], b[k], rtol=0, atol=1e-6) for k in a
    )


def halves(seed: int) -> list[Tensor]:
    """This rank's half of a batch of 8."""
    return [t.chunk(2)[dist.get_rank()] for t in batch(8, seed)]


def train_whole() -> State:
    model = StepDistributedDataParallel(toy(dist.get_rank(), PairPreprocessor()))
    wrapper = sgd_wrapper(model)
    for seed in range(3):
        model.train_step(dict(zip("xy", halves(seed), strict=True)), wrapper)
    return {**model.module.state_dict()}


def test_two_ranks_learn_what_one_learns_from_the_whole_batch(ranks: Any) -> None:
    model = toy(0, PairPreprocessor())
    wrapper = sgd_wrapper(model)
    for seed in range(3):
        model.train_step(dict(zip("xy", batch(8, seed), strict=True)), wrapper)
    first, second = (rank["train_whole"] for rank in ranks)
    assert close(first, model.state_dict())
    assert all(torch.equal(first[name], second[name]) for name in first)


def accumulate_whole() -> tuple[list[int], State]:
    model = StepDistributedDataParallel(toy(0))
    calls: list[None] = []
    model.register_comm_hook(calls, counted)
    wrapper = sgd_wrapper(model, accumulative_counts=3)
    wrapper.initialize_count_status(model, 0, 5)
    made = []
    for seed in range(5):
        model.train_step(halves(seed), wrapper)
        made.append(len(calls))
    return made, {**model.module.state_dict()}


def test_ranks_communicate_in_the_last_pass_of_an_accumulation_only(
    ranks: Any,
) -> None:
    model = toy(0)
    wrapper = sgd_wrapper(model, accumulative_counts=3)
    wrapper.initialize_count_status(model, 0, 5)
    for seed in range(5):
        model.train_step(batch(8, seed), wrapper)
    for made, state in (rank["accumulate_whole"] for rank in ranks):
        assert made == [0, 0, 1, 1, 2]
        assert close(state, model.state_dict())


class Partly(ToyModel):
    """Its forward leaves out some of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(1, 1).requires_grad_(False)
        self.left_out = nn.Linear(1, 1)


def unused() -> tuple[str, list[str]]:
    model = StepDistributedDataParallel(Partly())
    wrapper = sgd_wrapper(model)
    model.train_step(batch(2), wrapper)
    try:
        model.train_step(batch(2), wrapper)
        message = ""
    except RuntimeError as error:
        message = str(error)
    found = StepDistributedDataParallel(Partly(), find_unused_parameters=True)
    wrapper = sgd_wrapper(found)
    losses = [list(found.train_step(batch(2), wrapper)) for _ in range(2)]
    return message, losses[1]


def test_unused_parameters_are_named_when_ddp_fails(ranks: Any) -> None:
    message, losses = ranks[1]["unused"]
    assert "grad for rank 1: left_out.bias, left_out.weight" in message
    assert "find_unused_parameters=True" in message
    assert losses == ["loss", "loss1", "loss2"]


class OwnStep(ToyModel):
    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        return super().train_step(data, optim_wrapper)


class Aware(StepDistributedDataParallel):
    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        return {"loss": torch.zeros(())}


def wrap_a_model_with_its_own_step() -> tuple[str, list[str]]:
    model = StepDistributedDataParallel(OwnStep())
    try:
        model.train_step(batch(2), sgd_wrapper(model))
        message = ""
    except TypeError as error:
        message = str(error)
    return message, list(Aware(OwnStep()).train_step(batch(2), None))


def test_a_models_own_train_step_is_not_passed_over(ranks: Any) -> None:
    message, values = ranks[0]["wrap_a_model_with_its_own_step"]
    assert "OwnStep has its own train_step" in message
    assert "SeparateDistributedDataParallel" in message
    assert values == ["loss"]


def buffers_of_the_ranks() -> list[list[float]]:
    seen = []
    for broadcast in (False, True):
        model = toy(0)
        model.register_buffer("mean", torch.full((1,), float(dist.get_rank())))
        wrapped = StepDistributedDataParallel(model, broadcast_buffers=broadcast)
        values = [model.mean.item()]
        model.mean.fill_(dist.get_rank() + 1)
        wrapped(*batch(2), mode="loss")
        seen.append([*values, model.mean.item()])
    return seen


def test_buffers_are_the_first_ranks(
    ranks: Any,
) -> None:
    assert ranks[0]["buffers_of_the_ranks"] == [[0, 1], [0, 1]]
    assert ranks[1]["buffers_of_the_ranks"] == [[0, 2], [0, 1]]


def wrappers(model: Any, **options: Any) -> OptimWrapperDict:
    parts = {name: getattr(model, name) for name in ("generator", "discriminator")}
    return OptimWrapperDict(
        **{
            name: OptimWrapper(torch.optim.SGD(part.parameters(), lr=0.1), **options)
            for name, part in parts.items()
        }
    )


def separate(seed: int) -> SeparateDistributedDataParallel:
    return SeparateDistributedDataParallel(toy_gan(seed))


def same(a: State, b: State) -> bool:
    return list(a) == list(b) and all(torch.equal(a[k], b[k]) for k in a)


def my_half(seed: int) -> Tensor:
    return batch(8, seed)[0].chunk(2)[dist.get_rank()]


def counted(calls: list[None], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    calls.append(None)
    return allreduce_hook(dist.group.WORLD, bucket)


def train_parts(
    accumulative_counts: int = 1,
) -> tuple[State, list[int], dict[str, bool]]:
    # Other random numbers on each rank: the first one's are to be everywhere.
    model = separate(dist.get_rank()).eval()
    calls: list[None] = []
    model.register_comm_hook(calls, counted)
    optimizers = wrappers(model.module, accumulative_counts=accumulative_counts)
    made = []
    for seed in range(4):
        values = model.train_step(my_half(seed), optimizers)
        made.append(len(calls))
    assert list(values) == ["loss_d", "loss_g"]
    kinds = {
        n: isinstance(c, DistributedDataParallel)
        for n, c in model.module.named_children()
    }
    state = {**model.module.state_dict(), "offset": model.module.offset}
    return state, made, kinds


def accumulate_parts() -> tuple[State, list[int], dict[str, bool]]:
    return train_parts(accumulative_counts=2)


@pytest.mark.parametrize("accumulative_counts", [1, 2])
def test_two_parts_on_two_ranks_learn_what_one_process_learns(
    accumulative_counts: int, ranks: Any
) -> None:
    model = toy_gan(0).eval()
    optimizers = wrappers(model, accumulative_counts=accumulative_counts)
    for seed in range(4):
        model.train_step(batch(8, seed)[0], optimizers)
    name = "train_parts" if accumulative_counts == 1 else "accumulate_parts"
    (first, made, kinds), (second, _, _) = (rank[name] for rank in ranks)
    expected = model.state_dict()
    assert first.keys() == expected.keys()
    for name in expected:
        assert torch.allclose(first[name], expected[name], rtol=0, atol=1e-6), name
    assert same(first, second)
    # One exchange a part in each iteration, or in each second one.
    assert made == ([2, 4, 6, 8] if accumulative_counts == 1 else [0, 2, 2, 4])
    assert [name for name, is_ddp in kinds.items() if is_ddp] == [
        "generator",
        "discriminator",
    ]


def save_and_load(folder: Path) -> tuple[list[str], list[str], list[Any], State]:
    model = separate(5)
    Checkpointer(model, folder).save("wrapped")
    names = list(model.state_dict())
    state = model.module.state_dict()
    del state["generator.0.bias"]
    state["discriminator.bogus"] = torch.ones(1)
    found = list(model.module.load_state_dict(state, strict=False))
    inner = list(model.module.discriminator.state_dict())
    Checkpointer(model).load(folder / "bare.pth")
    return names, inner, found, {**model.module.state_dict()}


def test_the_state_is_that_of_the_bare_model(ranks: Any, folder: Path) -> None:
    bare = toy_gan(3)
    names, inner, found, loaded = ranks[0]["save_and_load"]
    assert names == [f"module.{name}" for name in bare.state_dict()]
    assert inner == ["weight", "bias"]
    assert found == [["generator.module.0.bias"], ["discriminator.module.bogus"]]
    assert same(loaded, bare.state_dict())
    again = toy_gan(4)
    Checkpointer(again).load(folder / "wrapped.pth")
    assert same(again.state_dict(), toy_gan(5).state_dict())


class Aliased(nn.Module):
    """One child under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.again = self.net


def wrap_aliased_and_step() -> tuple[bool, bool, list[str]]:
    aliased = Aliased()
    SeparateDistributedDataParallel(aliased, find_unused_parameters=True)
    gan = SeparateDistributedDataParallel(DigitsGAN(latent_size=2, hidden_size=4))
    values = gan.train_step({"image": torch.rand(2, 1, 8, 8)}, wrappers(gan.module))
    return (
        aliased.net is aliased.again,
        isinstance(aliased.net, StepDistributedDataParallel)
        and aliased.net.find_unused_parameters,
        list(values),
    )


def test_a_child_with_two_names_stays_one(ranks: Any) -> None:
    one, passed_on, values = ranks[0]["wrap_aliased_and_step"]
    assert one
    assert passed_on
    assert values == [
        "loss_discriminator",
        "logit_real",
        "logit_fake",
        "loss_generator",
    ]


def test_parameters_outside_of_the_children_are_refused_by_name() -> None:
    model = Pairs()
    model.scale = nn.Parameter(torch.ones(1))
    model.constant = nn.Parameter(torch.ones(1), requires_grad=False)
    with pytest.raises(
        ValueError, match=r"move \['scale'\] of Pairs itself into a child"
    ):
        SeparateDistributedDataParallel(model)
    assert type(model.generator) is nn.Sequential


def everything(folder: Path) -> dict[str, Any]:
    warnings.simplefilter("error")
    functions = (
        train_whole,
        accumulate_whole,
        unused,
        wrap_a_model_with_its_own_step,
        buffers_of_the_ranks,
        train_parts,
        accumulate_parts,
        wrap_aliased_and_step,
    )
    results = {function.__name__: function() for function in functions}
    return {**results, "save_and_load": save_and_load(folder)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    """What two ranks returned: it takes seconds to start them, so it is done once."""
    Checkpointer(toy_gan(3), folder).save("bare")
    return run_ranks(everything, 2, folder)


def test_the_model_inside_of_any_wrappers_is_found() -> None:
    model = nn.Sequential()
    model.module = nn.Linear(1, 1)  # a part of it, and no wrapper
    assert unwrap_model(model) is model
    assert unwrap_model(nn.DataParallel(model)) is model
    compiled = torch.compile(nn.DataParallel(model), backend="eager")
    assert unwrap_model(nn.DataParallel(compiled)) is model
