"""The hook that steps schedules, with those of MMEngine's family, lists, and several optimizers."""

import logging
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR as TorchExponentialLR
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.lr_scheduler import StepLR as TorchStepLR

from hooktrain.engine import StepTrainer
from hooktrain.engine.hooks import CallbackHook, LRScheduler
from hooktrain.engine.hooks.lr_scheduler import ParamSchedulerHook
from hooktrain.solver import LinearParamScheduler, LRMultiplier, OptimWrapper, OptimWrapperDict
from hooktrain.solver.build_param_scheduler import build_param_scheduler
from hooktrain.solver.param_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    LinearMomentum,
    ReduceOnPlateauLR,
    StepLR,
)
from toy import linear_trainer


def recorded(trainer: Any, name: str = "lr") -> list[float]:
    return [value for value, _ in trainer.storage.history(name).values()]


def warm_up(optimizer: Any) -> list[Any]:
    return [
        LinearLR(optimizer, 0.25, by_epoch=False, end=4),
        StepLR(optimizer, 2, gamma=0.5, by_epoch=False, begin=4),
    ]


WARM_UP = [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 0.5, 0.5]


def test_a_list_is_stepped_in_order() -> None:
    trainer = linear_trainer(lr=1.0)
    hook = LRScheduler(scheduler=warm_up(trainer.optim_wrapper))
    trainer.register_hooks([hook])
    trainer.train(0, 8)
    assert recorded(trainer) == WARM_UP
    assert [type(s) for s in hook.scheduler] == [LinearLR, StepLR]


def test_one_of_ours_needs_no_list() -> None:
    trainer = linear_trainer(lr=1.0)
    hook = LRScheduler(scheduler=warm_up(trainer.optimizer)[0])
    trainer.register_hooks([hook])
    trainer.train(0, 5)
    assert recorded(trainer) == [*WARM_UP[:4], 1.0]
    assert isinstance(hook.scheduler, LinearLR)
    assert ParamSchedulerHook is LRScheduler


def test_epochs_and_iterations_of_all_kinds_go_together() -> None:
    trainer = linear_trainer(lr=8.0)
    optimizer = trainer.optimizer
    schedulers = [
        TorchStepLR(optimizer, 1, gamma=0.5),
        StepLR(optimizer, 2, gamma=0.5),
        LRMultiplier(
            torch.optim.SGD(trainer.model.parameters(), lr=1.0), LinearParamScheduler(1, 0), 6
        ),
    ]
    trainer.register_hooks([LRScheduler(scheduler=schedulers, epoch_length=2, by_epoch=True)])
    trainer.train(0, 6)
    assert recorded(trainer) == [8.0, 8.0, 4.0, 4.0, 1.0, 1.0]
    assert schedulers[2].last_epoch == 6


def test_a_multiplier_in_a_list_is_put_to_work_when_training_starts() -> None:
    trainer = linear_trainer(lr=8.0)
    hook = LRScheduler(scheduler=[LinearParamScheduler(1.0, 0.0)])
    trainer.register_hooks([hook])
    assert hook.state_dict() == {}
    trainer.train(0, 4)
    assert recorded(trainer) == [8.0, 6.0, 4.0, 2.0]
    assert [type(s) for s in hook.scheduler] == [LRMultiplier]


def test_a_scheduled_momentum_is_recorded() -> None:
    trainer = linear_trainer(lr=1.0)
    scheduler = LinearMomentum(trainer.optimizer, 0.5, by_epoch=False, end=3)
    trainer.register_hooks([LRScheduler(scheduler=scheduler)])
    trainer.train(0, 4)
    assert recorded(trainer, "momentum") == pytest.approx([0.45, 0.675, 0.9, 0.9])
    assert recorded(trainer) == [1.0] * 4


def measure(values: dict[int, float], name: str = "val") -> CallbackHook:
    return CallbackHook(
        after_step=lambda t: t.iter in values and t.storage.put_scalar(name, values[t.iter])
    )


def test_plateaus_step_after_each_new_value_of_their_metric() -> None:
    trainer = linear_trainer(measure({1: 1.0, 3: 1.0, 5: 1.0}), lr=1.0)
    schedulers = [
        ReduceOnPlateauLR(trainer.optimizer, "val", factor=0.5, patience=1),
        ReduceLROnPlateau(trainer.optimizer, factor=0.25, patience=0),
    ]
    trainer.register_hooks([LRScheduler(scheduler=schedulers, metric="val")])
    trainer.train(0, 8)
    assert recorded(trainer) == [1.0] * 4 + [0.25] * 2 + [0.25 * 0.5 * 0.25] * 2
    assert schedulers[0].state_dict()["global_step"] == 0


def test_a_plateau_with_a_range_counts_epochs() -> None:
    trainer = linear_trainer(measure(dict.fromkeys(range(8), 1.0)), lr=1.0)
    scheduler = ReduceOnPlateauLR(trainer.optimizer, "val", factor=0.5, patience=0, begin=2, end=3)
    with pytest.raises(ValueError, match="epoch_length="):
        LRScheduler(scheduler=scheduler)
    trainer.register_hooks([LRScheduler(scheduler=scheduler, epoch_length=2)])
    trainer.train(0, 8)
    # Epoch 2 begins after iteration 3, whose value is the first to count.
    assert recorded(trainer) == [1.0] * 5 + [0.5] * 3


def test_a_metric_that_never_came_is_said(caplog: pytest.LogCaptureFixture) -> None:
    trainer = linear_trainer()
    scheduler = ReduceOnPlateauLR(trainer.optimizer, "acuracy")
    trainer.register_hooks([LRScheduler(scheduler=scheduler)])
    with caplog.at_level(logging.WARNING):
        trainer.train(0, 2)
    assert "There was no metric 'acuracy'" in caplog.text


class TwoParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).mean()

    def train_step(self, data: Tensor, optim_wrapper: OptimWrapperDict) -> dict[str, Tensor]:
        losses = {}
        for name in ("a", "b"):
            losses[name] = getattr(self, name)(data).square().mean()
            optim_wrapper[name].update_params(losses[name])
        return losses


def two_optimizers() -> StepTrainer:
    torch.manual_seed(0)
    model = TwoParts()
    wrappers = {
        name: OptimWrapper(torch.optim.SGD(part.parameters(), lr=lr, momentum=0.9))
        for name, part, lr in (("a", model.a, 1.0), ("b", model.b, 2.0))
    }
    return StepTrainer(model, [torch.ones(2, 4) * 0.01], OptimWrapperDict(**wrappers))


def test_several_optimizers_have_schedulers_by_name() -> None:
    trainer = two_optimizers()
    wrappers = trainer.optim_wrapper
    schedulers = {
        "a": warm_up(wrappers["a"]),  # type: ignore[index]
        "b": LinearParamScheduler(1.0, 0.0),
    }
    trainer.register_hooks([LRScheduler(scheduler=schedulers)])
    trainer.train(0, 8)
    assert recorded(trainer, "a.lr") == WARM_UP
    assert recorded(trainer, "b.lr") == [2.0 * (1 - k / 8) for k in range(8)]


def test_one_configuration_serves_several_optimizers() -> None:
    trainer = two_optimizers()
    config = [
        {"type": "LinearLR", "start_factor": 0.25, "by_epoch": False, "end": 4},
        {"type": "LinearMomentum", "start_factor": 0.5, "by_epoch": False, "end": 3},
    ]
    schedulers = build_param_scheduler(config, trainer.optim_wrapper, {"max_iters": 6})
    trainer.register_hooks([LRScheduler(scheduler=schedulers)])
    trainer.train(0, 4)
    assert recorded(trainer, "b.lr") == [0.5, 1.0, 1.5, 2.0]
    assert recorded(trainer, "a.momentum") == pytest.approx([0.45, 0.675, 0.9, 0.9])


def test_several_optimizers_without_names_are_refused() -> None:
    trainer = two_optimizers()
    trainer.register_hooks([LRScheduler(scheduler=LinearParamScheduler(1.0, 0.0))])
    with pytest.raises(ValueError, match=r"several optimizers, \['a', 'b'\]: give a dict"):
        trainer.train(0, 1)


def test_optimizers_can_be_given_by_name() -> None:
    trainer = two_optimizers()
    other = torch.optim.SGD(trainer.model.parameters(), lr=4.0)
    schedule = {"x": LinearParamScheduler(1.0, 0.0)}
    trainer.register_hooks([LRScheduler({"x": other}, schedule)])
    trainer.train(0, 2)
    assert recorded(trainer, "x.lr") == [4.0, 2.0]


# State


def all_kinds(trainer: Any) -> list[Any]:
    optimizer = trainer.optimizer
    return [
        LinearLR(optimizer, 0.0, by_epoch=False, end=4),
        CosineAnnealingLR(optimizer, T_max=7, eta_min=0.01),
        TorchExponentialLR(optimizer, 0.9),
        ReduceOnPlateauLR(optimizer, "val", factor=0.5, patience=1),
    ]


def make() -> Any:
    trainer = linear_trainer(measure(dict.fromkeys(range(0, 20, 2), 1.0)), lr=0.5)
    trainer.register_hooks([LRScheduler(scheduler=all_kinds(trainer), epoch_length=3)])
    return trainer


@pytest.mark.parametrize("at", [1, 5, 6, 13])
def test_a_list_of_all_kinds_goes_on_bit_for_bit(at: int) -> None:
    whole, first, second = make(), make(), make()
    whole.train(0, 20)
    first.train(0, at)
    second.load_state_dict(first.state_dict())
    second.train(max_iter=20)
    assert recorded(second)[-(20 - at) :] == recorded(whole)[at:]


def test_a_state_that_is_saved_before_training_is_the_loaded_one() -> None:
    first, second = make(), make()
    first.train(0, 5)
    state = first.state_dict()["hooks"]
    second.load_state_dict(first.state_dict())
    assert second.state_dict()["hooks"] == state
    assert list(state["LRScheduler"]) == ["schedulers", "seen_iters"]


@pytest.mark.parametrize(
    ("kinds", "there_are"),
    [
        (lambda t: all_kinds(t)[0], "{'': 1}"),
        (lambda t: all_kinds(t)[:3], "{'': 3}"),
        (lambda t: {"a": all_kinds(t)}, "{'a': 4}"),
    ],
)
def test_the_state_of_other_schedulers_is_refused(kinds: Any, there_are: str) -> None:
    first, second = make(), linear_trainer()
    first.train(0, 2)
    hook = LRScheduler({"a": second.optimizer}, kinds(second), epoch_length=3)
    if not isinstance(hook.scheduler, dict):
        hook = LRScheduler(scheduler=hook.scheduler, epoch_length=3)
    second.register_hooks([hook])
    second.load_state_dict(first.state_dict())
    expected = f"it has {{'': 4}} of them, and there are {there_are}"
    with pytest.raises(ValueError, match=re.escape(expected)):
        second.train(max_iter=4)


# What is refused


def test_arguments_that_do_not_fit_are_refused() -> None:
    optimizer = linear_trainer().optimizer
    ours, torchs = StepLR(optimizer, 2), TorchStepLR(optimizer, 2)
    with pytest.raises(ValueError, match=r"StepLR\(step_size=2.*counts epochs: give epoch_length="):
        LRScheduler(scheduler=[ours])
    with pytest.raises(ValueError, match="counts epochs: give epoch_length="):
        LRScheduler(scheduler=torchs, by_epoch=True)
    with pytest.raises(ValueError, match="by_epoch=True is for schedulers of torch"):
        LRScheduler(scheduler=ours, by_epoch=True, epoch_length=2)
    with pytest.raises(ValueError, match="epoch_length must be at least 1, but got 0"):
        LRScheduler(scheduler=ours, epoch_length=0)
    with pytest.raises(ValueError, match="metric='val' is for ReduceLROnPlateau"):
        LRScheduler(scheduler=[ours], metric="val", epoch_length=2)
    with pytest.raises(TypeError, match="but got 'StepLR'"):
        LRScheduler(scheduler={"a": ["StepLR"]})
