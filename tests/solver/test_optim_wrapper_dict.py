"""Several optimizers by name."""

from typing import Any

import pytest
import torch
from torch import nn
from wrapper_toys import batches, linear, loss_of, same, sgd

from hooktrain.solver import AmpOptimWrapper, OptimWrapper, OptimWrapperDict
from hooktrain.utils.events import EventStorage


def two(**options: Any) -> tuple[nn.Module, nn.Module, OptimWrapperDict]:
    a, b = linear(), linear()
    wrappers = OptimWrapperDict(
        a=OptimWrapper(sgd(a), **options), b=AmpOptimWrapper(sgd(b, lr=0.2), "float16")
    )
    return a, b, wrappers


def test_it_is_a_mapping_of_names_to_wrappers() -> None:
    _, _, wrappers = two()
    assert list(wrappers) == list(wrappers.keys()) == ["a", "b"]
    assert len(wrappers) == 2
    assert "a" in wrappers
    assert "c" not in wrappers
    assert wrappers["b"] is list(wrappers.values())[1]
    with pytest.raises(KeyError, match=r"'c'.*there is 'a', 'b'"):
        wrappers["c"]


def test_each_member_has_its_own_update_precision_and_counts() -> None:
    a, b, wrappers = two(accumulative_counts=2)
    reference = linear()
    optimizer = sgd(reference)
    data = batches(2)
    assert not wrappers["a"].update_params(loss_of(a, data[0]))
    assert wrappers["a"].update_params(loss_of(a, data[1]))
    for batch in data:
        (loss_of(reference, batch) / 2).backward()
    optimizer.step()
    assert same(a, reference)
    assert same(b, linear())
    assert wrappers["b"].inner_count == 0


def test_rates_momenta_and_groups_are_reported_by_name() -> None:
    _, _, wrappers = two()
    assert wrappers.get_lr() == {"a.lr": [0.1], "b.lr": [0.2]}
    assert wrappers.get_momentum() == {"a.momentum": [0.9], "b.momentum": [0.9]}
    assert [group["lr"] for groups in wrappers.param_groups.values() for group in groups] == [
        0.1,
        0.2,
    ]


def test_metrics_of_a_member_carry_its_name() -> None:
    a, _, wrappers = two(clip_grad={"max_norm": 1.0})
    with EventStorage() as storage:
        wrappers["a"].update_params(loss_of(a, batches(1)[0]))
    assert list(storage.latest()) == ["a.grad_norm"]


def test_an_update_that_a_scaler_skips_is_counted_by_name() -> None:
    _, b, wrappers = two()
    with EventStorage() as storage:
        assert not wrappers["b"].update_params(loss_of(b, batches(1)[0]) * torch.inf)
    assert storage.latest() == {"b.skipped_updates": (1.0, 0)}


def test_the_state_goes_by_name() -> None:
    a, b, wrappers = two(accumulative_counts=2)
    wrappers["a"].update_params(loss_of(a, batches(1)[0]))
    wrappers["b"].update_params(loss_of(b, batches(1)[0]) * torch.inf)
    _, _, others = two(accumulative_counts=2)
    others.load_state_dict(wrappers.state_dict())
    assert others["a"].inner_count == 1
    assert others["b"].skipped_updates == 1
    with pytest.raises(ValueError, match=r"\['a'\], and there are \['a', 'b'\]"):
        others.load_state_dict({"a": wrappers["a"].state_dict()})


def test_the_gradients_of_all_are_forgotten_together() -> None:
    a, b, wrappers = two()
    for model in (a, b):
        loss_of(model, batches(1)[0]).backward()
    wrappers.zero_grad()
    assert [p.grad for m in (a, b) for p in m.parameters()] == [None] * 4


def test_wrong_members_are_refused() -> None:
    optimizer = sgd(linear())
    with pytest.raises(TypeError, match="'a' must be an OptimWrapper, but got SGD"):
        OptimWrapperDict(a=optimizer)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one"):
        OptimWrapperDict()
    with pytest.raises(ValueError, match=r"\['a', 'b'\] share an optimizer"):
        OptimWrapperDict(a=OptimWrapper(optimizer), b=OptimWrapper(optimizer))
