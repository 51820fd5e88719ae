"""Small models and optimizers whose states are matched by name."""

import copy
import io
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hooktrain.solver.match_state import StateMatch, match_optimizer_state

__all__ = [
    "Make",
    "check_that_training_goes_on",
    "every_optimizer",
    "groups_of",
    "load",
    "net",
    "same",
    "sgd",
    "train",
]

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
