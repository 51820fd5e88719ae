"""Schedules: pure functions from the progress of a run to the value of a hyper-parameter.

The names, arguments and values are those of ``fvcore.common.param_scheduler``. Below, ``w`` is
the progress: 0 at the start of the run and 1 at its end. Schedules are immutable, compare by value
and can be pickled. Those made of other schedules stand in ``composite.py``.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

# A boundary between two values is reached a hair early, so that the rounding of `step / max_iter`
# never delays it. A run of 1e9 steps moves on by more than this, so it is never a step early.
ROUNDING = 1e-9


class ParamScheduler:
    """A function from the progress of a run, in [0, 1], to a value.

    Subclasses define ``_value_at(where)``, and get the check of the range for free; or they define
    ``__call__`` itself.

    Attributes:
        WHERE_EPSILON: how far outside of [0, 1] a progress may lie; it then counts as 0 or 1.
    """

    WHERE_EPSILON: ClassVar[float] = 1e-6

    def __call__(self, where: float) -> float:
        """The value at progress ``where``; 1.0 gives the final value.

        Raises:
            ValueError: ``where`` lies outside of [0, 1] by more than ``WHERE_EPSILON``, or is NaN.
        """
        if not 0.0 <= where <= 1.0:
            if not -self.WHERE_EPSILON <= where <= 1.0 + self.WHERE_EPSILON:
                raise ValueError(f"where must be in [0, 1], the progress of the run: {where!r}")
            where = min(max(where, 0.0), 1.0)
        return self._value_at(where)

    def _value_at(self, where: float) -> float:
        """The value at progress ``where``, which is known to lie in [0, 1]."""
        raise NotImplementedError(
            f"{type(self).__name__} must define _value_at(where) or __call__(where)"
        )


@dataclass(frozen=True)
class ConstantParamScheduler(ParamScheduler):
    """``value``, always.

    >>> ConstantParamScheduler(0.1)(0.7)
    0.1
    """

    value: float

    def _value_at(self, where: float) -> float:
        return self.value


@dataclass(frozen=True)
class CosineParamScheduler(ParamScheduler):
    """``end_value + (start_value - end_value) * (1 + cos(pi * w)) / 2``.

    Half a period of a cosine, without restarts (Loshchilov and Hutter, SGDR, arXiv:1608.03983).

    >>> schedule = CosineParamScheduler(start_value=1.0, end_value=0.0)
    >>> [round(schedule(w), 6) for w in (0.0, 0.25, 0.5, 1.0)]
    [1.0, 0.853553, 0.5, 0.0]
    """

    start_value: float
    end_value: float

    def _value_at(self, where: float) -> float:
        height = 0.5 * (self.start_value - self.end_value)
        return self.end_value + height * (1 + math.cos(math.pi * where))


@dataclass(frozen=True)
class ExponentialParamScheduler(ParamScheduler):
    """``start_value * decay ** w``, so the final value is ``start_value * decay``.

    Args:
        start_value: value at the start.
        decay: the factor of the whole run; not negative.

    >>> schedule = ExponentialParamScheduler(start_value=2.0, decay=0.25)
    >>> [schedule(w) for w in (0.0, 0.5, 1.0)]
    [2.0, 1.0, 0.5]
    """

    start_value: float
    decay: float

    def __post_init__(self) -> None:
        if not self.decay >= 0:
            raise ValueError(f"decay must not be negative: {self.decay!r}")

    def _value_at(self, where: float) -> float:
        return float(self.start_value * self.decay**where)


@dataclass(frozen=True)
class LinearParamScheduler(ParamScheduler):
    """``end_value * w + start_value * (1 - w)``.

    >>> schedule = LinearParamScheduler(start_value=0.0, end_value=0.4)
    >>> [schedule(w) for w in (0.0, 0.25, 1.0)]
    [0.0, 0.1, 0.4]
    """

    start_value: float
    end_value: float

    def _value_at(self, where: float) -> float:
        return self.end_value * where + self.start_value * (1 - where)


@dataclass(frozen=True)
class PolynomialDecayParamScheduler(ParamScheduler):
    """``base_value * (1 - w) ** power``, so the final value is 0.

    Args:
        base_value: value at the start.
        power: not negative.

    >>> schedule = PolynomialDecayParamScheduler(base_value=1.0, power=2)
    >>> [schedule(w) for w in (0.0, 0.5, 1.0)]
    [1.0, 0.25, 0.0]
    """

    base_value: float
    power: float

    def __post_init__(self) -> None:
        if not self.power >= 0:
            raise ValueError(f"power must not be negative: {self.power!r}")

    def _value_at(self, where: float) -> float:
        return float(self.base_value * (1 - where) ** self.power)


def _values(values: Sequence[float]) -> tuple[float, ...]:
    if not isinstance(values, Sequence) or not values:
        raise ValueError(f"values must be a list of at least one number: {values!r}")
    return tuple(values)


@dataclass(frozen=True)
class MultiStepParamScheduler(ParamScheduler):
    """``values[k]``, where ``k`` counts the milestones that ``w * num_updates`` has reached.

    Args:
        values: one more than there are milestones.
        num_updates: length of the run, in the unit of the milestones. By default the last
            milestone is the end of the run, and no boundary.
        milestones: increasing boundaries, in (0, num_updates). By default ``num_updates`` is
            split evenly, every part but the last rounded up.

    Only ratios count, so iterations, epochs and percent are all good units. One schedule, thrice:

    >>> schedule = MultiStepParamScheduler([1, 0.1, 0.01], num_updates=90, milestones=[30, 60])
    >>> schedule == MultiStepParamScheduler([1, 0.1, 0.01], milestones=[30, 60, 90])
    True
    >>> schedule == MultiStepParamScheduler([1, 0.1, 0.01], num_updates=90)
    True
    >>> [schedule(epoch / 90) for epoch in (0, 29, 30, 60, 90)]
    [1, 1, 0.1, 0.01, 0.01]
    """

    values: Sequence[float]
    num_updates: int | None = None
    milestones: Sequence[int] | None = None

    def __post_init__(self) -> None:
        values, milestones, end = _values(self.values), self.milestones, self.num_updates
        if milestones is None:
            if end is None:
                raise ValueError("one of num_updates and milestones must be given")
            width = math.ceil(end / len(values))
            milestones = [width * k for k in range(1, len(values))]
        elif not isinstance(milestones, Sequence):
            raise ValueError(f"milestones must be a list of numbers: {milestones!r}")
        wanted = len(values) if end is None else len(values) - 1
        if len(milestones) != wanted:
            raise ValueError(f"{len(values)} values need {wanted} milestones: {milestones!r}")
        if end is None:
            milestones, end = milestones[:-1], milestones[-1]
        if end < len(values):
            raise ValueError(f"num_updates must be at least {len(values)}, one a value: {end!r}")
        bounds = [0, *milestones, end]
        if any(left >= right for left, right in pairwise(bounds)):
            raise ValueError(
                f"milestones must increase, between 0 and num_updates={end!r}: {milestones!r}"
            )
        # The dataclass is frozen, which stops its own constructor too.
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "num_updates", end)
        object.__setattr__(self, "milestones", tuple(milestones))

    def _value_at(self, where: float) -> float:
        assert self.num_updates is not None
        assert self.milestones is not None
        reached = (where + ROUNDING) * self.num_updates
        return self.values[bisect_right(self.milestones, reached)]


@dataclass(frozen=True)
class StepParamScheduler(ParamScheduler):
    """``values[int(w * len(values))]``: each value for an equal share of the run.

    Args:
        num_updates: positive; kept for compatibility, has no influence.
        values: at least one.

    >>> schedule = StepParamScheduler(num_updates=120, values=[0.1, 0.01, 0.001, 0.0001])
    >>> [schedule(epoch / 120) for epoch in (0, 29, 30, 90, 120)]
    [0.1, 0.1, 0.01, 0.0001, 0.0001]
    """

    num_updates: float
    values: Sequence[float]

    def __post_init__(self) -> None:
        if not self.num_updates > 0:
            raise ValueError(f"num_updates must be positive: {self.num_updates!r}")
        object.__setattr__(self, "values", _values(self.values))

    def _value_at(self, where: float) -> float:
        index = int((where + ROUNDING) * len(self.values))
        return self.values[min(index, len(self.values) - 1)]


@dataclass(frozen=True)
class StepWithFixedGammaParamScheduler(ParamScheduler):
    """``base_value * gamma ** int(w * (num_decays + 1))``, at most ``num_decays`` decays.

    Args:
        base_value: positive.
        num_decays: positive; the run has one more part than decays, all of equal length.
        gamma: positive.
        num_updates: positive; kept for compatibility, has no influence.

    >>> schedule = StepWithFixedGammaParamScheduler(1.0, num_decays=2, gamma=0.5, num_updates=90)
    >>> [schedule(epoch / 90) for epoch in (0, 29, 30, 60, 90)]
    [1.0, 1.0, 0.5, 0.25, 0.25]
    """

    base_value: float
    num_decays: int
    gamma: float
    num_updates: int

    def __post_init__(self) -> None:
        for name in ("base_value", "num_decays", "gamma", "num_updates"):
            value = getattr(self, name)
            whole = name.startswith("num_")
            if not (isinstance(value, int if whole else int | float) and value > 0):
                raise ValueError(
                    f"{name} must be a positive {'integer' if whole else 'number'}: {value!r}"
                )

    def _value_at(self, where: float) -> float:
        decays = int((where + ROUNDING) * (self.num_decays + 1))
        return float(self.base_value * self.gamma ** min(decays, self.num_decays))
