"""The state of an optimizer finds the parameters of the same names."""

import copy
import io
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hooktrain.solver import get_default_optimizer_params
from hooktrain.solver.match_state import StateMatch, match_optimizer_state, name_param_groups

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=0.1),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.1, amsgrad=True, foreach=True),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.1),
}
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
sgd = OPTIMIZERS["SGD"]


def net(*names: str) -> nn.Sequential:
    return nn.Sequential(OrderedDict((name, nn.Linear(3, 3)) for name in names))


def groups_of(model: nn.Module, *prefixes: str, **options: Any) -> list[dict[str, Any]]:
    """One group of the parameters under each prefix."""
    found = []
    for prefix in prefixes or ("",):
        named = [(n, p) for n, p in model.named_parameters() if n.startswith(prefix)]
        found.append({"params": [p for _, p in named], "param_names": [n for n, _ in named]})
    return [{**group, **options} for group in found]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    generator = torch.Generator().manual_seed(steps)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 3, generator=generator)).square().sum().backward()
        optimizer.step()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[parameter]: state for parameter, state in optimizer.state.items()}


def load(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> StateMatch:
    """Through a file, as a run does it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    fitted, match = match_optimizer_state(optimizer, torch.load(file, weights_only=True))
    optimizer.load_state_dict(fitted)
    return match


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


def check_that_training_goes_on(
    make: Make,
    old: tuple[nn.Module, list[dict[str, Any]]],
    new: tuple[nn.Module, list[dict[str, Any]]],
    without: tuple[str, ...] = (),
) -> StateMatch:
    """Compare training after a match with that of an optimizer whose state was put in by hand."""
    old_model, model = old[0], new[0]
    old_optimizer = make(old[1])
    train(old_model, old_optimizer)
    weights = {n: v for n, v in old_model.state_dict().items() if n not in without}
    model.load_state_dict(weights, strict=False)
    # What was built is the same for both; the reference gets copies of the same parameters.
    expected_model, expected_groups = copy.deepcopy((model, new[1]))
    expected = make(expected_groups)
    saved = state_of(old_model, old_optimizer)
    optimized = {parameter for group in expected.param_groups for parameter in group["params"]}
    for name, parameter in expected_model.named_parameters():
        if name in saved and name not in without and parameter in optimized:
            expected.state[parameter] = copy.deepcopy(saved[name])
    optimizer = make(new[1])
    match = load(optimizer, old_optimizer.state_dict())
    assert same(state_of(model, optimizer), state_of(expected_model, expected))
    train(model, optimizer, 2)
    train(expected_model, expected, 2)
    for ours, theirs in zip(model.parameters(), expected_model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    return match


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


KINDS = ("weight", "bias")


@every_optimizer
def test_a_group_may_be_split(make: Make) -> None:
    old, new = net("a", "b", "c"), net("a", "b", "c")
    match = check_that_training_goes_on(
        make, (old, groups_of(old)), (new, groups_of(new, "b", "a", "c"))
    )
    assert match.new == match.missing == match.reshaped == []
    assert match.groups == [0, 0, 0]
    assert match.moved == [(f"{n}.{k}", 0, i + 1) for i, n in enumerate("ac") for k in KINDS]
    assert match.positions == [2, 3, 0, 1, 4, 5]


@every_optimizer
def test_groups_may_be_merged(make: Make) -> None:
    old, new = net("a", "b"), net("a", "b")
    match = check_that_training_goes_on(
        make, (old, groups_of(old, "b", "a")), (new, groups_of(new))
    )
    assert match.groups == [0]
    assert match.moved == [("a.weight", 1, 0), ("a.bias", 1, 0)]


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
