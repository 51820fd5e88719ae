"""The state of an optimizer finds the parameters of the same names."""

import copy
import io
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adafactor, Adam, AdamW, NAdam, Optimizer

from hooktrain.solver import OptimWrapper
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


def check_that_states_find_their_parameters(
    make: Make,
    old: tuple[nn.Module, list[dict[str, Any]]],
    new: tuple[nn.Module, list[dict[str, Any]]],
) -> None:
    optimizer, loaded = make(old[1]), make(new[1])
    train(old[0], optimizer)
    state = saved(old[0], optimizer)
    unchanged = copy.deepcopy(state)
    load(new[0], loaded, state)
    assert same(state, unchanged)
    assert same(state_of(new[0], loaded), state_of(old[0], optimizer))
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
    old, new = net("a", "b"), net("b", "a")
    wrapper, loaded = (OptimWrapper(sgd(groups_of(model))) for model in (old, new))
    wrapper.name_parameters(nn.DataParallel(old))
    train(old, wrapper.optimizer)
    loaded.name_parameters(new)
    loaded.load_state_dict(through_a_file(wrapper.state_dict()))
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


def test_positions_in_groups_of_other_sizes_are_refused() -> None:
    model = net("a", "b")
    state = saved(nn.Module(), sgd(groups_of(model, "a", "b")))
    with pytest.raises(ValueError, match=r"sizes \[2, 2\], not \[4\]"):
        load(model, sgd(groups_of(model)), state)


@pytest.mark.parametrize(
    ("names", "with_names", "message"),
    [
        ("ab", False, "no parameter names"),
        ("b", True, r"\['a.bias', 'a.weight', 'b.bias', 'b.weight'\]"),
        ("ab", True, r"\['b.bias', 'b.weight'\].* frozen"),
    ],
)
def test_parameters_that_cannot_be_matched_are_refused(
    names: str, with_names: bool, message: str
) -> None:
    old, new = net("a"), net(*names)
    state = saved(old if with_names else nn.Module(), sgd(groups_of(old)))
    with pytest.raises(ValueError, match=message):
        load(new, sgd(groups_of(new)), state)


# Other groups and orders


@every_optimizer
@pytest.mark.parametrize(
    ("before", "after"),
    [(["a", "b"], ["a", "b"]), (["ab"], ["b", "a"]), (["a", "b"], ["ab"])],
)
def test_parameters_may_be_grouped_in_another_way(
    before: list[str], after: list[str], make: Make
) -> None:
    old, new = net("a", "b"), net("a", "b")
    split = [
        groups_of(model, *(groups if len(groups) > 1 else []))
        for model, groups in ((old, before), (new, after))
    ]
    for group in split[1]:  # in another order
        group["params"].reverse()
    check_that_states_find_their_parameters(make, (old, split[0]), (new, split[1]))


def test_a_parameter_that_was_never_reached_has_no_state() -> None:
    old, new = net("a", "b"), net("a", "b")
    new.b.requires_grad_(False)
    old.b.requires_grad_(False)
    check_that_states_find_their_parameters(
        OPTIMIZERS["Adam"], (old, groups_of(old)), (new, groups_of(new))
    )


class Lookahead(Optimizer):
    """Around another optimizer, with a state of its own form, as pytorch_optimizer's."""

    def __init__(self, base: Optimizer) -> None:
        self.base = base
        super().__init__(base.param_groups, base.defaults)
        self.param_groups = base.param_groups
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return self.base.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {"lookahead_state": self.steps, "base": self.base.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["lookahead_state"]
        self.base.load_state_dict(state_dict["base"])


def lookahead(model: nn.Module) -> Optimizer:
    return Lookahead(sgd(groups_of(model, "a", "b")))


def lbfgs(model: nn.Module) -> Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)


def closed_train(model: nn.Module, optimizer: Optimizer, steps: int) -> None:
    inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(inputs).square().sum()
        loss.backward()
        return loss.item()

    for _ in range(steps):
        optimizer.step(closure)


@pytest.mark.parametrize("make", [lookahead, lbfgs])
@pytest.mark.parametrize("is_named", [True, False])
def test_a_state_of_its_own_form_resumes_bit_for_bit(
    make: Callable[[nn.Module], Optimizer], is_named: bool
) -> None:
    torch.manual_seed(0)
    model = net("a", "b")
    optimizer = make(model)
    closed_train(model, optimizer, 2)
    twin = copy.deepcopy(model)
    loaded = make(twin)
    state = saved(model if is_named else nn.Module(), optimizer)
    load(twin if is_named else nn.Module(), loaded, state)
    closed_train(model, optimizer, 2)
    closed_train(twin, loaded, 2)
    assert same(dict(model.state_dict()), dict(twin.state_dict()))


@pytest.mark.parametrize("make", [lookahead, lbfgs])
@pytest.mark.parametrize("names", [("b", "a"), ("a", "b", "c")])
def test_a_state_of_its_own_form_needs_the_same_order(
    make: Callable[[nn.Module], Optimizer], names: tuple[str, ...]
) -> None:
    state = saved(net("a", "b"), lbfgs(net("a", "b")))
    model = net("a", "b")
    state = saved(model, make(model))
    other = net(*names)
    optimizer = make(other) if make is lbfgs else Lookahead(sgd(groups_of(other)))
    with pytest.raises(ValueError, match="order"):
        load(other, optimizer, state)


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


# Data types


class FloatMoments(Optimizer):
    """Keeps float32 moments and a mask beside weights of any data type."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"]):
            state = self.state[parameter]
            if not state:
                state["moments"] = [torch.zeros(parameter.shape)]
                state["mask"] = parameter > 0
            (moment,) = state["moments"]
            moment.mul_(0.9).add_(parameter.grad.float())
            parameter -= (0.1 * moment * state["mask"]).to(parameter.dtype)


def in_bfloat16(make: Make) -> tuple[nn.Module, Optimizer]:
    model = net("a").bfloat16()
    return model, make(groups_of(model))


def after_a_resume(make: Make) -> tuple[Any, Any]:
    """The state after three steps, and what another optimizer has loaded of it."""
    model, optimizer = in_bfloat16(make)
    for step in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.3 + step)
        optimizer.step()
    new, loaded = in_bfloat16(make)
    load(new, loaded, saved(model, optimizer))
    return state_of(model, optimizer), state_of(new, loaded)


# NAdam keeps a product and ASGD two factors as float32.
@pytest.mark.parametrize(
    "make", [FloatMoments, lambda g: NAdam(g, lr=0.1), lambda g: ASGD(g, lr=0.013)]
)
def test_a_state_of_another_data_type_than_its_weight_resumes_bit_for_bit(
    make: Make,
) -> None:
    state, loaded = after_a_resume(make)
    # The representation of a tensor has its numbers and its data type.
    torch.set_printoptions(precision=10)
    try:
        assert repr(loaded) == repr(state)
    finally:
        torch.set_printoptions(profile="default")


def test_states_follow_weights_that_have_got_another_data_type() -> None:
    model = net("a")
    optimizer = sgd(groups_of(model))
    train(model, optimizer)
    new, loaded = in_bfloat16(sgd)
    load(new, loaded, saved(model, optimizer))
    buffers = [state["momentum_buffer"].dtype for state in loaded.state.values()]
    assert buffers == [torch.bfloat16] * 2


# Settings


def test_the_settings_of_a_group_are_those_of_its_parameters(changes: Changes) -> None:
    old, new = net("a", "b", "c"), net("a", "b", "c")
    optimizer = sgd(groups_of(old, "a", "b", "c"))
    for group, lr in zip(optimizer.param_groups, (1.0, 2.0, 2.0), strict=True):
        group.update(lr=lr, initial_lr=10 * lr, momentum=lr / 10)
    ours = groups_of(new, "b", "a")
    ours[0]["params"] += new.c.parameters()
    ours[1]["note"] = "mine"
    built = sgd(ours)
    load(new, built, saved(old, optimizer))
    settings = ("lr", "initial_lr", "momentum", "note")
    assert [[g.get(key) for key in settings] for g in built.param_groups] == [
        [2.0, 20.0, 0.2, None],
        [1.0, 10.0, 0.1, "mine"],
    ]
    together = sgd(groups_of(new))
    with pytest.raises(ValueError, match=r"a\.weight and b\.weight .* one group"):
        load(new, together, saved(old, optimizer))


class Counting(SGD):
    """Counts in a setting of its groups, as schedule-free optimizers."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["lr"] *= 0.5
        return super().step(closure)


def named_wrapper(optimizer: Optimizer, model: nn.Module) -> OptimWrapper:
    wrapper = OptimWrapper(optimizer)
    wrapper.name_parameters(model)
    return wrapper


def test_settings_that_the_run_has_changed_are_no_difference(changes: Changes) -> None:
    model = net("a")
    wrapper = named_wrapper(Counting(model.parameters(), lr=torch.tensor(0.1)), model)
    train(model, wrapper.optimizer)
    state = through_a_file(wrapper.state_dict())
    again = named_wrapper(Counting(model.parameters(), lr=torch.tensor(0.1)), model)
    again.load_state_dict(state)
    assert again.param_groups[0]["k"] == 3
    assert again.param_groups[0]["lr"] == torch.tensor(0.1) / 8
    # Files of others do not say what was configured.
    again.load_state_dict(through_a_file(wrapper.optimizer.state_dict()))
    assert changes() == []


def test_settings_that_were_configured_in_another_way_are_told(
    changes: Changes, caplog: pytest.LogCaptureFixture
) -> None:
    def by_parameter(lr: float, **settings: float) -> OptimWrapper:
        groups = [{"params": [p]} for p in model.parameters()]
        return named_wrapper(SGD(groups, lr=lr, **settings), model)

    model = net("a", "b")
    old = by_parameter(0.1, weight_decay=0.01)
    for group in old.param_groups:
        group.update(initial_lr=0.1, lr=0.003)
    state = old.state_dict()
    for _ in range(2):  # each resumed run says so
        loaded = by_parameter(0.2, weight_decay=0.02)
        loaded.load_state_dict(through_a_file(state))
        assert loaded.param_groups[0]["lr"] == 0.003
        [told] = changes()
        assert told.count("lr is 0.1, not 0.2") == 1
        assert told.count("weight_decay is 0.01, not 0.02") == 1
        assert "train.resume_parts" in told
        state = loaded.state_dict()
        caplog.clear()


def test_a_setting_that_the_saved_run_did_not_have_is_no_difference(
    changes: Changes,
) -> None:
    model = net("a")
    wrapper = named_wrapper(sgd(groups_of(model)), model)
    state = wrapper.state_dict()
    for group in (*state["param_groups"], *state["configured"]):
        del group["maximize"]  # as an older torch had it
    loaded = named_wrapper(sgd(groups_of(model)), model)
    loaded.load_state_dict(state)
    assert loaded.param_groups[0]["maximize"] is False
    assert changes() == []


def test_how_to_compute_stays_as_built(changes: Changes) -> None:
    model = net("a")
    old = SGD(model.parameters(), lr=0.1, foreach=True, weight_decay=0.5)
    loaded = named_wrapper(SGD(model.parameters(), lr=0.1, fused=True), model)
    loaded.load_state_dict(named_wrapper(old, model).state_dict())
    group = loaded.param_groups[0]
    assert (group["foreach"], group["fused"]) == (None, True)
    assert group["weight_decay"] == 0.5
    [told] = changes()
    assert "weight_decay" in told
    assert "fused" not in told


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


def test_numbers_of_eight_bits_stay_so_in_another_layout() -> None:
    class EightBit(SGD):
        def load_state_dict(self, state_dict: Any) -> None:
            self.loaded = state_dict["state"]

    conv = nn.Conv2d(3, 4, 3)
    optimizer = EightBit(conv.to(memory_format=torch.channels_last).parameters())  # type: ignore[call-overload]
    state = saved(conv, optimizer)
    numbers = torch.arange(108, dtype=torch.uint8).view(4, 3, 3, 3)
    load(conv, optimizer, {**state, "state": {"weight": {"moment": numbers}}})
    moment = optimizer.loaded["weight"]["moment"]
    assert moment.dtype == torch.uint8
    assert moment.stride() == conv.weight.stride()
    assert torch.equal(moment, numbers)


def test_the_state_of_another_kind_of_optimizer_is_refused() -> None:
    class Other(Lookahead):
        pass

    model = net("a")
    state = saved(model, SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="AdamW"):
        load(model, AdamW(model.parameters()), state)
    whole = saved(model, Lookahead(sgd(groups_of(model))))
    with pytest.raises(ValueError, match="Lookahead, but the optimizer is Other"):
        load(model, Other(sgd(groups_of(model))), whole)


@pytest.mark.parametrize("of_several", [False, True])
def test_rates_and_scheduled_settings_stay_as_built_without_the_hooks(
    of_several: bool, changes: Changes
) -> None:
    model = net("a")
    old = AdamW(model.parameters(), lr=0.1, betas=(0.5, 0.9), weight_decay=0.3)
    wrapper = named_wrapper(old, model)
    old.param_groups[0].update(initial_betas=(0.7, 0.9))
    state: Any = through_a_file(wrapper.state_dict())
    kept = without_schedules({"one": state} if of_several else state)
    new = AdamW(model.parameters(), lr=0.2, betas=(0.6, 0.8), weight_decay=0.3)
    named_wrapper(new, model).load_state_dict(kept["one"] if of_several else kept)
    [group] = new.param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (
        0.2,
        (0.6, 0.8),
        0.3,
    )
    assert not [key for key in group if key.startswith("initial_")]
    assert changes() == []
