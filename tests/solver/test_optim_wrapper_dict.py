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


def test_rates_momenta_groups_and_metrics_are_reported_by_name() -> None:
    a, b, wrappers = two(clip_grad={"max_norm": 1.0})
    assert wrappers.get_lr() == {"a.lr": [0.1], "b.lr": [0.2]}
    assert wrappers.get_momentum() == {"a.momentum": [0.9], "b.momentum": [0.9]}
    groups = {name: groups[0]["lr"] for name, groups in wrappers.param_groups.items()}
    assert groups == {"a": 0.1, "b": 0.2}
    with EventStorage() as storage:
        wrappers["a"].update_params(loss_of(a, batches(1)[0]))
        assert not wrappers["b"].update_params(loss_of(b, batches(1)[0]) * torch.inf)
    assert list(storage.latest()) == ["a.grad_norm", "b.skipped_updates"]
    for model in (a, b):
        loss_of(model, batches(1)[0]).backward()
    wrappers.zero_grad()  # of all
    assert [p.grad for m in (a, b) for p in m.parameters()] == [None] * 4


def test_the_state_goes_by_name() -> None:
    a, b, wrappers = two(accumulative_counts=2)
    wrappers["a"].update_params(loss_of(a, batches(1)[0]))
    wrappers["b"].update_params(loss_of(b, batches(1)[0]) * torch.inf)
    _, _, others = two(accumulative_counts=2)
    others.load_state_dict(wrappers.state_dict())
    assert others["a"].inner_count == 1
    assert others["b"].skipped_updates == 1
    with pytest.raises(ValueError, match=r"\['a'\], not \['a', 'b'\]"):
        others.load_state_dict({"a": wrappers["a"].state_dict()})


def test_wrong_members_are_refused() -> None:
    optimizer = sgd(linear())
    with pytest.raises(TypeError, match="'a' must be an OptimWrapper, but got SGD"):
        OptimWrapperDict(a=optimizer)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one"):
        OptimWrapperDict()
    with pytest.raises(ValueError, match=r"\['a', 'b'\] share an optimizer"):
        OptimWrapperDict(a=OptimWrapper(optimizer), b=OptimWrapper(optimizer))
