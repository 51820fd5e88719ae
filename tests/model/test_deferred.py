"""Models that are built on the meta device, and get their weights when they are sharded."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gloo import run_ranks
from hooktrain.demos.text import Block
from hooktrain.model.deferred import init_deferred
from hooktrain.model.sharding import full_state_dict, shard_model
from sharding_toys import batches, make_model, make_wrapper, train


class Layers(nn.Module):
    """torch's own layers, with buffers, and a parameter that the model initialises itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.attention = nn.MultiheadAttention(4, 2)
        self.embedding = nn.Embedding(5, 4, padding_idx=2)
        self.token = nn.Parameter(torch.empty(3, 4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.token, std=0.3)


def same(one: Any, other: Any) -> bool:
    return list(one) == list(other) and all(torch.equal(one[k], other[k]) for k in one)


def on_meta(build: Any) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = build()
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    return model


@pytest.mark.parametrize("build", [Layers, make_model])
def test_one_process_gets_the_weights_that_constructing_gives(build: Any) -> None:
    model = on_meta(build)
    torch.manual_seed(3)
    init_deferred(model, "cpu")
    torch.manual_seed(3)
    assert same(model.state_dict(), build().state_dict())


def _init_sharded(build: Any, wrap: Any) -> dict[str, Tensor]:
    model = on_meta(build)
    shard_model(model, wrap=wrap)
    torch.manual_seed(3 if dist.get_rank() == 0 else 1000)
    init_deferred(model, "cpu")
    state = full_state_dict(model)
    if build is make_model:
        train(model, make_wrapper(model), batches(1))
    return state


class Forgotten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("table", torch.arange(3.0))


def _forgotten() -> str:
    model = on_meta(Forgotten)
    shard_model(model)
    with pytest.raises(ValueError, match="gives a value to") as caught:
        init_deferred(model, "cpu")
    return str(caught.value)


class Filled(nn.Module):
    """Draws in ways that no layer of torch does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(5, 2))
        self.bias = nn.Parameter(torch.empty(5))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.copy_(torch.rand_like(self.weight) + 1)
        self.bias.fill_(0.5).bernoulli_(0.5)


def _on_two_ranks() -> dict[str, Any]:
    return {
        "layers": _init_sharded(Layers, ()),
        "transformer": _init_sharded(make_model, {Block}),
        "filled": _init_sharded(Filled, ()),
        "forgotten": _forgotten(),
    }


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(_on_two_ranks, 2)


@pytest.mark.parametrize(
    ("name", "build"), [("layers", Layers), ("transformer", make_model), ("filled", Filled)]
)
def test_sharded_models_get_the_weights_of_one_process_whatever_the_other_ranks_draw(
    two: list[dict[str, Any]], name: str, build: Any
) -> None:
    torch.manual_seed(3)
    assert same(two[0][name], build().state_dict())


def test_what_no_method_initialises_is_named_on_every_rank(two: list[dict[str, Any]]) -> None:
    message = (
        "neither reset_parameters() nor init_weights() of any module gives a value to "
        "['table', 'weight']"
    )
    assert [result["forgotten"] for result in two] == [message, message]


def test_a_model_that_has_weights_keeps_them() -> None:
    model = on_meta(Layers)
    model.norm = nn.BatchNorm2d(3)
    with pytest.raises(ValueError, match=r"not so: \['norm.bias', .*'norm.weight'\]"):
        init_deferred(model, "cpu")
    assert torch.equal(model.get_parameter("norm.weight"), torch.ones(3))


def test_shared_parameters_of_a_model_that_is_not_sharded_are_refused() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    model[1].weight = model[0].weight  # type: ignore[index, union-attr]
    with pytest.raises(ValueError, match=r"come apart.*\['0.weight', '1.weight'\]"):
        init_deferred(model, "cpu")
