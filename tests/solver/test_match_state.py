"""The state of an optimizer finds the parameters of the same names."""

import copy
from typing import Any

import pytest
import torch
from match_toys import (
    Make,
    check_that_training_goes_on,
    every_optimizer,
    groups_of,
    load,
    net,
    same,
    sgd,
    train,
)
from torch import nn

from hooktrain.solver import get_default_optimizer_params
from hooktrain.solver.match_state import StateMatch, match_optimizer_state


@every_optimizer
def test_a_layer_that_was_added_starts_without_state(make: Make) -> None:
    old, new = net("a", "c"), net("a", "b", "c")
    match = check_that_training_goes_on(make, (old, groups_of(old)), (new, groups_of(new)))
    assert match.new == ["b.weight", "b.bias"]
    assert match.missing == match.moved == match.reshaped == []
    assert match.positions == [0, 1, None, None, 2, 3]


@every_optimizer
def test_the_state_of_a_layer_that_was_removed_is_dropped(make: Make) -> None:
    old, new = net("a", "b", "c"), net("a", "c")
    match = check_that_training_goes_on(make, (old, groups_of(old)), (new, groups_of(new)))
    assert match.missing == ["b.weight", "b.bias"]
    assert match.new == match.moved == match.reshaped == []
    assert match.positions == [0, 1, 4, 5]


@every_optimizer
def test_a_layer_may_be_frozen_and_unfrozen(make: Make) -> None:
    old, new = net("a", "b", "c"), net("a", "b", "c")
    new.a.requires_grad_(False)
    for before, after, changed in ((old, new, "missing"), (new, old, "new")):
        before_groups = get_default_optimizer_params(before)
        after_groups = get_default_optimizer_params(after)
        match = check_that_training_goes_on(make, (before, before_groups), (after, after_groups))
        assert getattr(match, changed) == ["a.weight", "a.bias"]
        assert match.moved == match.reshaped == []


@every_optimizer
@pytest.mark.parametrize("order", ["abc", "bac"])
def test_a_group_may_be_split(order: str, make: Make) -> None:
    old, new = net("a", "b", "c"), net("a", "b", "c")
    match = check_that_training_goes_on(make, (old, groups_of(old)), (new, groups_of(new, *order)))
    assert match.new == match.missing == match.reshaped == []
    assert match.groups == [0, 0, 0]
    assert match.moved == [
        (f"{n}.{kind}", 0, i) for i, n in enumerate(order) if i for kind in ("weight", "bias")
    ]
    positions = {"a": [0, 1], "b": [2, 3], "c": [4, 5]}
    assert match.positions == [k for n in order for k in positions[n]]


@every_optimizer
@pytest.mark.parametrize(("order", "moved"), [("ab", "b"), ("ba", "a")])
def test_groups_may_be_merged(order: str, moved: str, make: Make) -> None:
    old, new = net("a", "b"), net("a", "b")
    match = check_that_training_goes_on(make, (old, groups_of(old, *order)), (new, groups_of(new)))
    assert match.groups == [0]
    assert match.moved == [(f"{moved}.weight", 1, 0), (f"{moved}.bias", 1, 0)]


@every_optimizer
def test_the_state_of_a_parameter_of_another_shape_is_dropped(make: Make) -> None:
    old, new = net("a", "b"), net("a", "b")
    new.b = nn.Linear(3, 5)
    without = ("b.weight", "b.bias")
    match = check_that_training_goes_on(make, (old, groups_of(old)), (new, groups_of(new)), without)
    assert [(name, shape) for name, _, shape in match.reshaped] == [
        ("b.weight", (5, 3)),
        ("b.bias", (5,)),
    ]
    assert match.positions == [0, 1, None, None]
    assert match.groups == [0]


def test_the_saved_shape_is_told() -> None:
    old, new = nn.Linear(3, 4), nn.Linear(3, 5)
    optimizer = sgd(groups_of(old))
    train(old, optimizer)
    match = load(sgd(groups_of(new)), optimizer.state_dict())
    assert match.reshaped == [("weight", (4, 3), (5, 3)), ("bias", (4,), (5,))]


def test_a_parameter_may_have_another_number_of_dimensions() -> None:
    old, new = net("a"), net("a")
    new.a.weight = nn.Parameter(torch.ones(3))
    optimizer = sgd(groups_of(old))
    train(old, optimizer)
    match = load(sgd(groups_of(new)), optimizer.state_dict())
    assert match.reshaped == [("a.weight", (3, 3), (3,))]


def test_saved_parameters_may_have_any_numbers() -> None:
    old, new = net("a", "b"), net("b")
    optimizer, ours = sgd(groups_of(old)), sgd(groups_of(new))
    train(old, optimizer)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["params"] = [11, 12, 13, 14]
    saved["state"] = {11 + i: state for i, state in saved["state"].items()}
    load(ours, saved)
    momentum = optimizer.state[old.b.weight]["momentum_buffer"]
    assert torch.equal(ours.state[new.b.weight]["momentum_buffer"], momentum)


@every_optimizer
def test_parameters_in_another_order_keep_their_state(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = net("a", "b"), net("a", "b")
    (turned,) = groups_of(new)
    turned = {key: values[::-1] for key, values in turned.items()}
    match = check_that_training_goes_on(make, (old, groups_of(old)), (new, [turned]))
    assert match.positions == [3, 2, 1, 0]
    assert match.reorder(["w", "x", "y", "z"]) == ["z", "y", "x", "w"]
    assert match.table() == ""
    assert caplog.records == []


def test_the_settings_of_a_group_come_from_where_most_of_it_was() -> None:
    old, new = net("a", "b", "c"), net("a", "b", "c", "d")
    optimizer = sgd(groups_of(old, "a", "b", "c"))
    for group, lr in zip(optimizer.param_groups, (1.0, 2.0, 3.0), strict=True):
        group.update(lr=lr, initial_lr=10 * lr, momentum=lr / 10)
    ours = groups_of(new, "d", "c", "")
    ours[2]["params"] = [*new.a.parameters(), *new.b.parameters()][:3]
    ours[2]["param_names"] = ["a.weight", "a.bias", "b.weight"]
    ours[2]["note"] = "mine"
    built = sgd(ours)
    match = load(built, optimizer.state_dict())
    settings = ("lr", "initial_lr", "momentum", "note")
    assert [[g.get(key) for key in settings] for g in built.param_groups] == [
        [0.01, None, 0.9, None],
        [3.0, 30.0, 0.3, None],
        [1.0, 10.0, 0.1, "mine"],
    ]
    assert match.groups == [None, 2, 0]
    assert match.moved == [("b.weight", 1, 2)]
    assert match.new == ["d.weight", "d.bias"]
    assert match.missing == ["b.bias"]
    assert built.param_groups[2]["param_names"] == ["a.weight", "a.bias", "b.weight"]
    assert built.param_groups[2]["params"][2] is new.b.weight


def test_a_group_that_is_another_number_now_has_not_moved() -> None:
    old, new = net("a", "b"), net("a", "b")
    optimizer = sgd(groups_of(old, "a", "b"))
    match = load(sgd(groups_of(new, "b")), optimizer.state_dict())
    assert match == StateMatch([], ["a.weight", "a.bias"], [], [], [1], [2, 3])


def test_the_table_tells_every_change(caplog: pytest.LogCaptureFixture) -> None:
    old, new = net("a", "b", "gone"), net("a", "b", "head")
    optimizer = sgd(groups_of(old, "a", "b", "gone"))
    train(old, optimizer)
    new.b = nn.Linear(3, 1)
    ours = [*groups_of(new, "b"), *groups_of(new, "head")]
    for key, item in (("params", new.a.weight), ("param_names", "a.weight")):
        ours[0][key].append(item)
    load(sgd(ours), optimizer.state_dict())
    table, settings = (record.getMessage() for record in caplog.records)
    assert [line.split() for line in table.splitlines()[3:]] == [
        ["head.weight", "new", "-", "no", "state"],
        ["head.bias", "new", "-", "no", "state"],
        ["a.bias", "missing", "dropped", "-"],
        ["gone.weight", "missing", "dropped", "-"],
        ["gone.bias", "missing", "dropped", "-"],
        ["a.weight", "moved", "group", "0", "group", "0"],
        ["b.weight", "reshaped", "(3,", "3),", "dropped", "(1,", "3)"],
        ["b.bias", "reshaped", "(3,),", "dropped", "(1,)"],
    ]
    assert "groups [1] are new" in settings


def test_what_an_optimizer_of_others_keeps_is_not_judged_by_its_shape() -> None:
    class Projected(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 1.0})

    for optimizer, keeps in (
        (Projected(groups_of(net("a"))), "projection"),
        (torch.optim.LBFGS(list(net("a").named_parameters())), "d"),
    ):
        optimizer.state[optimizer.param_groups[0]["params"][0]][keeps] = torch.ones(12)
        _, match = match_optimizer_state(optimizer, optimizer.state_dict())
        assert match.reshaped == []


def test_state_that_belongs_to_no_parameter_stays() -> None:
    old, new = net("a", "b"), net("a")
    optimizer = sgd(groups_of(old))
    train(old, optimizer)
    optimizer.state["shared"] = {"steps": 5}  # type: ignore[index]
    fitted, _ = match_optimizer_state(sgd(groups_of(new)), optimizer.state_dict())
    assert sorted(fitted["state"], key=str) == [0, 1, "shared"]


def test_nothing_of_the_caller_is_changed() -> None:
    old, new = net("a", "b"), net("b", "c")
    optimizer, ours = sgd(groups_of(old)), sgd(groups_of(new, "c", "b"))
    train(old, optimizer)
    saved, before = optimizer.state_dict(), copy.deepcopy(optimizer.state_dict())
    groups = copy.deepcopy([{**g, "params": len(g["params"])} for g in ours.param_groups])
    match_optimizer_state(ours, saved)
    assert same(saved["state"], before["state"])
    assert saved["param_groups"] == before["param_groups"]
    assert [{**g, "params": len(g["params"])} for g in ours.param_groups] == groups
    assert not ours.state
