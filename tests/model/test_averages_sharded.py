"""Averages of the weights of a model that is sharded."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gloo import run_ranks
from hooktrain.model import ExponentialMovingAverage
from hooktrain.model.sharding import full_state_dict, load_full_state_dict
from hooktrain.utils.dtensor import full_tensors
from sharding_toys import batches, make_model, make_sharded, own_part


def averaged_run(model: nn.Module) -> tuple[Any, ExponentialMovingAverage]:
    """Some steps, with a change of the weights that is no training before each update."""
    average = ExponentialMovingAverage(model, decay=0.75)
    for step in range(3):
        state = {
            name: value + (step + 1) * torch.linspace(0, 1, value.numel()).view_as(value)
            for name, value in make_model().state_dict().items()
        }
        load_full_state_dict(model, state)
        average.update(model)
    return copy.deepcopy(full_tensors(average.state_dict())), average


def logits(model: nn.Module) -> Tensor:
    model.eval()
    with torch.no_grad():
        return model({"tokens": batches(1)[0]["tokens"]})  # type: ignore[no-any-return]


def _on_two_ranks() -> dict[str, Any]:
    model = make_sharded()
    state, average = averaged_run(model)
    raw = full_state_dict(model)
    raw_logits = logits(model)  # leaves whole tensors in the outermost unit
    with average.swap(model):
        swapped, swapped_logits = full_state_dict(model), logits(model)
    assert torch.equal(logits(model), raw_logits)
    after = full_state_dict(model)
    logits(model)
    average.update(model)  # right after an evaluation
    model.train()
    loss = model(own_part(batches(1)[0]))["loss_lm"]
    loss.backward()
    other = ExponentialMovingAverage(make_sharded(), decay=0.75)
    other.load_state_dict({"module": make_model().state_dict(), "updates": 7})
    return {
        "average": state,
        "raw": raw,
        "after": after,
        "swapped": swapped,
        "logits": swapped_logits,
        "updates": average.updates,
        "loaded": full_tensors(other.state_dict()),
    }


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(_on_two_ranks, 2)


def same(one: Any, other: Any) -> bool:
    return list(one) == list(other) and all(torch.equal(one[k], other[k]) for k in one)


def test_the_average_of_shards_is_that_of_the_whole(two: list[dict[str, Any]]) -> None:
    state, _ = averaged_run(make_model())
    assert same(two[0]["average"]["module"], state["module"])
    assert two[0]["average"]["updates"] == 3
    assert two[0]["updates"] == 4


def test_swapping_puts_the_average_in_and_the_raw_weights_back_after_an_evaluation(
    two: list[dict[str, Any]],
) -> None:
    result = two[0]
    assert same(result["swapped"], result["average"]["module"])
    assert same(result["after"], result["raw"])
    assert not torch.equal(result["raw"]["head.weight"], result["swapped"]["head.weight"])
    alone = make_model()
    alone.load_state_dict(result["swapped"])
    torch.testing.assert_close(result["logits"], logits(alone))


def test_a_whole_average_loads_into_shards(two: list[dict[str, Any]]) -> None:
    assert same(two[0]["loaded"]["module"], make_model().state_dict())
    assert two[0]["loaded"]["updates"] == 7
