"""The state of an optimizer finds the parameters of the same names."""

import copy
import io
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer

from hooktrain.solver import OptimWrapper, get_default_optimizer_params
from hooktrain.solver.optim_state import (
    load_optimizer_state,
    optimizer_state_dict,
    parameter_names,
    without_schedules,
)

Make = Callable[[list[dict[str, Any]]], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda groups: SGD(groups, lr=0.01, momentum=0.9),
    "Adam": lambda groups: Adam(groups, lr=0.1),
    "AdamW": lambda groups: AdamW(groups, lr=0.1, amsgrad=True, foreach=True),
    "Adafactor": lambda groups: Adafactor(groups, lr=0.1),
}
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
sgd = OPTIMIZERS["SGD"]


def net(*names: str) -> nn.Sequential:
    return nn.Sequential(OrderedDict((name, nn.Linear(3, 3)) for name in names))


def groups_of(model: nn.Module, *prefixes: str) -> list[dict[str, Any]]:
    """One group of the parameters under each prefix."""
    named = [*model.named_parameters()]
    found = []
    for prefix in prefixes or ("",):
        found.append({"params": [p for name, p in named if name.startswith(prefix)]})
    return found


def train(model: nn.Module, optimizer: Optimizer, steps: int = 3) -> None:
    generator = torch.Generator().manual_seed(steps)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 3, generator=generator)).square().sum().backward()
        optimizer.step()


def state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    names = parameter_names(model)
    return {names[parameter]: state for parameter, state in optimizer.state.items()}


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def saved(model: nn.Module, optimizer: Optimizer) -> Any:
    return through_a_file(optimizer_state_dict(optimizer, parameter_names(model)))


def load(model: nn.Module, optimizer: Optimizer, state: Any) -> None:
    load_optimizer_state(optimizer, state, parameter_names(model))


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


def check_that_states_find_their_parameters(
    make: Make,
    old: tuple[nn.Module, list[dict[str, Any]]],
    new: tuple[nn.Module, list[dict[str, Any]]],
    without: tuple[str, ...] = (),
) -> None:
    optimizer, loaded = make(old[1]), make(new[1])
    train(old[0], optimizer)
    expected = {}
    for group in new[1]:
        for parameter in group["params"]:
            name = parameter_names(new[0])[parameter]
            if name not in without and name in state_of(old[0], optimizer):
                expected[name] = state_of(old[0], optimizer)[name]
    state = saved(old[0], optimizer)
    unchanged = copy.deepcopy(state)
    load(new[0], loaded, state)
    assert same(state, unchanged)
    assert same(state_of(new[0], loaded), expected)
    train(new[0], loaded, 1)


# Names


def test_torch_takes_a_state_with_names() -> None:
    model = net("a", "b")
    optimizer = sgd(groups_of(model, "a", "b"))
    train(model, optimizer)
    state = saved(model, optimizer)
    assert list(state["state"]) == ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert state["param_groups"][1]["params"] == ["b.weight", "b.bias"]
    other = sgd(groups_of(model, "a", "b"))
    other.load_state_dict(state)
    assert same(state_of(model, other), state_of(model, optimizer))


def test_without_all_names_a_state_has_positions() -> None:
    model = net("a", "b")
    optimizer = SGD([*model.parameters(), nn.Parameter(torch.ones(7))])
    for known in (model, nn.Module()):
        state = saved(known, optimizer)
        assert state["param_groups"][0]["params"] == [0, 1, 2, 3, 4]


def test_a_wrapper_loads_by_the_names_of_its_model() -> None:
    old, new = net("a", "b"), net("b", "c")
    wrapper, loaded = (OptimWrapper(sgd(groups_of(model))) for model in (old, new))
    wrapper.name_parameters(nn.DataParallel(old))
    train(old, wrapper.optimizer)
    loaded.name_parameters(new)
    loaded.load_state_dict(through_a_file(wrapper.state_dict()))
    assert list(state_of(new, loaded.optimizer)) == ["b.weight", "b.bias"]
    buffer = wrapper.optimizer.state[old.b.weight]["momentum_buffer"]
    assert torch.equal(loaded.optimizer.state[new.b.weight]["momentum_buffer"], buffer)
    old.d = nn.Linear(2, 1)  # is found although it is added later
    wrapper.optimizer.add_param_group({"params": [*old.d.parameters()]})
    assert wrapper.state_dict()["param_groups"][1]["params"] == ["d.weight", "d.bias"]


@pytest.mark.parametrize("named_when_saved", [True, False])
@pytest.mark.parametrize("named_when_loaded", [True, False])
def test_states_by_position_load(
    named_when_saved: bool, named_when_loaded: bool
) -> None:
    old, new = net("a", "b"), net("a", "b")
    optimizer, loaded = sgd(groups_of(old)), sgd(groups_of(new))
    train(old, optimizer)
    state = saved(old if named_when_saved else nn.Module(), optimizer)
    load(new if named_when_loaded else nn.Module(), loaded, state)
    assert same(state_of(new, loaded), state_of(old, optimizer))


def test_positions_of_one_group_a_parameter_are_those_of_the_model() -> None:
    old, new = net("a", "b"), net("a", "b")
    optimizer = sgd([{"params": [parameter]} for parameter in old.parameters()])
    train(old, optimizer)
    loaded = sgd(groups_of(new, "b", "a"))
    load(new, loaded, through_a_file(optimizer.state_dict()))
    assert same(state_of(new, loaded), state_of(old, optimizer))


@pytest.mark.parametrize(
    ("names", "with_names", "message"),
    [("ab", False, "no names"), ("b", True, "'a.weight'")],
)
def test_parameters_that_cannot_be_matched_are_refused(
    names: str, with_names: bool, message: str
) -> None:
    old, new = net("a"), net(*names)
    state = saved(old if with_names else nn.Module(), sgd(groups_of(old)))
    with pytest.raises(ValueError, match=message):
        load(new, sgd(groups_of(new)), state)


# Changed models


@every_optimizer
def test_a_layer_may_be_frozen(make: Make, changes: Changes) -> None:
    old, new = net("a", "b", "c"), net("a", "b", "c")
    new.a.requires_grad_(False)
    for before, after in ((old, new), (new, old)):
        groups = [get_default_optimizer_params(model) for model in (before, after)]
        check_that_states_find_their_parameters(
            make, (before, groups[0]), (after, groups[1])
        )
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
    before: list[str], after: list[str], told: list[str], make: Make, changes: Changes
) -> None:
    old, new = (net(*sorted("".join(groups))) for groups in (before, after))
    split = [
        groups_of(model, *(groups if len(groups) > 1 else []))
        for model, groups in ((old, before), (new, after))
    ]
    for group in split[1]:  # in another order
        group["params"].reverse()
    check_that_states_find_their_parameters(make, (old, split[0]), (new, split[1]))
    assert list(map(words, changes())) == list(map(words, told))


@every_optimizer
def test_the_state_of_a_parameter_of_another_shape_is_dropped(
    make: Make, changes: Changes
) -> None:
    old, new = net("a", "b"), net("a", "b")
    old.b, new.b = nn.Linear(3, 1), nn.Linear(3, 5)
    without = ("b.weight", "b.bias")
    check_that_states_find_their_parameters(
        make, (old, groups_of(old)), (new, groups_of(new)), without
    )
    [told] = changes()
    assert told.endswith("not loaded: 2, ['b.weight (1, 3)', 'b.bias (1,)']")


def test_what_an_optimizer_of_others_keeps_is_not_judged(changes: Changes) -> None:
    class Projected(Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 1.0})

    model = net("a")
    optimizer = Projected(groups_of(model))
    weight = model.a.weight
    optimizer.state[weight]["projection"] = torch.ones(12)
    optimizer.state["shared"] = {"steps": 5}  # type: ignore[index]
    state = saved(model, optimizer)
    optimizer.state.clear()
    load(model, optimizer, state)
    assert changes() == []
    assert torch.equal(optimizer.state[weight]["projection"], torch.ones(12))
    assert optimizer.state["shared"] == {"steps": 5}  # type: ignore[index]


def test_an_optimizer_that_extends_torchs_may_keep_a_number_for_each_row(
    changes: Changes,
) -> None:
    class RowNorms(AdamW):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            for parameter, state in self.state.items():
                rows = torch.atleast_2d(parameter.detach())
                state["row_norms"] = rows.norm(dim=1)

    model = net("a")
    optimizer = RowNorms(model.parameters(), lr=0.1)
    train(model, optimizer)
    expected = saved(model, optimizer)
    optimizer.state.clear()
    load(model, optimizer, expected)
    assert changes() == []
    assert same(saved(model, optimizer), expected)


# Settings


def test_the_settings_of_a_group_come_from_where_most_of_it_was(
    changes: Changes,
) -> None:
    old, new = net("a", "b", "c"), net("a", "b", "c", "d")
    optimizer = sgd(groups_of(old, "a", "b", "c"))
    for group, lr in zip(optimizer.param_groups, (1.0, 2.0, 3.0), strict=True):
        group.update(lr=lr, initial_lr=10 * lr, momentum=lr / 10)
    ours = groups_of(new, "d", "c")
    ours.append({"params": [*new[:2].parameters()][:3], "note": "mine"})
    built = sgd(ours)
    load(new, built, saved(old, optimizer))
    settings = ("lr", "initial_lr", "momentum", "note")
    assert [[g.get(key) for key in settings] for g in built.param_groups] == [
        [0.01, None, 0.9, None],
        [3.0, 30.0, 0.3, None],
        [1.0, 10.0, 0.1, "mine"],
    ]
    assert changes()[0].endswith("not here: 1, ['b.bias']")
    assert changes()[1] == no_state_of("d")
    assert built.param_groups[2]["params"][2] is new.b.weight


def test_settings_that_the_checkpoint_overrules_are_told(changes: Changes) -> None:
    old = SGD(net("a").parameters(), lr=0.1, weight_decay=0.01)

    def rate_after_loading(lr: float, **settings: float) -> Any:
        loaded = SGD(net("a").parameters(), lr=lr, weight_decay=0.01)
        loaded.param_groups[0].update(settings)
        load(nn.Module(), loaded, old.state_dict())
        return loaded.param_groups[0]["lr"]

    assert rate_after_loading(0.5) == 0.1
    [told] = changes()
    assert "those of the checkpoint: lr is 0.1, not 0.5. For your lr resume" in told
    # A rate that a schedule moves is compared by where it began.
    old.param_groups[0].update(initial_lr=0.1, lr=0.003)
    assert rate_after_loading(0.1) == rate_after_loading(0.2) == 0.003
    # One that begins with a warm-up has moved it already.
    assert rate_after_loading(0.001, initial_lr=0.1) == 0.003
    assert rate_after_loading(0.1, initial_lr=0.3) == 0.003
    _, *told = (text.partition(". For your lr")[0] for text in changes())
    assert [text.partition("initial_lr ")[2] for text in told] == [
        "is 0.1, not 0.2",
        "is 0.1, not 0.3",
    ]


def test_settings_of_many_groups_are_told_once(changes: Changes) -> None:
    def by_parameter(lr: float) -> SGD:
        return SGD([{"params": [p]} for p in model.parameters()], lr=lr)

    model = net("a", "b")
    load(model, by_parameter(0.2), saved(model, by_parameter(0.1)))
    [told] = changes()
    assert told.count("lr is 0.1, not 0.2") == told.count("train.resume_parts") == 1


def test_how_to_compute_stays_as_built(changes: Changes) -> None:
    old = SGD(net("a").parameters(), lr=0.1, foreach=True, weight_decay=0.5)
    loaded = SGD(net("a").parameters(), lr=0.1, fused=True)
    load(nn.Module(), loaded, old.state_dict())
    group = loaded.param_groups[0]
    assert (group["foreach"], group["fused"]) == (None, True)
    assert group["weight_decay"] == 0.5
    [told] = changes()
    assert "weight_decay" in told


def test_the_state_takes_the_layout_of_its_parameter_as_fused_kernels_need_it() -> None:
    def step(conv: nn.Module, optimizer: Optimizer) -> None:
        weight = conv.get_parameter("weight")
        weight.grad = weight.detach().square()  # laid out as the weight
        optimizer.step()

    torch.manual_seed(0)
    plain = nn.Conv2d(3, 4, 3)
    turned = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    first, second = (
        AdamW(conv.parameters(), lr=0.1, fused=True) for conv in (plain, turned)
    )
    step(plain, first)
    turned.load_state_dict(plain.state_dict())
    load(turned, second, copy.deepcopy(first.state_dict()))
    step(plain, first)
    step(turned, second)
    assert torch.equal(plain.weight, turned.weight)


def test_the_state_of_another_kind_of_optimizer_is_refused() -> None:
    class Own(SGD):
        pass

    model = net("a")
    state = saved(model, SGD(model.parameters(), lr=0.1))
    load(model, Own(model.parameters(), lr=0.1), state)
    with pytest.raises(ValueError, match="AdamW"):
        load(model, AdamW(model.parameters()), state)


def test_settings_that_were_scheduled_stay_as_built_without_the_hooks() -> None:
    model = net("a")
    old = AdamW(model.parameters(), lr=0.1, betas=(0.5, 0.9), weight_decay=0.3)
    old.param_groups[0].update(initial_lr=1.0, initial_betas=(0.7, 0.9))
    state = saved(model, old)
    for loaded, of_several in ((state, False), ({"one": state}, True)):
        kept = without_schedules(loaded)
        optimizer = AdamW(model.parameters(), lr=0.2, betas=(0.6, 0.8))
        load(model, optimizer, kept["one"] if of_several else kept)
        [group] = optimizer.param_groups
        assert (group["lr"], group["betas"], group["weight_decay"]) == (
            0.2,
            (0.6, 0.8),
            0.3,
        )
        assert not [key for key in group if key.startswith("initial_")]
