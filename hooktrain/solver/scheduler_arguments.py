"""The arguments of a scheduler: those that the functions in its row take by keyword."""

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from hooktrain.solver.group_values import HasParamGroups
from hooktrain.solver.param_curves import RANGE, Curve
from hooktrain.utils.registry import did_you_mean


@cache
def keywords(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The arguments that a function takes by keyword only."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}


def curve_arguments(curve: Curve) -> dict[str, inspect.Parameter]:
    """The arguments of a curve."""
    return keywords(curve.restart) | keywords(curve.function) | keywords(curve.floor)


def signature_of(curve: Curve, param_name: str | None) -> inspect.Signature:
    """The signature of a scheduler; without a ``param_name`` of its own it takes one."""
    by_position = inspect.Parameter.POSITIONAL_OR_KEYWORD
    first = [inspect.Parameter("optimizer", by_position, annotation=HasParamGroups)]
    if param_name is None:
        first.append(inspect.Parameter("param_name", by_position, annotation=str))
    known = {n: p.replace(kind=by_position) for n, p in curve_arguments(curve).items()}
    for name, default in RANGE.items():
        known[name] = inspect.Parameter(
            name, by_position, default=default, annotation=type(default)
        )
    names = dict.fromkeys([*curve.order, *known])
    return inspect.Signature([*first, *(known[name] for name in names)])


def bind(scheduler: type, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, without those that are not given.

    Raises:
        TypeError: if they do not fit the signature; for an unknown name, with the nearest one.
    """
    signature = inspect.signature(scheduler)
    try:
        return signature.bind(*args, **kwargs).arguments
    except TypeError as err:
        unknown = [name for name in kwargs if name not in signature.parameters]
        hint = did_you_mean(unknown[0], signature.parameters) if unknown else ""
        raise TypeError(f"{scheduler.__name__}: {err}{hint}") from None


def check_limits(curve: Curve, arguments: dict[str, Any], groups: int) -> None:
    """Refuse what the row of the table excludes, for so many parameter groups.

    Raises:
        ValueError: for an argument out of range, or not one for each group.
    """
    for name, (low, high) in curve.limits.items():
        value = arguments[name]
        for number in value if isinstance(value, Sequence) else [value]:
            if number is not None and not low <= number <= high:
                raise ValueError(f"{name} must lie in [{low}, {high}]: {value!r}")
    for name in curve.per_group:
        value = arguments[name]
        if isinstance(value, Sequence) and len(value) != groups:
            raise ValueError(
                f"{name} must be a number or one for each of the {groups} parameter groups: "
                f"{value!r}"
            )
