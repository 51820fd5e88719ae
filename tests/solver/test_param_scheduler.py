"""What the parameter schedulers are, and what they refuse."""

import copy
import inspect
import logging
import pickle
import pydoc
from typing import Any

import pytest
import torch
from scheduler_toys import ours, rates, run, sgd, theirs

from hooktrain.solver import OptimWrapper
from hooktrain.solver.group_scheduler import GroupParamScheduler
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
    make_scheduler,
)
from hooktrain.utils.registry import PARAM_SCHEDULERS

W = torch.nn.Parameter(torch.zeros(1))


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


def saw_tooth(k: int, length: int, *, period: int, low: float = 0.0) -> float:
    """From 1 down to ``low``, again and again."""
    return 1 - (1 - low) * (k % period) / period


SawToothLR = make_scheduler("SawToothLR", Curve(saw_tooth), "lr", module=__name__)


def test_a_curve_of_your_own_is_a_function() -> None:
    optimizer = sgd(1.0)
    assert run(optimizer, [SawToothLR(optimizer, 2, end=5)], 5) == [1.0, 0.5, 1.0, 0.5, 1.0]
    assert pickle.loads(pickle.dumps(SawToothLR)) is SawToothLR
    curve = Curve(saw_tooth, {"period": (1, 9)}, step_arguments=["period"])
    saw_tooth_param = make_scheduler("SawToothParam", curve)
    made = saw_tooth_param.build_iter_from_epoch(optimizer, "momentum", 2, 0.5, epoch_length=3)
    assert repr(made).startswith("SawToothParam(param_name='momentum', period=6, low=0.5, begin=0,")
    with pytest.raises(ValueError, match=r"period must lie in \[1, 9\]: 10"):
        saw_tooth_param(optimizer, "momentum", 10)


def test_a_function_that_cannot_be_a_curve_is_refused() -> None:
    def by_position(k: int, length: int, period: int = 2) -> float:
        return 1.0

    def taken(k: int, length: int, *, begin: int = 0) -> float:
        return 1.0

    with pytest.raises(TypeError, match=r"must be a function\(k, length, \*, ...\)"):
        make_scheduler("MyLR", Curve(by_position), "lr")
    with pytest.raises(ValueError, match="has another 'begin': rename that of the curve"):
        make_scheduler("MyLR", Curve(taken), "lr")


def test_a_scheduler_is_a_class_with_a_name_a_place_a_signature_and_help() -> None:
    assert (LinearLR.__name__, LinearLR.__qualname__) == ("LinearLR", "LinearLR")
    assert LinearLR.__module__ == "hooktrain.solver.param_scheduler"
    assert pickle.loads(pickle.dumps(LinearLR)) is LinearLR
    assert str(inspect.signature(SawToothLR)).endswith(
        "HasParamGroups, period: int, low: float = 0.0, begin: int = 0, end: int = 1000000000, "
        "last_step: int = -1, by_epoch: bool = True, verbose: bool = False)"
    )
    shown = pydoc.plain(pydoc.render_doc(SawToothLR))
    for part in (
        "period: int, low",
        "From 1 down to ``low``",
        "begin: the first step of the range",
    ):
        assert part in shown


def test_a_scheduler_survives_being_pickled_and_copied() -> None:
    scheduler = LinearLR(sgd(1.0), 0.25, end=4)
    for twin in (pickle.loads(pickle.dumps(scheduler)), copy.deepcopy(scheduler)):
        assert repr(twin) == repr(scheduler)
        assert run(twin.optimizer, [twin], 5) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_the_arguments_of_a_curve_cannot_be_changed_later() -> None:
    scheduler = StepLR(sgd(1.0), 2)
    assert scheduler.arguments == {"step_size": 2, "gamma": 0.1}
    assert scheduler.gamma == 0.1  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        scheduler.gamma = 0.5  # type: ignore[attr-defined]


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
        (lambda o: StepLR(o, 2, gama=0.5), TypeError, "^StepLR: .*'gama'; did you mean 'gamma'"),
        (lambda o: StepLR(o), TypeError, "StepLR: missing a required argument: 'step_size'"),
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
