"""What counts as the same parameters, and what cannot be matched."""

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from match_toys import (
    Make,
    every_optimizer,
    groups_of,
    load,
    net,
    sgd,
    train,
)
from torch import nn

from hooktrain.solver.match_state import StateMatch, match_optimizer_state, name_param_groups


@every_optimizer
def test_the_same_parameters_get_the_very_state_that_was_saved(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    model = net("a", "b")
    optimizer = make(groups_of(model, "a", "b"))
    train(model, optimizer)
    saved = {**optimizer.state_dict(), "inner_count": 7}
    fitted, match = match_optimizer_state(optimizer, saved)
    assert fitted.keys() == {"state", "param_groups"}
    assert fitted["state"] is saved["state"]
    assert fitted["param_groups"] is saved["param_groups"]
    assert match == StateMatch([], [], [], [], [0, 1], [0, 1, 2, 3])
    assert caplog.records == []


def test_without_names_groups_of_the_same_sizes_match_by_position() -> None:
    model = net("a", "b")
    named, nameless = sgd(groups_of(model)), torch.optim.SGD(model.parameters(), momentum=0.9)
    train(model, named)
    train(model, nameless)
    for ours, theirs in ((named, nameless), (nameless, named), (nameless, nameless)):
        saved = theirs.state_dict()
        fitted, match = match_optimizer_state(ours, saved)
        assert fitted["state"] is saved["state"]
        assert match.positions == [0, 1, 2, 3]


def test_without_names_another_shape_is_seen_too() -> None:
    old, new = nn.Linear(3, 4), nn.Linear(3, 5)
    optimizer = torch.optim.SGD(old.parameters(), momentum=0.9)
    train(old, optimizer)
    match = load(torch.optim.SGD(new.parameters(), momentum=0.9), optimizer.state_dict())
    assert match.reshaped == [("#0", (4, 3), (5, 3)), ("#1", (4,), (5,))]


def test_without_names_other_groups_are_refused_with_a_way_out() -> None:
    old, new = net("a"), net("a", "b")
    nameless = torch.optim.SGD(old.parameters())
    with pytest.raises(
        ValueError, match=r"sizes \[2\].*\[4\].*saved state has no param_names.*Make"
    ):
        match_optimizer_state(sgd(groups_of(new)), nameless.state_dict())
    with pytest.raises(ValueError, match=r"this optimizer has no param_names.*train\.resume_parts"):
        match_optimizer_state(nameless, sgd(groups_of(new)).state_dict())


def test_the_state_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"none of .*\(a.weight, a.bias, ...\).*\(b.weight"):
        match_optimizer_state(sgd(groups_of(net("a"))), sgd(groups_of(net("b"))).state_dict())


def test_names_that_stand_for_two_parameters_cannot_be_matched() -> None:
    one, two = net("a"), net("a")
    both = sgd([*groups_of(one), *groups_of(two)])
    assert match_optimizer_state(both, both.state_dict())[1].positions == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"unique.*\['a.weight', 'a.bias'\]"):
        match_optimizer_state(sgd(groups_of(one)), both.state_dict())


def test_too_few_names_are_refused() -> None:
    (group,) = groups_of(net("a"))
    group["param_names"] = ["a.weight"]
    optimizer = sgd([group])
    with pytest.raises(ValueError, match=r"2 params have 1 param_names: \['a.weight'\]"):
        match_optimizer_state(optimizer, optimizer.state_dict())


@pytest.mark.parametrize("key", ["state", "param_groups"])
def test_an_incomplete_state_is_refused(key: str) -> None:
    optimizer = sgd(groups_of(net("a")))
    state = optimizer.state_dict()
    del state[key]
    with pytest.raises(KeyError, match=f"needs '{key}'"):
        match_optimizer_state(optimizer, state)


@pytest.mark.parametrize(
    "wrap",
    [
        nn.DataParallel,
        lambda model: torch.compile(model, backend="eager"),
        lambda model: nn.DataParallel(torch.compile(model, backend="eager")),
    ],
    ids=["DataParallel", "compile", "both"],
)
def test_what_wrappers_add_to_names_does_not_count(wrap: Callable[[nn.Module], Any]) -> None:
    model = net("a", "b")
    inside = torch.optim.SGD(list(model.named_parameters()), momentum=0.9)
    outside = torch.optim.SGD(list(wrap(model).named_parameters())[:2], momentum=0.9)
    for ours, theirs in ((inside, outside), (outside, inside)):
        _, match = match_optimizer_state(ours, theirs.state_dict())
        assert match.new + match.missing == ["b.weight", "b.bias"]
        assert match.moved == []


def test_a_part_of_the_model_may_be_called_module() -> None:
    model = nn.Sequential(OrderedDict(module=net("a", "b")))
    inside = torch.optim.SGD(list(model.named_parameters()))
    outside = torch.optim.SGD(list(nn.DataParallel(model).named_parameters())[2:])
    assert match_optimizer_state(inside, outside.state_dict())[1].positions == [None, None, 0, 1]


def test_an_optimizer_gets_the_names_of_its_model() -> None:
    model = net("a", "b")
    optimizer = torch.optim.SGD([{"params": model.b.parameters()}, {"params": [model.a.weight]}])
    name_param_groups(optimizer, nn.DataParallel(model))
    names = [group["param_names"] for group in optimizer.param_groups]
    assert names == [["b.weight", "b.bias"], ["a.weight"]]
    assert optimizer.state_dict()["param_groups"][1]["param_names"] == ["a.weight"]
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(7))])
    with pytest.raises(ValueError, match=r"group 0 .* not in the model, of the shapes \[\(7,\)\]"):
        name_param_groups(optimizer, model)
    assert "param_names" not in optimizer.param_groups[0]


def test_the_warning_is_told_through_the_logger_of_the_module(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "hooktrain.solver.match_state"):
        match_optimizer_state(sgd(groups_of(net("a", "b"))), sgd(groups_of(net("a"))).state_dict())
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
