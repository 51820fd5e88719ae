"""What a trainer says of optimizers that do not train all of a model."""

import logging
from collections.abc import Callable
from functools import partial
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


class Detached(nn.Module):
    """Two layers, of which the first may get no gradient."""

    def __init__(self, detach: bool = True) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)
        self.detach = detach

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.body(x)
        if self.detach:
            features = features.detach()
        return self.head(features).square().mean()


class ByData(torch.optim.SGD):
    """Writes to ``p.data``, as older optimizers do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-group["lr"])


def told_of_idle(model: nn.Module, optimizer: Any, caplog: Any, count: int = 5) -> Any:
    caplog.clear()
    caplog.set_level(logging.INFO)
    trainer = SimpleTrainer(model, [torch.ones(2, 4)], optimizer, 3)
    trainer.train(max_iter=count)
    return [text for text in caplog.messages if "without a gradient so far" in text]


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
        partial(torch.optim.SGD, lr=0.1),
        partial(torch.optim.AdamW, lr=0.1),
    ],
)
def test_parameters_that_get_no_gradient_are_named_once(
    optimizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = Detached()
    given = optimizer(model.parameters())
    [told] = told_of_idle(model, given, caplog)
    assert "'body.weight'" in told
    assert "'body.bias'" in told
    assert "head" not in told
    model.detach = False
    assert told_of_idle(model, given, caplog) == []


def closure_step(trainer: Any) -> None:
    def closure() -> Any:
        trainer.optim_wrapper.zero_grad()
        loss = trainer.model(torch.ones(2, 4))
        loss.backward()
        return loss

    trainer.optimizer.step(closure)
    trainer.record_losses({"loss": closure()})


def test_an_optimizer_with_one_state_for_all_parameters_tells_nothing_of_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Trainer(SimpleTrainer):
        run_step = closure_step

    caplog.set_level(logging.INFO)
    model = Detached(False)
    Trainer(model, None, torch.optim.LBFGS(model.parameters()), 3).train(max_iter=3)
    assert "without a gradient" not in caplog.text


@pytest.mark.parametrize("case", ["trained", "frozen", "by data", "accumulated"])
def test_models_of_which_all_is_trained_that_is_to_be_are_not_told(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Detached(case == "frozen")
    model.body.requires_grad_(case != "frozen")
    kind = ByData if case == "by data" else torch.optim.SGD
    optimizer: Any = kind(model.parameters(), lr=0.1, momentum=0.9)
    if case == "accumulated":
        optimizer = OptimWrapper(optimizer, accumulative_counts=2)
    assert told_of_idle(model, optimizer, caplog) == []


class ScheduleFree(torch.optim.SGD):
    def eval(self) -> None:
        """Exchange the weights for those to evaluate."""


@pytest.mark.parametrize("kind", [ScheduleFree, torch.optim.SGD])
def test_an_optimizer_with_modes_that_no_hook_sets_is_told(
    kind: type[torch.optim.SGD], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = LinearLoss()
    check_optimizers(model, OptimWrapper(kind(model.parameters(), lr=0.1)))
    assert ("ScheduleFree has eval() and train()" in caplog.text) == (
        kind is ScheduleFree
    )
