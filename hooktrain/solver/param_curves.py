"""The curves of the parameter schedulers: pure functions of the number of steps.

A curve says which share ``g(k)`` of a value is left at step ``k``, counted from 0 where the range
of its scheduler begins: ``value = floor + (base - floor) * g(k)``. Here is only that; the classes
of ``group_scheduler.py`` apply it to the parameter groups of an optimizer. Arguments and values are
those of ``mmengine.optim.scheduler``.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar

Limits = tuple[float, float]
AT_LEAST_0: Limits = (0, math.inf)
AT_LEAST_1: Limits = (1, math.inf)


@dataclass(eq=False)
class Curve:
    """A function of the step ``k``; a subclass defines :meth:`share`.

    Attributes:
        LIMITS: the least and the greatest value of arguments, by name.
        STEP_ARGUMENTS: the arguments that count steps. They are multiplied by the length of an
            epoch where epochs become iterations.
        LENGTH_ARGUMENTS: the arguments of which one must be given for the curve to know where it
            ends; empty for a curve that needs no end.
    """

    LIMITS: ClassVar[dict[str, Limits]] = {}
    STEP_ARGUMENTS: ClassVar[tuple[str, ...]] = ()
    LENGTH_ARGUMENTS: ClassVar[tuple[str, ...]] = ()

    def share(self, k: int, length: int) -> float:
        """``g(k)`` for ``k`` in [0, ``length``), where ``length`` is that of the range."""
        raise NotImplementedError(f"{type(self).__name__} must define share(k, length)")

    def floor(self, initial: float) -> float:
        """The value where ``g(k)`` is 0, for a group whose value was ``initial`` at first."""
        return 0.0

    def restart(self, k: int, group: int, initial: float) -> float | None:
        """The base that a group begins anew with at step ``k``; None goes on from its value."""
        return None

    def check(self, groups: int) -> None:
        """Refuse impossible arguments, for an optimizer with so many parameter groups.

        Raises:
            ValueError: for an argument out of range.
        """
        for name, (low, high) in self.LIMITS.items():
            value = getattr(self, name)
            for number in value if isinstance(value, Sequence) else [value]:
                if number is not None and not low <= number <= high:
                    raise ValueError(f"{name} must lie in [{low}, {high}]: {value!r}")
        self.floor(0.0)  # refuses two of them


@dataclass(eq=False)
class ConstantCurve(Curve):
    """``factor`` until the last step of the range, which has 1.

    Args:
        factor: in [0, 1].

    >>> [ConstantCurve(factor=0.5).share(k, length=4) for k in range(4)]
    [0.5, 0.5, 0.5, 1.0]
    """

    LIMITS: ClassVar[dict[str, Limits]] = {"factor": (0, 1)}

    factor: float = 1.0 / 3

    def share(self, k: int, length: int) -> float:
        """``g(k)``; a range of one step has the factor."""
        return 1.0 if 0 < k == length - 1 else self.factor


@dataclass(eq=False)
class LinearCurve(Curve):
    """A line from ``start_factor`` to ``end_factor``, which the last step of the range has.

    Args:
        start_factor: in [0, 1].
        end_factor: in [0, 1].

    >>> [LinearCurve(start_factor=0.25).share(k, length=4) for k in range(4)]
    [0.25, 0.5, 0.75, 1.0]
    """

    LIMITS: ClassVar[dict[str, Limits]] = {"start_factor": (0, 1), "end_factor": (0, 1)}
    LENGTH_ARGUMENTS: ClassVar[tuple[str, ...]] = ("end",)

    start_factor: float = 1.0 / 3
    end_factor: float = 1.0

    def share(self, k: int, length: int) -> float:
        """``g(k)``; a range of one step has ``start_factor``."""
        where = k / max(length - 1, 1)
        return self.start_factor * (1 - where) + self.end_factor * where


@dataclass(eq=False)
class StepCurve(Curve):
    """``gamma ** (k // step_size)``.

    Args:
        step_size: at least 1.
        gamma: not negative.

    >>> [StepCurve(step_size=2, gamma=0.5).share(k, length=100) for k in range(5)]
    [1.0, 1.0, 0.5, 0.5, 0.25]
    """

    LIMITS: ClassVar[dict[str, Limits]] = {"step_size": AT_LEAST_1, "gamma": AT_LEAST_0}
    STEP_ARGUMENTS: ClassVar[tuple[str, ...]] = ("step_size",)

    step_size: int
    gamma: float = 0.1

    def share(self, k: int, length: int) -> float:
        """``g(k)``."""
        return float(self.gamma ** (k // self.step_size))


@dataclass(eq=False)
class MultiStepCurve(Curve):
    """``gamma`` to the power of the number of milestones up to ``k``.

    Args:
        milestones: steps in any order, not negative. One that is there twice counts twice.
        gamma: not negative.

    >>> [MultiStepCurve(milestones=[1, 3], gamma=0.5).share(k, length=100) for k in range(5)]
    [1.0, 0.5, 0.5, 0.25, 0.25]
    """

    LIMITS: ClassVar[dict[str, Limits]] = {"milestones": AT_LEAST_0, "gamma": AT_LEAST_0}
    STEP_ARGUMENTS: ClassVar[tuple[str, ...]] = ("milestones",)

    milestones: Sequence[int]
    gamma: float = 0.1

    def share(self, k: int, length: int) -> float:
        """``g(k)``."""
        return float(self.gamma ** sum(milestone <= k for milestone in self.milestones))


@dataclass(eq=False)
class ExponentialCurve(Curve):
    """``gamma ** k``.

    Args:
        gamma: not negative.

    >>> [ExponentialCurve(gamma=0.5).share(k, length=100) for k in range(3)]
    [1.0, 0.5, 0.25]
    """

    LIMITS: ClassVar[dict[str, Limits]] = {"gamma": AT_LEAST_0}

    gamma: float

    def share(self, k: int, length: int) -> float:
        """``g(k)``."""
        return float(self.gamma**k)


@dataclass(eq=False)
class CosineAnnealingCurve(Curve):
    """``(1 + cos(pi * k / T_max)) / 2``, which rises again after ``T_max``.

    Half of a cosine (Loshchilov and Hutter, SGDR, arXiv:1608.03983), without its restarts.

    Args:
        T_max: steps until the floor, at least 1. None takes the length of the range.
        eta_min: the floor. None means 0, unless ``eta_min_ratio`` is given.
        eta_min_ratio: the floor as a share of the group's initial value. At most one of the two.

    >>> [round(CosineAnnealingCurve(T_max=2).share(k, length=100), 9) for k in range(5)]
    [1.0, 0.5, 0.0, 0.5, 1.0]
    """

    LIMITS: ClassVar[dict[str, Limits]] = {"T_max": AT_LEAST_1}
    STEP_ARGUMENTS: ClassVar[tuple[str, ...]] = ("T_max",)
    LENGTH_ARGUMENTS: ClassVar[tuple[str, ...]] = ("end", "T_max")

    T_max: int | None = None
    eta_min: float | None = None
    eta_min_ratio: float | None = field(default=None, kw_only=True)

    def share(self, k: int, length: int) -> float:
        """``g(k)``."""
        return _half_cosine(k / (self.T_max or length))

    def floor(self, initial: float) -> float:
        """``eta_min``, or the ratio of ``initial``."""
        return _floor(initial, self.eta_min, self.eta_min_ratio)


@dataclass(eq=False)
class PolyCurve(Curve):
    """``(1 - k / T) ** power``, where ``T`` is the last step of the range.

    Args:
        eta_min: the floor.
        power: not negative.

    >>> [PolyCurve(power=2).share(k, length=5) for k in range(5)]
    [1.0, 0.5625, 0.25, 0.0625, 0.0]
    """

    LIMITS: ClassVar[dict[str, Limits]] = {"power": AT_LEAST_0}
    LENGTH_ARGUMENTS: ClassVar[tuple[str, ...]] = ("end",)

    eta_min: float = 0
    power: float = 1.0

    def share(self, k: int, length: int) -> float:
        """``g(k)``; a range of one step has 1."""
        return float((1 - k / max(length - 1, 1)) ** self.power)

    def floor(self, initial: float) -> float:
        """``eta_min``."""
        return self.eta_min


@dataclass(eq=False)
class CosineRestartCurve(Curve):
    """Half of a cosine in each period, which begins anew with the initial value.

    After the last period the value stays. The restarts of Loshchilov and Hutter (SGDR,
    arXiv:1608.03983).

    Args:
        periods: the lengths of the periods in steps, each at least 1.
        restart_weights: for each period, the share of the initial value that it begins with.
        eta_min: the floor. None means 0, unless ``eta_min_ratio`` is given.
        eta_min_ratio: the floor as a share of the group's initial value. At most one of the two.

    >>> curve = CosineRestartCurve(periods=[2, 3], restart_weights=[1, 0.5])
    >>> [round(curve.share(k, length=100), 9) for k in range(6)]
    [1.0, 0.5, 1.0, 0.75, 0.25, 0.25]
    """

    LIMITS: ClassVar[dict[str, Limits]] = {"periods": AT_LEAST_1}
    STEP_ARGUMENTS: ClassVar[tuple[str, ...]] = ("periods",)

    periods: Sequence[int]
    restart_weights: Sequence[float] = (1,)
    eta_min: float | None = None
    eta_min_ratio: float | None = None

    def share(self, k: int, length: int) -> float:
        """``g(k)``."""
        starts = self._starts()
        k = min(k, starts[-1] - 1)
        period = bisect_right(starts, k) - 1
        return _half_cosine((k - starts[period]) / self.periods[period])

    def floor(self, initial: float) -> float:
        """``eta_min``, or the ratio of ``initial``."""
        return _floor(initial, self.eta_min, self.eta_min_ratio)

    def restart(self, k: int, group: int, initial: float) -> float | None:
        """Where a period begins, its weight times ``initial``."""
        starts = self._starts()[:-1]
        return initial * self.restart_weights[starts.index(k)] if k in starts else None

    def check(self, groups: int) -> None:
        """Also refuse other numbers of periods and weights."""
        super().check(groups)
        if not 0 < len(self.periods) == len(self.restart_weights):
            raise ValueError(
                f"periods must be at least one, and restart_weights as many: {self.periods!r} and "
                f"{self.restart_weights!r}"
            )

    def _starts(self) -> list[int]:
        """The first step of each period, and of what comes after the last one."""
        return [*accumulate(self.periods, initial=0)]


def _half_cosine(where: float) -> float:
    return (1 + math.cos(math.pi * where)) / 2


def _floor(initial: float, eta_min: float | None, eta_min_ratio: float | None) -> float:
    if eta_min is None:
        return initial * (eta_min_ratio or 0.0)
    if eta_min_ratio is not None:
        raise ValueError(f"give eta_min={eta_min!r} or eta_min_ratio={eta_min_ratio!r}, not both")
    return eta_min
