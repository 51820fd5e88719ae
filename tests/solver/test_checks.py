"""What a trainer says of optimizers that do not train all of a model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hooktrain.engine import SimpleTrainer, hooks
from hooktrain.solver import CosineParamScheduler, OptimWrapper, WarmupParamScheduler
from hooktrain.solver.checks import check_optimizers
from toys import LinearLoss


def trainable(size: int = 1) -> torch.Tensor:
    return torch.zeros(size, requires_grad=True)


def warnings_of(model: nn.Module, *others: torch.Tensor) -> None:
    optimizer = torch.optim.SGD([*model.parameters(), *others], lr=0.1)
    check_optimizers(model, OptimWrapper(optimizer))


@pytest.mark.parametrize(
    "make",
    [
        trainable,  # such as a learned uncertainty
        lambda: [trainable(), trainable()],
        lambda: {"a": trainable()},
        lambda: [nn.Linear(1, 1)],
        lambda: (nn.Sequential(nn.Linear(1, 1)),),
        lambda: {"a": nn.Linear(1, 1)},
    ],
)
def test_what_is_no_part_of_the_model_is_named(
    make: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = LinearLoss()
    model.fc.hidden = make()
    warnings_of(model)
    [told] = caplog.messages
    assert told.startswith("model.fc.hidden has no effect")
    assert "nn.Parameter, nn.ModuleList or nn.ModuleDict" in told


def test_a_freeze_by_an_attribute_of_a_module_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = LinearLoss()
    model.fc.requires_grad = False
    warnings_of(model)
    [told] = caplog.messages
    assert told.startswith("model.fc.requires_grad has no effect")
    assert "requires_grad_(False)" in told


@pytest.mark.parametrize("is_frozen", [True, False])
def test_an_attribute_that_says_whether_a_module_is_trained_is_not_named(
    is_frozen: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(LinearLoss(), nn.Linear(1, 1))
    model[1].requires_grad_(not is_frozen)
    model[1].requires_grad = not is_frozen
    warnings_of(model)
    assert caplog.messages == []


def test_a_buffer_with_a_gradient_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = LinearLoss()
    model.register_buffer("scale", trainable())
    warnings_of(model)
    [told] = caplog.messages
    assert "model._buffers" in told


def test_tensors_that_are_not_to_be_trained_are_not_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = LinearLoss()
    model.again = [model.fc]
    model.weights = {"fc": model.fc.weight}
    model.teacher = [LinearLoss().requires_grad_(False)]
    model.last = [model.fc(torch.ones(1, 4))]
    model.constant = torch.ones(1)
    model.names = ["a", 1, None]
    warnings_of(model)
    assert caplog.messages == []
    model.own = trainable()
    warnings_of(model, model.own)
    [told] = caplog.messages
    assert "not the model's, so they are not saved" in told


def train(rates: list[float], **settings: Any) -> None:
    model = LinearLoss()
    groups: list[Any] = []
    for parameter, rate in zip(model.parameters(), rates, strict=True):
        groups.append({"params": [parameter], "lr": rate})
    for name, values in settings.items():
        for group, value in zip(groups, values, strict=True):
            group[name] = value
    trainer = SimpleTrainer(model, [torch.ones(2, 4)], torch.optim.SGD(groups))
    trainer.train(max_iter=2)


@pytest.mark.parametrize(
    ("rates", "scales", "is_told"),
    [
        ([0.1, 0.1], [0.5, 1.0], True),
        ([0.1, 0.2], [0.5, 1.0], False),  # a scheduler of timm has multiplied them
        ([0.1, 0.1], [0.5, 0.5], False),
    ],
)
def test_factors_that_only_timm_reads_are_told(
    rates: list[float],
    scales: list[float],
    is_told: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    train(rates, lr_scale=scales)
    assert ("group.pop('lr_scale')" in caplog.text) == is_told


@pytest.mark.parametrize(
    ("rates", "is_told"), [([0.0, 0.0], True), ([0.0, 0.1], False)]
)
def test_a_rate_of_0_is_told_after_a_period(
    rates: list[float], is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    train(rates)
    assert ("learning rate is 0" in caplog.text) == is_told


def rise_and_fall(optimizer: torch.optim.Optimizer) -> Any:
    """A scheduler of torch with rates of 0, half, the whole, half and 0."""
    factors = [0.0, 0.5, 1.0, 0.5, 0.0]
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factors[step])


@pytest.mark.parametrize(("rate", "is_told"), [(0.1, False), (0.0, True)])
@pytest.mark.parametrize(
    "schedule",
    [
        rise_and_fall,
        lambda _: WarmupParamScheduler(CosineParamScheduler(1.0, 0.0), 0.0, 0.5),
    ],
)
def test_a_rate_that_a_schedule_lets_begin_and_end_at_0_is_none_of_0(
    schedule: Any, rate: float, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = LinearLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    trainer = SimpleTrainer(model, [torch.ones(2, 4)], optimizer)
    trainer.register_hooks([hooks.LRScheduler(scheduler=schedule(optimizer))])
    trainer.train(max_iter=4)
    assert ("learning rate is 0" in caplog.text) == is_told
