"""Schedulers of the parameters of an optimizer's groups, by MMEngine's names.

Each applies a row of the table in ``param_curves.py`` to one parameter. Several of them on one
optimizer, stepped in order, compose: one range after the other chains, overlapping ranges multiply,
and in a gap the value stays::

    schedulers = [
        LinearLR(optimizer, start_factor=0.001, by_epoch=False, begin=0, end=500),
        CosineAnnealingLR(optimizer, by_epoch=False, begin=500, end=10_000),
    ]
    for scheduler in schedulers:  # after each iteration
        scheduler.step()

A curve of your own is a function; :func:`make_scheduler` makes a scheduler of it.

Five of the names for any parameter, such as :data:`LinearParamScheduler`, are also those of pure
functions in ``schedule.py``. ``hooktrain.solver`` exports these; import those here from here.
"""

import inspect
from typing import Any, TypeVar, cast

from hooktrain.solver.group_scheduler import GroupParamScheduler
from hooktrain.solver.lr_multiplier import LRMultiplier as LRMultiplier  # its first home
from hooktrain.solver.param_curves import CURVES, Curve
from hooktrain.solver.plateau import PLATEAU, PlateauScheduler
from hooktrain.solver.scheduler_arguments import curve_arguments, keywords, signature_of
from hooktrain.utils.registry import PARAM_SCHEDULERS

S = TypeVar("S", bound=GroupParamScheduler)

_ParamScheduler = GroupParamScheduler  # MMEngine's name

# The parameter that the end of a name stands for. "momentum" is also the first of Adam's betas.
_PARAMETERS = {"LR": "lr", "Momentum": "momentum", "ParamScheduler": None}


def make_scheduler(
    name: str, curve: Curve, param_name: str | None = None, *, module: str = __name__
) -> type[GroupParamScheduler]:
    """The class of a scheduler that applies a curve.

    Example::

        def saw_tooth(k, length, *, period):
            return 1 - (k % period) / period

        SawToothLR = make_scheduler("SawToothLR", Curve(saw_tooth), "lr", module=__name__)
        PARAM_SCHEDULERS.register(SawToothLR)  # for configurations

        SawToothLR(optimizer, period=10, end=100)

    Args:
        name: the name of the class, that of the variable which it is assigned to.
        curve: the curve, and what is to be known of its arguments.
        param_name: what the groups call the parameter, such as ``"lr"``. None makes it an argument
            of the scheduler.
        module: the ``__name__`` of the module where the class can be imported from.

    Raises:
        TypeError: if the function of the curve is not one of ``k`` and ``length``, with all other
            arguments by keyword only.
        ValueError: if an argument of the curve has the name of something else.
    """
    if len(inspect.signature(curve.function).parameters) != 2 + len(keywords(curve.function)):
        raise TypeError(f"the curve must be a function(k, length, *, ...): {curve.function!r}")
    for argument in curve_arguments(curve):
        if argument in [*dir(GroupParamScheduler), *GroupParamScheduler.__annotations__]:
            raise ValueError(f"a scheduler has another {argument!r}: rename that of the curve")
    return _make(GroupParamScheduler, name, curve, param_name, module)


def _make(
    base: type[S], name: str, curve: Curve, param_name: str | None, module: str = __name__
) -> type[S]:
    what = f"Schedules {param_name or 'param_name'!r} of the parameter groups."
    docs = [what, inspect.getdoc(curve.function) or ""]
    docs += [inspect.getdoc(part) or "" for part in base.__mro__[:-1]]
    members: dict[str, Any] = {key: _argument(key) for key in curve_arguments(curve)}
    members |= {
        "__doc__": "\n\n".join(docs),
        "__module__": module,
        "__signature__": signature_of(curve, param_name),
        "curve": curve,
    }
    if param_name is not None:
        members["param_name"] = param_name
    return cast(type[S], type(name, (base,), members))


def _argument(name: str) -> property:
    return property(lambda scheduler: scheduler.arguments[name])


def _scheduler(family: str, form: str) -> type[GroupParamScheduler]:
    made = _make(GroupParamScheduler, family + form, CURVES[family], _PARAMETERS[form])
    PARAM_SCHEDULERS.register(made)
    return made


def _plateau(form: str) -> type[PlateauScheduler]:
    made = _make(PlateauScheduler, f"ReduceOnPlateau{form}", PLATEAU, _PARAMETERS[form])
    PARAM_SCHEDULERS.register(made)
    return made


ConstantLR = _scheduler("Constant", "LR")
ConstantMomentum = _scheduler("Constant", "Momentum")
ConstantParamScheduler = _scheduler("Constant", "ParamScheduler")

LinearLR = _scheduler("Linear", "LR")
LinearMomentum = _scheduler("Linear", "Momentum")
LinearParamScheduler = _scheduler("Linear", "ParamScheduler")

StepLR = _scheduler("Step", "LR")
StepMomentum = _scheduler("Step", "Momentum")
StepParamScheduler = _scheduler("Step", "ParamScheduler")

MultiStepLR = _scheduler("MultiStep", "LR")
MultiStepMomentum = _scheduler("MultiStep", "Momentum")
MultiStepParamScheduler = _scheduler("MultiStep", "ParamScheduler")

ExponentialLR = _scheduler("Exponential", "LR")
ExponentialMomentum = _scheduler("Exponential", "Momentum")
ExponentialParamScheduler = _scheduler("Exponential", "ParamScheduler")

CosineAnnealingLR = _scheduler("CosineAnnealing", "LR")
CosineAnnealingMomentum = _scheduler("CosineAnnealing", "Momentum")
CosineAnnealingParamScheduler = _scheduler("CosineAnnealing", "ParamScheduler")

PolyLR = _scheduler("Poly", "LR")
PolyMomentum = _scheduler("Poly", "Momentum")
PolyParamScheduler = _scheduler("Poly", "ParamScheduler")

CosineRestartLR = _scheduler("CosineRestart", "LR")
CosineRestartMomentum = _scheduler("CosineRestart", "Momentum")
CosineRestartParamScheduler = _scheduler("CosineRestart", "ParamScheduler")

OneCycleLR = _scheduler("OneCycle", "LR")
OneCycleParamScheduler = _scheduler("OneCycle", "ParamScheduler")

ReduceOnPlateauLR = _plateau("LR")
ReduceOnPlateauMomentum = _plateau("Momentum")
ReduceOnPlateauParamScheduler = _plateau("ParamScheduler")
