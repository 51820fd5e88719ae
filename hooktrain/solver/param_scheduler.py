"""Schedulers of the parameters of an optimizer's groups, by MMEngine's names.

Each combines a curve, what applies it, and the parameter that it is for. Several of them on one
optimizer, stepped in order, compose: one range after the other chains, overlapping ranges multiply,
and in a gap the value stays::

    schedulers = [
        LinearLR(optimizer, start_factor=0.001, by_epoch=False, begin=0, end=500),
        CosineAnnealingLR(optimizer, by_epoch=False, begin=500, end=10_000),
    ]
    for scheduler in schedulers:  # after each iteration
        scheduler.step()

A curve of your own is a dataclass with a method ``share``, and a scheduler of it three lines::

    @dataclass(eq=False)
    class MyLR(CurveScheduler, MyCurve, OfLR):
        pass

Five of the names for any parameter, such as :class:`LinearParamScheduler`, are also those of pure
functions in ``schedule.py``. ``hooktrain.solver`` exports these; import those here from here.
"""

import inspect
from dataclasses import dataclass

from hooktrain.solver.curve_scheduler import CurveScheduler
from hooktrain.solver.group_scheduler import (
    GroupParamScheduler,
    LastStepFirst,
    OfLR,
    OfMomentum,
    OfParam,
)
from hooktrain.solver.lr_multiplier import LRMultiplier as LRMultiplier  # its first home
from hooktrain.solver.one_cycle import OneCycleCurve
from hooktrain.solver.param_curves import (
    ConstantCurve,
    CosineAnnealingCurve,
    CosineRestartCurve,
    Curve,
    ExponentialCurve,
    LinearCurve,
    MultiStepCurve,
    PolyCurve,
    StepCurve,
)
from hooktrain.solver.plateau import PlateauScheduler, ReduceOnPlateau
from hooktrain.utils.registries import PARAM_SCHEDULERS

_ParamScheduler = GroupParamScheduler  # MMEngine's name


@dataclass(eq=False)
class ConstantParamScheduler(CurveScheduler, ConstantCurve, OfParam):
    """Any parameter of the groups by a constant factor."""


@dataclass(eq=False)
class ConstantLR(CurveScheduler, ConstantCurve, OfLR):
    """The learning rate by a constant factor."""


@dataclass(eq=False)
class ConstantMomentum(CurveScheduler, ConstantCurve, OfMomentum):
    """The momentum by a constant factor."""


@dataclass(eq=False)
class LinearParamScheduler(CurveScheduler, LinearCurve, OfParam):
    """Any parameter of the groups by a line."""


@dataclass(eq=False)
class LinearLR(CurveScheduler, LinearCurve, OfLR):
    """The learning rate by a line."""


@dataclass(eq=False)
class LinearMomentum(CurveScheduler, LinearCurve, OfMomentum):
    """The momentum by a line."""


@dataclass(eq=False)
class StepParamScheduler(CurveScheduler, StepCurve, OfParam):
    """Any parameter of the groups by equal steps."""


@dataclass(eq=False)
class StepLR(CurveScheduler, StepCurve, OfLR):
    """The learning rate by equal steps."""


@dataclass(eq=False)
class StepMomentum(CurveScheduler, StepCurve, OfMomentum):
    """The momentum by equal steps."""


@dataclass(eq=False)
class MultiStepParamScheduler(CurveScheduler, LastStepFirst, MultiStepCurve, OfParam):
    """Any parameter of the groups by milestones."""


@dataclass(eq=False)
class MultiStepLR(CurveScheduler, LastStepFirst, MultiStepCurve, OfLR):
    """The learning rate by milestones."""


@dataclass(eq=False)
class MultiStepMomentum(CurveScheduler, LastStepFirst, MultiStepCurve, OfMomentum):
    """The momentum by milestones."""


@dataclass(eq=False)
class ExponentialParamScheduler(CurveScheduler, ExponentialCurve, OfParam):
    """Any parameter of the groups by an exponential."""


@dataclass(eq=False)
class ExponentialLR(CurveScheduler, ExponentialCurve, OfLR):
    """The learning rate by an exponential."""


@dataclass(eq=False)
class ExponentialMomentum(CurveScheduler, ExponentialCurve, OfMomentum):
    """The momentum by an exponential."""


@dataclass(eq=False)
class CosineAnnealingParamScheduler(CurveScheduler, CosineAnnealingCurve, OfParam):
    """Any parameter of the groups by half of a cosine."""


@dataclass(eq=False)
class CosineAnnealingLR(CurveScheduler, CosineAnnealingCurve, OfLR):
    """The learning rate by half of a cosine."""


@dataclass(eq=False)
class CosineAnnealingMomentum(CurveScheduler, CosineAnnealingCurve, OfMomentum):
    """The momentum by half of a cosine."""


@dataclass(eq=False)
class PolyParamScheduler(CurveScheduler, PolyCurve, OfParam):
    """Any parameter of the groups by a polynomial."""


@dataclass(eq=False)
class PolyLR(CurveScheduler, PolyCurve, OfLR):
    """The learning rate by a polynomial."""


@dataclass(eq=False)
class PolyMomentum(CurveScheduler, PolyCurve, OfMomentum):
    """The momentum by a polynomial."""


@dataclass(eq=False)
class CosineRestartParamScheduler(CurveScheduler, CosineRestartCurve, OfParam):
    """Any parameter of the groups by a cosine with restarts."""


@dataclass(eq=False)
class CosineRestartLR(CurveScheduler, CosineRestartCurve, OfLR):
    """The learning rate by a cosine with restarts."""


@dataclass(eq=False)
class CosineRestartMomentum(CurveScheduler, CosineRestartCurve, OfMomentum):
    """The momentum by a cosine with restarts."""


@dataclass(eq=False)
class OneCycleParamScheduler(CurveScheduler, OneCycleCurve, OfParam):
    """Any parameter of the groups by the 1cycle policy."""


@dataclass(eq=False)
class OneCycleLR(CurveScheduler, OneCycleCurve, OfLR):
    """The learning rate by the 1cycle policy."""


@dataclass(eq=False)
class ReduceOnPlateauParamScheduler(PlateauScheduler, OfParam):
    """Any parameter of the groups, reduced when a metric no longer improves."""


@dataclass(eq=False)
class ReduceOnPlateauLR(PlateauScheduler, OfLR):
    """The learning rate, reduced when a metric no longer improves."""


@dataclass(eq=False)
class ReduceOnPlateauMomentum(PlateauScheduler, OfMomentum):
    """The momentum, reduced when a metric no longer improves."""


def _complete_docstring(scheduler: type[GroupParamScheduler]) -> None:
    """Add what the curve and the range say about themselves and their arguments."""
    curve = next(
        part
        for part in scheduler.__mro__
        if issubclass(part, Curve | ReduceOnPlateau) and not issubclass(part, GroupParamScheduler)
    )
    docs = [inspect.getdoc(part) or "" for part in (scheduler, curve, GroupParamScheduler)]
    scheduler.__doc__ = "\n\n".join(docs)


for _scheduler in [*globals().values()]:
    if isinstance(_scheduler, type) and _scheduler.__module__ == __name__:
        _complete_docstring(_scheduler)
        PARAM_SCHEDULERS.register(_scheduler)
