"""What the parameter schedulers are, and what they refuse."""

import doctest
import logging
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from scheduler_toys import ours, rates, run, sgd, theirs

from hooktrain.solver import OptimWrapper, one_cycle, param_curves
from hooktrain.solver.curve_scheduler import CurveScheduler
from hooktrain.solver.group_scheduler import GroupParamScheduler, OfLR
from hooktrain.solver.param_curves import Curve
from hooktrain.solver.param_scheduler import (
    ConstantLR,
    ConstantMomentum,
    CosineAnnealingLR,
    CosineRestartLR,
    ExponentialLR,
    LinearLR,
    LinearParamScheduler,
    MultiStepLR,
    OneCycleLR,
    PolyLR,
    ReduceOnPlateauLR,
    StepLR,
)
from hooktrain.utils.registries import PARAM_SCHEDULERS

W = torch.nn.Parameter(torch.zeros(1))


@pytest.mark.parametrize("module", [param_curves, one_cycle])
def test_the_examples_of_the_curves_are_right(module: Any) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


# What the classes are


@pytest.mark.parametrize("name", [n for n in dir(theirs) if n[0] != "_" and n[0].isupper()])
def test_every_scheduler_has_one_base_and_is_registered(name: str) -> None:
    scheduler = getattr(ours, name)
    assert issubclass(scheduler, ours._ParamScheduler)
    assert ours._ParamScheduler is GroupParamScheduler
    assert PARAM_SCHEDULERS.get(name) is scheduler
    assert "Args:" in scheduler.__doc__
    assert "optimizer:" in scheduler.__doc__


def test_a_scheduler_shows_its_arguments_and_is_equal_to_itself_only() -> None:
    optimizer = sgd(0.1)
    a, b = LinearLR(optimizer, 0.5, end=3), LinearLR(optimizer, 0.5, end=3)
    assert repr(a).startswith("LinearLR(start_factor=0.5, end_factor=1.0, begin=0, end=3")
    assert a != b
    assert len({a, b}) == 2


def test_a_curve_of_your_own_is_a_function() -> None:
    @dataclass(eq=False)
    class SawTooth(Curve):
        period: int

        def share(self, k: int, length: int) -> float:
            return 1 - (k % self.period) / self.period

    @dataclass(eq=False)
    class SawToothLR(CurveScheduler, SawTooth, OfLR):
        pass

    optimizer = sgd(1.0)
    assert run(optimizer, [SawToothLR(optimizer, 2, end=5)], 5) == [1.0, 0.5, 1.0, 0.5, 1.0]
    with pytest.raises(NotImplementedError, match=r"share\(k, length\)"):
        Curve().share(0, 1)


def test_each_change_is_logged_if_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = sgd(1.0)
    with caplog.at_level(logging.INFO):
        ExponentialLR(optimizer, 0.5, verbose=True).step()
    assert "Step 1: lr becomes 5.0000e-01" in caplog.text


# What is refused


def test_a_group_added_later_is_an_error() -> None:
    optimizer = sgd(1.0)
    scheduler = StepLR(optimizer, 2)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ValueError, match=r"now has 2 parameter groups, and StepLR was made for 1"):
        scheduler.step()


def test_a_cycle_ends_after_its_steps() -> None:
    optimizer = sgd(1.0)
    scheduler = OneCycleLR(optimizer, 1.0, total_steps=3)
    seen = run(optimizer, [scheduler], 3)
    assert rates(optimizer) == [seen[-1]]
    with pytest.raises(ValueError, match="total_steps=3, and this is step 4"):
        scheduler.step()


def test_a_cycle_has_a_maximum_for_each_group_and_overwrites_what_others_set() -> None:
    optimizer = OptimWrapper(sgd(1.0, 1.0))
    scheduler = OneCycleLR(optimizer, [1.0, 3.0], 10, div_factor=10.0)
    assert rates(optimizer) == pytest.approx([0.1, 0.3, 0.3])
    optimizer.param_groups[0]["lr"] = 50.0
    scheduler.step()
    assert rates(optimizer)[0] == pytest.approx(rates(optimizer)[1] / 3)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda o: StepLR("adam", 2), TypeError, "optimizer must be .*: 'adam'"),
        (lambda o: StepLR(o, 2, begin=5, end=5), ValueError, "begin=5, end=5"),
        (lambda o: StepLR(o, 2, begin=-1), ValueError, "begin=-1"),
        (lambda o: StepLR(o, 2, last_step=-2), ValueError, "last_step must be at least -1: -2"),
        (lambda o: StepLR(o, 0), ValueError, r"step_size must lie in \[1, inf\]: 0"),
        (lambda o: StepLR(o, 1, -0.1), ValueError, "gamma must lie in .*: -0.1"),
        (lambda o: MultiStepLR(o, [3, -1]), ValueError, r"milestones must .*: \[3, -1\]"),
        (lambda o: ExponentialLR(o, -1.0), ValueError, "gamma must lie in .*: -1.0"),
        (lambda o: ConstantLR(o, 1.5), ValueError, r"factor must lie in \[0, 1\]: 1.5"),
        (lambda o: LinearLR(o, -0.5), ValueError, "start_factor must lie in .*: -0.5"),
        (lambda o: LinearLR(o, 0.5, 2.0), ValueError, "end_factor must lie in .*: 2.0"),
        (lambda o: PolyLR(o, power=-1.0), ValueError, "power must lie in .*: -1.0"),
        (lambda o: CosineAnnealingLR(o, 0), ValueError, "T_max must lie in .*: 0"),
        (
            lambda o: CosineAnnealingLR(o, 5, 0.1, begin=3, eta_min_ratio=0.2),
            ValueError,
            "eta_min=0.1 or eta_min_ratio=0.2, not both",
        ),
        (lambda o: CosineRestartLR(o, [3, 3]), ValueError, r"periods .*\[3, 3\] and \(1,\)"),
        (lambda o: CosineRestartLR(o, [0]), ValueError, r"periods must lie in .*: \[0\]"),
        (lambda o: OneCycleLR(o, [1.0, 2.0]), ValueError, r"each of the 1 .*\[1.0, 2.0\]"),
        (lambda o: OneCycleLR(o, 1.0, 0), ValueError, "total_steps must lie in .*: 0"),
        (lambda o: OneCycleLR(o, 1.0, 9, 1.5), ValueError, "pct_start must lie in .*: 1.5"),
        (lambda o: OneCycleLR(o, 1.0, 9, 0.5, "cosine"), ValueError, "'cos' or 'linear': 'cosine'"),
        (lambda o: OneCycleLR(o, 1.0, 9, div_factor=0.0), ValueError, "div_factor .*: 0.0"),
        (lambda o: ReduceOnPlateauLR(o, rule="min"), ValueError, "'less' or 'greater': 'min'"),
        (lambda o: ReduceOnPlateauLR(o, threshold_rule="x"), ValueError, "'rel' or 'abs': 'x'"),
        (lambda o: ReduceOnPlateauLR(o, factor=1.0), ValueError, r"factor .*\[0, 1\): 1.0"),
        (lambda o: ReduceOnPlateauLR(o, threshold=-1), ValueError, "threshold must not .*: -1"),
        (lambda o: ReduceOnPlateauLR(o, min_value=[0, 1]), ValueError, r"each of the 1 .*\[0, 1\]"),
        (lambda o: ReduceOnPlateauLR(o, by_epoch=False), ValueError, "by_epoch=False"),
        (lambda o: LinearParamScheduler(o, "weight_decya"), ValueError, "mean 'weight_decay'"),
        (lambda o: ConstantMomentum(torch.optim.Adagrad([W])), ValueError, "no 'momentum'"),
        (lambda o: StepLR.build_iter_from_epoch(o, 2), ValueError, "epoch_length .*: None"),
        (lambda o: StepLR.build_iter_from_epoch(o, 2, epoch_length=0), ValueError, "least 1: 0"),
        (
            lambda o: StepLR.build_iter_from_epoch(o, 2, by_epoch=False, epoch_length=3),
            ValueError,
            "by_epoch=False: these arguments of StepLR are iterations",
        ),
    ],
)
def test_a_wrong_argument_is_refused_and_writes_nothing(
    make: Any, error: type[Exception], message: str
) -> None:
    optimizer = sgd(0.1)
    before = [*optimizer.param_groups[0].items()]
    with pytest.raises(error, match=message):
        make(optimizer)
    assert [*optimizer.param_groups[0].items()] == before


def test_a_plateau_refuses_metrics_that_are_not_there() -> None:
    scheduler = ReduceOnPlateauLR(sgd(0.1), "acc")
    with pytest.raises(KeyError, match=r"no metric 'acc' to monitor in \['loss'\]"):
        scheduler.step({"loss": 1.0})
    with pytest.raises(TypeError, match=r"dict of numbers by name: 0\.5"):
        scheduler.step(0.5)  # type: ignore[arg-type]


def test_several_optimizers_are_refused() -> None:
    class Both:
        param_groups = {"a": [], "b": []}  # noqa: RUF012

    with pytest.raises(TypeError, match="one scheduler for each of them"):
        StepLR(Both(), 2)  # type: ignore[arg-type]
