"""The curves of the parameter schedulers: a table of pure functions of the number of steps.

A curve says which share ``g(k)`` of a value is left at step ``k``, counted from 0 where the range
of its scheduler begins, which has ``length`` steps: ``value = floor + (base - floor) * g(k)``. A
function refuses impossible arguments that the limits in the table do not name. Arguments and values
are those of ``mmengine.optim.scheduler``. ``group_scheduler.py`` applies the curves,
and ``param_scheduler.py`` names what comes of it.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Literal


def constant(k: int, length: int, *, factor: float = 1.0 / 3) -> float:
    """``factor``, in [0, 1], until the last step of the range, which has 1.

    >>> [constant(k, 4, factor=0.5) for k in range(4)]
    [0.5, 0.5, 0.5, 1.0]
    """
    return 1.0 if 0 < k == length - 1 else factor


def linear(k: int, length: int, *, start_factor: float = 1.0 / 3, end_factor: float = 1.0) -> float:
    """A line from ``start_factor`` to ``end_factor`` at the last step of the range; in [0, 1].

    >>> [linear(k, 4, start_factor=0.25) for k in range(4)]
    [0.25, 0.5, 0.75, 1.0]
    """
    where = k / max(length - 1, 1)
    return start_factor * (1 - where) + end_factor * where


def step(k: int, length: int, *, step_size: int, gamma: float = 0.1) -> float:
    """``gamma ** (k // step_size)``.

    >>> [step(k, 5, step_size=2, gamma=0.5) for k in range(5)]
    [1.0, 1.0, 0.5, 0.5, 0.25]
    """
    return float(gamma ** (k // step_size))


def multi_step(k: int, length: int, *, milestones: Sequence[int], gamma: float = 0.1) -> float:
    """``gamma ** n`` after ``n`` milestones, in any order; one that is there twice counts twice.

    >>> [multi_step(k, 5, milestones=[1, 3], gamma=0.5) for k in range(5)]
    [1.0, 0.5, 0.5, 0.25, 0.25]
    """
    return float(gamma ** sum(milestone <= k for milestone in milestones))


def exponential(k: int, length: int, *, gamma: float) -> float:
    """``gamma ** k``.

    >>> [exponential(k, 3, gamma=0.5) for k in range(3)]
    [1.0, 0.5, 0.25]
    """
    return float(gamma**k)


def cosine_annealing(k: int, length: int, *, T_max: int | None = None) -> float:  # noqa: N803
    """``(1 + cos(pi * k / T_max)) / 2``, which rises again after ``T_max``, the length by default.

    The floor is ``eta_min``, or ``eta_min_ratio`` times the initial value; 0 by default. Loshchilov
    and Hutter (SGDR, arXiv:1608.03983), without the restarts.

    >>> [round(cosine_annealing(k, 3, T_max=2), 9) for k in range(5)]
    [1.0, 0.5, 0.0, 0.5, 1.0]
    """
    return (1 + math.cos(math.pi * (k / (T_max or length)))) / 2


def poly(k: int, length: int, *, power: float = 1.0) -> float:
    """``(1 - k / T) ** power``, where ``T`` is the last step of the range. The floor: ``eta_min``.

    >>> [poly(k, 5, power=2) for k in range(5)]
    [1.0, 0.5625, 0.25, 0.0625, 0.0]
    """
    return float((1 - k / max(length - 1, 1)) ** power)


def cosine_restart(k: int, length: int, *, periods: Sequence[int]) -> float:
    """:func:`cosine_annealing` in each of the ``periods``, whose lengths in steps are given.

    Each begins with its share in ``restart_weights`` of the initial value. After the last one the
    value stays. Loshchilov and Hutter (SGDR, arXiv:1608.03983).

    >>> [round(cosine_restart(k, 9, periods=[2, 4]), 9) for k in (0, 1, 2, 4, 6)]
    [1.0, 0.5, 1.0, 0.5, 0.146446609]
    """
    starts = [*accumulate(periods, initial=0)]
    k = min(k, starts[-1] - 1)
    period = bisect_right(starts, k) - 1
    return cosine_annealing(k - starts[period], length, T_max=periods[period])


def one_cycle(
    k: int,
    length: int,
    *,
    total_steps: int | None = None,
    pct_start: float = 0.3,
    anneal_strategy: Literal["cos", "linear"] = "cos",
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
    three_phase: bool = False,
) -> float:
    """From ``1 / div_factor`` up to 1 in ``pct_start * total_steps``, then down to the final value.

    The base is ``eta_max``, or one for each parameter group: it overwrites what others do to the
    values. The final value is the first one divided by ``final_div_factor``; with ``three_phase``,
    it goes down to the first value in between. ``total_steps``, by default the length, are those of
    a loop that steps after each iteration; one more raises ValueError. ``anneal_strategy`` is
    ``"cos"`` or ``"linear"``. Smith and Topin (Super-Convergence, arXiv:1708.07120).

    >>> line = {"anneal_strategy": "linear", "div_factor": 5, "final_div_factor": 2}
    >>> [round(one_cycle(k, 6, pct_start=0.5, **line), 9) for k in range(6)]
    [0.2, 0.6, 1.0, 0.7, 0.4, 0.1]
    """
    if anneal_strategy not in ("cos", "linear"):
        raise ValueError(f"anneal_strategy must be 'cos' or 'linear': {anneal_strategy!r}")
    if not (div_factor > 0 and final_div_factor > 0):
        raise ValueError(
            f"div_factor and final_div_factor must be greater than 0: {div_factor!r} and "
            f"{final_div_factor!r}"
        )
    total = total_steps or length
    if k > total:
        raise ValueError(f"the cycle has total_steps={total!r}, and this is step {k}")
    low, peak = 1 / div_factor, pct_start * total - 1
    corners = [(0.0, low), (peak, 1.0), (total - 1, low / final_div_factor)]
    if three_phase:
        corners.insert(2, (2 * peak, low))
    for (start, first), (end, last) in pairwise(corners):
        if k <= end:
            where = (k - start) / (end - start) if end > start else 1.0
            if anneal_strategy == "cos":
                where = (1 - math.cos(math.pi * where)) / 2
            return first * (1 - where) + last * where
    return corners[-1][1]


# The floors: the value where g(k) is 0, for a group whose value was initial at first.


def zero(initial: float) -> float:
    """No floor."""
    return 0.0


def eta_min(initial: float, *, eta_min: float = 0) -> float:
    """A floor that is given."""
    return eta_min


def eta_min_or_ratio(
    initial: float, *, eta_min: float | None = None, eta_min_ratio: float | None = None
) -> float:
    """A floor that is given, or a share of the initial value."""
    if eta_min is None:
        return initial * (eta_min_ratio or 0.0)
    if eta_min_ratio is not None:
        raise ValueError(f"give eta_min={eta_min!r} or eta_min_ratio={eta_min_ratio!r}, not both")
    return eta_min


# The restarts: the base that a group begins anew with at step k; None goes on from its value.


def never(k: int, group: int, initial: float) -> None:
    """No restarts."""


def each_period(
    k: int,
    group: int,
    initial: float,
    *,
    periods: Sequence[int],
    restart_weights: Sequence[float] = (1,),
) -> float | None:
    """Where a period begins, its weight times the initial value."""
    if not 0 < len(periods) == len(restart_weights):
        raise ValueError(
            f"periods must be at least one, and restart_weights as many: {periods!r} and "
            f"{restart_weights!r}"
        )
    starts = [*accumulate(periods[:-1], initial=0)]
    return initial * restart_weights[starts.index(k)] if k in starts else None


def at_maximum(k: int, group: int, initial: float, *, eta_max: float | Sequence[float]) -> float:
    """Always the maximum."""
    return of_group(eta_max, group)


def of_group(value: float | Sequence[float], group: int) -> float:
    """A group's own, of a number or one for each; the last for settings beside the groups."""
    return value[min(group, len(value) - 1)] if isinstance(value, Sequence) else value


INF = 10**9  # The end of a range without one.

# The arguments that every scheduler has beside those of its curve.
RANGE = {"begin": 0, "end": INF, "last_step": -1, "by_epoch": True, "verbose": False}

Limits = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """A row of the table. The keyword arguments of its functions are those of its schedulers.

    Attributes:
        function: ``g(k, length, *, ...)``, with all arguments of its own by keyword only.
        limits: the least and the greatest value of arguments, or of the numbers in them, by name.
        step_arguments: the arguments that count steps. They are multiplied by the length of an
            epoch where epochs become iterations.
        length_arguments: the arguments of which one must be given for the curve to know where it
            ends; empty for a curve that needs no end.
        floor: ``floor(initial, *, ...)``.
        restart: ``restart(k, group, initial, *, ...)``.
        per_group: the arguments that are a number, or one for each parameter group.
        order: the arguments that come first by position. The others follow: those of the restart,
            of the function, of the floor, and the range.
    """

    function: Callable[..., float]
    limits: Mapping[str, Limits] = field(default_factory=dict)
    step_arguments: Sequence[str] = ()
    length_arguments: Sequence[str] = ()
    floor: Callable[..., float] = zero
    restart: Callable[..., float | None] = never
    per_group: Sequence[str] = ()
    order: Sequence[str] = ()


SHARE, AT_LEAST_0, AT_LEAST_1 = (0, 1), (0, math.inf), (1, math.inf)

CURVES = {
    "Constant": Curve(constant, {"factor": SHARE}),
    "Linear": Curve(linear, {"start_factor": SHARE, "end_factor": SHARE}, length_arguments=["end"]),
    "Step": Curve(
        step, {"step_size": AT_LEAST_1, "gamma": AT_LEAST_0}, step_arguments=["step_size"]
    ),
    "MultiStep": Curve(
        multi_step,
        {"milestones": AT_LEAST_0, "gamma": AT_LEAST_0},
        step_arguments=["milestones"],
        order=["milestones", "gamma", "last_step"],
    ),
    "Exponential": Curve(exponential, {"gamma": AT_LEAST_0}),
    "CosineAnnealing": Curve(
        cosine_annealing,
        {"T_max": AT_LEAST_1},
        step_arguments=["T_max"],
        length_arguments=["end", "T_max"],
        floor=eta_min_or_ratio,
        order=["T_max", "eta_min", *RANGE],
    ),
    "Poly": Curve(
        poly,
        {"power": AT_LEAST_0},
        length_arguments=["end"],
        floor=eta_min,
        order=["eta_min", "power"],
    ),
    "CosineRestart": Curve(
        cosine_restart,
        {"periods": AT_LEAST_1},
        step_arguments=["periods"],
        floor=eta_min_or_ratio,
        restart=each_period,
    ),
    "OneCycle": Curve(
        one_cycle,
        {"total_steps": AT_LEAST_1, "pct_start": SHARE},
        step_arguments=["total_steps"],
        length_arguments=["end", "total_steps"],
        restart=at_maximum,
        per_group=["eta_max"],
    ),
}
"""The curves by MMEngine's names."""
