"""detectron2's optimizers and schedules: the values of its formulas."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from hooktrain.compat.detectron2.solver import (
    LRMultiplier,
    LRScheduler,
    StepParamScheduler,
    StepWithFixedGammaParamScheduler,
    _expand_param_groups,
    build_lr_scheduler,
    build_optimizer,
    maybe_add_gradient_clipping,
)


def clip(enabled: bool, kind: str) -> Any:
    return SimpleNamespace(
        ENABLED=enabled, CLIP_TYPE=kind, CLIP_VALUE=0.5, NORM_TYPE=2.0
    )


def tree(**changes: Any) -> Any:
    options = {
        "BASE_LR": 0.1,
        "MOMENTUM": 0.9,
        "NESTEROV": False,
        "WEIGHT_DECAY": 1e-4,
        "WEIGHT_DECAY_NORM": 0.0,
        "WEIGHT_DECAY_BIAS": 0.0,
        "BIAS_LR_FACTOR": 2.0,
        "CLIP_GRADIENTS": clip(False, "value"),
        "MAX_ITER": 20,
        "LR_SCHEDULER_NAME": "WarmupMultiStepLR",
        "STEPS": (10, 15, 20),
        "GAMMA": 0.1,
        "WARMUP_ITERS": 4,
        "WARMUP_FACTOR": 0.25,
        "WARMUP_METHOD": "linear",
        "RESCALE_INTERVAL": False,
        "BASE_LR_END": 0.01,
        "NUM_DECAYS": 3,
    }
    return SimpleNamespace(SOLVER=SimpleNamespace(**(options | changes)))


def rates(scheduler: Any, steps: int = 20) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        scheduler.step()
    return found


def sgd() -> SGD:
    return SGD([nn.Parameter(torch.zeros(1))], lr=0.3)


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("WarmupMultiStepLR", lambda i: 0.1 ** ((i >= 10) + (i >= 15))),
        ("WarmupCosineLR", lambda i: 0.1 + 0.9 * (1 + math.cos(math.pi * i / 20)) / 2),
        ("WarmupStepWithFixedGammaLR", lambda i: 0.1 ** (i // 5)),
    ],
)
def test_a_schedule_of_the_tree_follows_its_warm_up(name: str, factor: Any) -> None:
    scheduler = build_lr_scheduler(tree(LR_SCHEDULER_NAME=name), sgd())
    warm = [0.25 + (factor(4) - 0.25) * i / 4 for i in range(4)]
    expected = [0.3 * f for f in [*warm, *map(factor, range(4, 20))]]
    assert rates(scheduler) == pytest.approx(expected, rel=1e-14)
    with pytest.raises(ValueError, match=r"unknown SOLVER\.LR_SCHEDULER_NAME 'Poly'"):
        build_lr_scheduler(tree(LR_SCHEDULER_NAME="Poly"), sgd())


def test_the_groups_of_the_tree_have_its_rates_and_decays() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    settings = {
        name_of[parameter]: (group["lr"], group["weight_decay"], group["momentum"])
        for group in build_optimizer(tree(), model).param_groups
        for parameter in group["params"]
    }
    assert settings == {
        "0.weight": (0.1, 1e-4, 0.9),
        "0.bias": (0.2, 0.0, 0.9),
        "1.weight": (0.1, 0.0, 0.9),
        "1.bias": (0.2, 0.0, 0.9),
    }


@pytest.mark.parametrize(
    ("kind", "clipped"), [("value", [-0.5, -0.5]), ("norm", [-0.3, -0.4])]
)
@pytest.mark.parametrize("of_class", [True, False])
def test_each_parameter_is_clipped_by_itself(
    kind: str, clipped: list[float], of_class: bool
) -> None:
    cfg = tree(CLIP_GRADIENTS=clip(True, kind))
    large, small, unused = [nn.Parameter(torch.zeros(size)) for size in (2, 1, 1)]
    parameters = [large, small, unused]
    if of_class:
        optimizer = maybe_add_gradient_clipping(cfg, SGD)(parameters, lr=1.0)
    else:
        optimizer = maybe_add_gradient_clipping(cfg, SGD(parameters, lr=1.0))
    large.grad = torch.tensor([3.0, 4.0])
    small.grad = torch.tensor([0.25])
    optimizer.step()
    assert large.tolist() == pytest.approx(clipped, rel=1e-5)
    assert (small.item(), unused.item()) == (-0.25, 0)
    assert maybe_add_gradient_clipping(tree(), SGD) is SGD


def test_the_module_has_the_other_names_of_detectron2s() -> None:
    assert issubclass(LRMultiplier, LRScheduler)
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    assert len(_expand_param_groups([{"params": parameters, "lr": 1.0}])) == 2


def test_fvcores_steps_have_its_values_also_where_the_progress_is_rounded() -> None:
    steps = StepParamScheduler(9, [0.1, 0.01, 0.001])
    assert [steps(i / 9) for i in (0, 2, 3, 6, 9)] == [0.1, 0.1, 0.01, 0.001, 0.001]
    halves = StepWithFixedGammaParamScheduler(0.5, 2, 0.5, 9)
    assert [halves(i / 9) for i in (0, 2, 3, 6, 9)] == [0.5, 0.5, 0.25, 0.125, 0.125]
    for base, gamma in ((0.5, -1.0), (0.0, 0.5)):
        with pytest.raises(ValueError, match="above 0"):
            StepWithFixedGammaParamScheduler(base, 2, gamma, 9)
