import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from model_toys import Pairs, batch, toy_gan
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from gloo import run_ranks
from hooktrain.checkpoint import Checkpointer
from hooktrain.demos import DigitsGAN
from hooktrain.model import (
    ExponentialMovingAverage,
    SeparateDistributedDataParallel,
    StepDistributedDataParallel,
)
from hooktrain.solver import OptimWrapper, OptimWrapperDict
from hooktrain.solver.build import get_default_optimizer_params

State = dict[str, Tensor]


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


def train(accumulative_counts: int = 1) -> tuple[State, list[int], dict[str, bool]]:
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
    kinds = {n: isinstance(c, DistributedDataParallel) for n, c in model.module.named_children()}
    state = {**model.module.state_dict(), "offset": model.module.offset}
    return state, made, kinds


def accumulate() -> tuple[State, list[int], dict[str, bool]]:
    return train(accumulative_counts=2)


@pytest.mark.parametrize("accumulative_counts", [1, 2])
def test_two_parts_on_two_ranks_learn_what_one_process_learns(
    accumulative_counts: int, ranks: Any
) -> None:
    model = toy_gan(0).eval()
    optimizers = wrappers(model, accumulative_counts=accumulative_counts)
    for seed in range(4):
        model.train_step(batch(8, seed)[0], optimizers)
    name = "train" if accumulative_counts == 1 else "accumulate"
    (first, made, kinds), (second, _, _) = (rank[name] for rank in ranks)
    expected = model.state_dict()
    assert first.keys() == expected.keys()
    for name in expected:
        assert torch.allclose(first[name], expected[name], rtol=0, atol=1e-6), name
    assert same(first, second)
    # One exchange a part in each iteration, or in each second one.
    assert made == ([2, 4, 6, 8] if accumulative_counts == 1 else [0, 2, 2, 4])
    assert kinds == {
        "data_preprocessor": False,
        "generator": True,
        "discriminator": True,
        "teacher": False,
        "activation": False,
    }


def gradients_inside_of_no_sync() -> tuple[list[Tensor], list[Tensor], bool, bool]:
    model = separate(0).eval()

    def gradients() -> list[Tensor]:
        model.zero_grad()
        x = my_half(0)
        (model.module.discriminator(x).sum() + model(x).sum()).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    with model.no_sync():
        alone = gradients()
    together = gradients()
    model.train()
    trained = all(module.training for module in model.modules())
    model.eval()
    evaluated = not any(module.training for module in model.modules())
    return alone, together, trained, evaluated


def test_no_sync_covers_all_parts_and_ends(ranks: Any) -> None:
    (alone_0, together_0, trained, evaluated), (alone_1, together_1, _, _) = (
        rank["gradients_inside_of_no_sync"] for rank in ranks
    )
    assert len(alone_0) == 8
    for a, b, c, d in zip(alone_0, alone_1, together_0, together_1, strict=True):
        assert torch.equal(c, d)
        assert torch.allclose((a + b) / 2, c, atol=1e-6)
    assert any(not torch.equal(a, b) for a, b in zip(alone_0[:6], alone_1[:6], strict=True))
    assert not torch.equal(alone_0[6], alone_1[6])
    assert trained
    assert evaluated


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
    assert found == [["generator.0.bias"], ["discriminator.bogus"]]
    assert same(loaded, bare.state_dict())
    again = toy_gan(4)
    Checkpointer(again).load(folder / "wrapped.pth")
    assert same(again.state_dict(), toy_gan(5).state_dict())


def average_and_groups() -> tuple[list[str], list[str], Tensor, Tensor]:
    model = separate(0)
    ema = ExponentialMovingAverage(model, decay=0.5)
    with torch.no_grad():
        model.module.discriminator.module.weight += 2
    ema.update(model)
    groups = get_default_optimizer_params(model)
    names = [name for group in groups for name in group["param_names"]]
    average = ema.module.state_dict()
    return list(average), names, average["discriminator.weight"], ema.module(torch.ones(2, 3))


def test_averages_and_parameter_groups_have_the_names_of_the_bare_model(ranks: Any) -> None:
    bare = toy_gan(0)
    keys, names, weight, drawn = ranks[0]["average_and_groups"]
    assert keys == list(bare.state_dict())
    assert set(names) == {n for n, p in bare.named_parameters() if p.requires_grad}
    assert torch.equal(weight, bare.discriminator.weight.detach() + 1)
    assert torch.equal(drawn, bare.eval()(torch.ones(2, 3)))


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
        isinstance(aliased.net, StepDistributedDataParallel) and aliased.net.find_unused_parameters,
        list(values),
    )


def everything(folder: Path) -> dict[str, Any]:
    warnings.simplefilter("error")
    functions = (
        train,
        accumulate,
        gradients_inside_of_no_sync,
        average_and_groups,
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


def test_a_child_with_two_names_stays_one_and_options_are_passed_on(ranks: Any) -> None:
    one, passed_on, values = ranks[0]["wrap_aliased_and_step"]
    assert one
    assert passed_on
    assert values == ["loss_discriminator", "logit_real", "logit_fake", "loss_generator"]


def test_parameters_outside_of_the_children_are_refused_by_name() -> None:
    model = Pairs()
    model.scale = nn.Parameter(torch.ones(1))
    model.constant = nn.Parameter(torch.ones(1), requires_grad=False)
    with pytest.raises(ValueError, match=r"parameters \['scale'\] stand directly in Pairs"):
        SeparateDistributedDataParallel(model)
    assert type(model.generator) is nn.Sequential


def test_a_model_without_anything_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="no child of Pairs has trainable parameters"):
        SeparateDistributedDataParallel(Pairs().requires_grad_(False))
