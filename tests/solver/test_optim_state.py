"""The state of an optimizer finds the parameters of the same names."""

import copy
import io
import re
from collections import OrderedDict
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hooktrain.solver import OptimWrapper, get_default_optimizer_params
from hooktrain.solver.optim_state import (
    load_optimizer_state,
    optimizer_state_dict,
    parameter_names,
)

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=0.1),
    "AdamW": lambda groups: torch.optim.AdamW(
        groups, lr=0.1, amsgrad=True, foreach=True
    ),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.1),
}
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
sgd = OPTIMIZERS["SGD"]


def net(*names: str) -> nn.Sequential:
    return nn.Sequential(OrderedDict((name, nn.Linear(3, 3)) for name in names))


def groups_of(model: nn.Module, *prefixes: str) -> list[dict[str, Any]]:
    """One group of the parameters under each prefix."""
    found = []
    for prefix in prefixes or ("",):
        named = [(n, p) for n, p in model.named_parameters() if n.startswith(prefix)]
        found.append(
            {"params": [p for _, p in named], "param_names": [n for n, _ in named]}
        )
    return found


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    generator = torch.Generator().manual_seed(steps)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 3, generator=generator)).square().sum().backward()
        optimizer.step()


def state_of(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Any]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[parameter]: state for parameter, state in optimizer.state.items()}


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


@pytest.fixture
def changes(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was logged."""
    return lambda: [record.getMessage() for record in caplog.records]


Changes = Callable[[], list[str]]


def words(text: str) -> list[str]:
    """In an order that does not depend on that of the parameters."""
    return sorted(re.split(r"[\s,\[\]]+", text))


def of(text: str, *names: str) -> str:
    return f"The optimizer's checkpoint {text}: {len(names)}, {[*names]}"


def no_state_of(layer: str) -> str:
    return of("has no state of", f"{layer}.weight", f"{layer}.bias")


def not_here(layer: str) -> str:
    text = "has state of parameters that are not here"
    return of(text, f"{layer}.weight", f"{layer}.bias")


def check_that_training_goes_on(
    make: Make,
    old: tuple[nn.Module, list[dict[str, Any]]],
    new: tuple[nn.Module, list[dict[str, Any]]],
    without: tuple[str, ...] = (),
) -> None:
    """Compare training after loading with that of an optimizer whose state was put in by hand."""
    old_model, model = old[0], new[0]
    old_optimizer = make(old[1])
    train(old_model, old_optimizer)
    weights = {n: v for n, v in old_model.state_dict().items() if n not in without}
    model.load_state_dict(weights, strict=False)
    # What was built is the same for both; the reference gets copies of the same parameters.
    expected_model, expected_groups = copy.deepcopy((model, new[1]))
    expected = make(expected_groups)
    saved = state_of(old_model, old_optimizer)
    optimized = {
        parameter for group in expected.param_groups for parameter in group["params"]
    }
    for name, parameter in expected_model.named_parameters():
        if name in saved and name not in without and parameter in optimized:
            expected.state[parameter] = copy.deepcopy(saved[name])
    optimizer = make(new[1])
    state = through_a_file(optimizer_state_dict(old_optimizer))
    unchanged = copy.deepcopy(state)
    load_optimizer_state(optimizer, state)
    assert same(state, unchanged)
    assert same(state_of(model, optimizer), state_of(expected_model, expected))
    train(model, optimizer, 2)
    train(expected_model, expected, 2)
    for ours, theirs in zip(
        model.parameters(), expected_model.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs)


# Names


def test_torch_takes_a_state_with_names() -> None:
    model = net("a", "b")
    optimizer = sgd(groups_of(model, "a", "b"))
    train(model, optimizer)
    state = optimizer_state_dict(optimizer)
    assert list(state["state"]) == ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert state["param_groups"][1]["params"] == ["b.weight", "b.bias"]
    other = sgd(groups_of(model, "a", "b"))
    other.load_state_dict(through_a_file(state))
    assert same(state_of(model, other), state_of(model, optimizer))


def test_a_model_gives_the_names() -> None:
    model = net("a", "b")
    nameless = torch.optim.SGD(model.b.parameters())
    assert optimizer_state_dict(nameless)["param_groups"][0]["params"] == [0, 1]
    for optimizer in (nameless, sgd(groups_of(model.b))):
        state = optimizer_state_dict(optimizer, parameter_names(nn.DataParallel(model)))
        assert state["param_groups"][0]["params"] == ["b.weight", "b.bias"]
    assert "param_names" not in nameless.param_groups[0]
    nameless.add_param_group(
        {"params": [*model.a.parameters()]}
    )  # torch would refuse with names
    foreign = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(7))])
    state = optimizer_state_dict(foreign, parameter_names(model))
    assert state["param_groups"][0]["params"] == [0, 1, 2, 3, 4]
    twice = sgd(
        [*groups_of(net("a")), *groups_of(net("a"))]
    )  # the names are not unique
    state = optimizer_state_dict(twice)
    assert [group["params"] for group in state["param_groups"]] == [[0, 1], [2, 3]]
    load_optimizer_state(twice, state)


def test_a_wrapper_loads_by_the_names_of_its_model() -> None:
    old, new = net("a", "b"), net("b", "c")
    wrapper, loaded = (
        OptimWrapper(torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9))
        for m in (old, new)
    )
    wrapper.name_parameters(old)
    train(old, wrapper.optimizer)
    loaded.name_parameters(new)
    loaded.load_state_dict(through_a_file(wrapper.state_dict()))
    assert list(state_of(new, loaded.optimizer)) == ["b.weight", "b.bias"]
    saved = wrapper.optimizer.state[old.b.weight]["momentum_buffer"]
    assert torch.equal(loaded.optimizer.state[new.b.weight]["momentum_buffer"], saved)
    old.d = nn.Linear(2, 1)  # is found although it is added later
    wrapper.optimizer.add_param_group({"params": [*old.d.parameters()]})
    assert wrapper.state_dict()["param_groups"][1]["params"] == ["d.weight", "d.bias"]


def test_states_by_position_load() -> None:
    old, new = net("a", "b"), net("a", "b")
    optimizer = torch.optim.SGD(old.parameters(), lr=0.1, momentum=0.9)
    train(old, optimizer)
    states = [
        optimizer.state_dict(),
        optimizer_state_dict(optimizer, parameter_names(old)),
    ]
    for saved, names in product(states, (None, parameter_names(new))):
        ours = torch.optim.SGD(new.parameters(), lr=0.1, momentum=0.9)
        load_optimizer_state(ours, through_a_file(saved), names)
        assert same(state_of(new, ours), state_of(old, optimizer))
    torchs = {"state": {11 + i: state for i, state in states[0]["state"].items()}}
    names = [*parameter_names(old).values()]
    group = {
        **states[0]["param_groups"][0],
        "params": [11, 12, 13, 14],
        "param_names": names,
    }
    only_b = sgd(groups_of(net("b")))
    load_optimizer_state(only_b, {**torchs, "param_groups": [group]})
    assert [
        same(s, torchs["state"][13 + i]) for i, s in enumerate(only_b.state.values())
    ] == [True] * 2


def test_parameters_that_cannot_be_matched_are_refused() -> None:
    old, new = net("a"), net("a", "b")
    nameless = torch.optim.SGD(old.parameters())
    with pytest.raises(
        ValueError, match=r"no names.*sizes \[2\], not \[4\].*train\.resume_parts"
    ):
        load_optimizer_state(sgd(groups_of(new)), nameless.state_dict())
    with pytest.raises(ValueError, match=r"no names.*sizes \[4\], not \[2\]"):
        load_optimizer_state(nameless, sgd(groups_of(new)).state_dict())
    with pytest.raises(
        ValueError, match=r"'b.weight', 'b.bias'\], .* has none of .*'a.weight"
    ):
        load_optimizer_state(sgd(groups_of(old)), sgd(groups_of(net("b"))).state_dict())


# Changed models


@every_optimizer
def test_a_layer_may_be_frozen(make: Make, changes: Changes) -> None:
    old, new = net("a", "b", "c"), net("a", "b", "c")
    new.a.requires_grad_(False)
    for before, after in ((old, new), (new, old)):
        groups = [get_default_optimizer_params(model) for model in (before, after)]
        check_that_training_goes_on(make, (before, groups[0]), (after, groups[1]))
    assert changes() == [not_here("a"), no_state_of("a")]


@every_optimizer
@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (["a", "b"], ["a", "b"], []),
        (["ac"], ["abc"], [no_state_of("b")]),
        (["abc"], ["ac"], [not_here("b")]),
        # b's group has another number.
        (["a", "b"], ["b"], [not_here("a")]),
        (["ab"], ["b", "a"], []),
        (["a", "b"], ["ab"], []),
    ],
)
def test_layers_may_be_moved(
    before: list[str],
    after: list[str],
    told: list[str],
    make: Make,
    changes: Changes,
) -> None:
    old, new = (net(*sorted("".join(groups))) for groups in (before, after))
    split = [
        groups_of(model, *(groups if len(groups) > 1 else []))
        for model, groups in ((old, before), (new, after))
    ]
    for group in split[1]:  # in another order
        group.update({key: values[::-1] for key, values in group.items()})
    check_that_training_goes_on(make, (old, split[0]), (new, split[1]))
    assert list(map(words, changes())) == list(map(words, told))


@every_optimizer
def test_the_state_of_a_parameter_of_another_shape_is_dropped(
    make: Make, changes: Changes
) -> None:
    old, new = net("a", "b"), net("a", "b")
    old.b, new.b = nn.Linear(3, 1), nn.Linear(3, 5)
    without = ("b.weight", "b.bias")
    check_that_training_goes_on(
        make, (old, groups_of(old)), (new, groups_of(new)), without
    )
    [told] = changes()
    assert told.endswith("not loaded: 2, ['b.weight (1, 3)', 'b.bias (1,)']")


def test_what_an_optimizer_of_others_keeps_is_not_judged(changes: Changes) -> None:
    class Projected(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 1.0})

    optimizer = Projected(groups_of(net("a")))
    weight = optimizer.param_groups[0]["params"][0]
    optimizer.state[weight]["projection"] = torch.ones(12)
    optimizer.state["shared"] = {"steps": 5}  # type: ignore[index]
    saved = through_a_file(optimizer_state_dict(optimizer))
    optimizer.state.clear()
    load_optimizer_state(optimizer, saved)
    assert changes() == []
    assert torch.equal(optimizer.state[weight]["projection"], torch.ones(12))
    assert optimizer.state["shared"] == {"steps": 5}  # type: ignore[index]


# Settings


def test_the_settings_of_a_group_come_from_where_most_of_it_was(
    changes: Changes,
) -> None:
    old, new = net("a", "b", "c"), net("a", "b", "c", "d")
    optimizer = sgd(groups_of(old, "a", "b", "c"))
    for group, lr in zip(optimizer.param_groups, (1.0, 2.0, 3.0), strict=True):
        group.update(lr=lr, initial_lr=10 * lr, momentum=lr / 10)
    ours = groups_of(new, "d", "c", "")
    ours[2]["params"] = [*new.a.parameters(), *new.b.parameters()][:3]
    ours[2]["param_names"] = ["a.weight", "a.bias", "b.weight"]
    ours[2]["note"] = "mine"
    built = sgd(ours)
    load_optimizer_state(built, optimizer_state_dict(optimizer))
    settings = ("lr", "initial_lr", "momentum", "note")
    assert [[g.get(key) for key in settings] for g in built.param_groups] == [
        [0.01, None, 0.9, None],
        [3.0, 30.0, 0.3, None],
        [1.0, 10.0, 0.1, "mine"],
    ]
    assert changes()[0].endswith("not here: 1, ['b.bias']")
    assert changes()[1] == no_state_of("d")
    assert built.param_groups[2]["param_names"] == ["a.weight", "a.bias", "b.weight"]
    assert built.param_groups[2]["params"][2] is new.b.weight


def test_settings_that_the_checkpoint_overrules_are_told(changes: Changes) -> None:
    saved = torch.optim.SGD(net("a").parameters(), lr=0.1, weight_decay=0.01)
    loaded = torch.optim.SGD(net("a").parameters(), lr=0.5, weight_decay=0.01)
    load_optimizer_state(loaded, saved.state_dict())
    assert changes() == ["Optimizer group 0: lr is 0.1, as in the checkpoint, not 0.5"]
    assert loaded.param_groups[0]["lr"] == 0.1
    # A rate that a schedule moves is compared by where it began.
    saved.param_groups[0].update(initial_lr=0.1, lr=0.003)
    for lr in (0.1, 0.2):
        loaded = torch.optim.SGD(net("a").parameters(), lr=lr, weight_decay=0.01)
        load_optimizer_state(loaded, saved.state_dict())
    assert changes()[1:] == [
        "Optimizer group 0: initial_lr is 0.1, as in the checkpoint, not 0.2"
    ]


def test_how_to_compute_stays_as_built(
    changes: Changes,
) -> None:
    saved = torch.optim.SGD(
        net("a").parameters(), lr=0.1, foreach=True, weight_decay=0.5
    )
    loaded = torch.optim.SGD(net("a").parameters(), lr=0.1, fused=True)
    load_optimizer_state(loaded, saved.state_dict())
    group = loaded.param_groups[0]
    assert (group["foreach"], group["fused"], group["weight_decay"]) == (
        None,
        True,
        0.5,
    )
    [told] = changes()
    assert "weight_decay" in told


def test_the_state_takes_the_layout_of_its_parameter_as_fused_kernels_need_it() -> None:
    def step(conv: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        weight = conv.get_parameter("weight")
        weight.grad = weight.detach().square()  # laid out as the weight
        optimizer.step()

    torch.manual_seed(0)
    plain = nn.Conv2d(3, 4, 3)
    turned = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    optimizers = [
        torch.optim.AdamW(conv.parameters(), lr=0.1, fused=True)
        for conv in (plain, turned)
    ]
    step(plain, optimizers[0])
    turned.load_state_dict(plain.state_dict())
    load_optimizer_state(optimizers[1], copy.deepcopy(optimizers[0].state_dict()))
    for conv, optimizer in zip((plain, turned), optimizers, strict=True):
        step(conv, optimizer)
    assert torch.equal(plain.weight, turned.weight)


def test_the_state_of_another_kind_of_optimizer_is_refused() -> None:
    class Own(torch.optim.SGD):
        pass

    saved = optimizer_state_dict(torch.optim.SGD(net("a").parameters(), lr=0.1))
    load_optimizer_state(Own(net("a").parameters(), lr=0.1), saved)
    with pytest.raises(
        ValueError, match=r"that of SGD, and this is AdamW: .*train\.resume_parts"
    ):
        load_optimizer_state(torch.optim.AdamW(net("a").parameters()), saved)
