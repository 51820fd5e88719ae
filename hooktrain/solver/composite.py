"""Schedules made of other schedules: one after another, and after a warm-up."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from hooktrain.solver.schedule import ROUNDING, ParamScheduler


def check_is_schedule(name: str, value: object) -> None:
    """Raise a ``TypeError`` unless the argument called ``name`` is a :class:`ParamScheduler`."""
    if not isinstance(value, ParamScheduler):
        raise TypeError(f"{name} must be a ParamScheduler, a function of progress: {value!r}")


@dataclass(frozen=True)
class CompositeParamScheduler(ParamScheduler):
    """``schedulers`` one after another, the k-th for the share ``lengths[k]`` of the run.

    Args:
        schedulers: at least one.
        lengths: shares of the run, not negative. They sum to 1 within 1e-3, and the last one is
            then corrected. A schedule of length 0 is never used.
        interval_scaling: for each schedule "rescaled", to run through it from 0 to 1 within its
            share, or "fixed", to evaluate it at the progress of the whole run.

    >>> from hooktrain.solver.schedule import LinearParamScheduler
    >>> warm, cool = LinearParamScheduler(0.0, 1.0), LinearParamScheduler(1.0, 0.0)
    >>> schedule = CompositeParamScheduler([warm, cool], [0.25, 0.75], ["rescaled", "fixed"])
    >>> [schedule(w) for w in (0.0, 0.125, 0.25, 0.5, 1.0)]
    [0.0, 0.5, 0.75, 0.5, 0.0]
    """

    schedulers: Sequence[ParamScheduler]
    lengths: Sequence[float]
    interval_scaling: Sequence[str]
    _ends: Sequence[float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        schedulers, lengths = tuple(self.schedulers), tuple(self.lengths)
        scalings = tuple(self.interval_scaling)
        if not len(schedulers) == len(lengths) == len(scalings) > 0:
            raise ValueError(
                "schedulers, lengths and interval_scaling must be lists of one length, at least 1: "
                f"{len(schedulers)}, {len(lengths)} and {len(scalings)} entries"
            )
        for scheduler in schedulers:
            check_is_schedule("schedulers", scheduler)
        if not abs(sum(lengths) - 1) < 1e-3 or min(lengths) < 0:
            raise ValueError(f"lengths must not be negative, and sum to 1: {self.lengths!r}")
        if set(scalings) - {"rescaled", "fixed"}:
            raise ValueError(f"interval_scaling must be 'rescaled' or 'fixed': {scalings!r}")
        lengths = (*lengths[:-1], max(0.0, 1.0 - sum(lengths[:-1])))
        ends = tuple(end if end < 1 - ROUNDING else 1.0 for end in accumulate(lengths))
        # The dataclass is frozen, which stops its own constructor too.
        object.__setattr__(self, "schedulers", schedulers)
        object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "interval_scaling", scalings)
        object.__setattr__(self, "_ends", ends)

    def _value_at(self, where: float) -> float:
        k = bisect_left(self._ends, min(where + ROUNDING, 1.0))
        if self.interval_scaling[k] == "rescaled":
            start = self._ends[k - 1] if k else 0.0
            where = max(0.0, (where - start) / (self._ends[k] - start))
        return self.schedulers[k](where)


@dataclass(frozen=True)
class WarmupParamScheduler(ParamScheduler):
    """``scheduler`` after a warm-up, as in detectron2.

    The warm-up starts at ``a = warmup_factor * scheduler(0)`` and ends at ``b``, the value with
    which the schedule goes on; at progress ``w < warmup_length`` it gives
    ``a + (b - a) * w / warmup_length`` if linear, and ``a`` if constant.

    Args:
        scheduler: the schedule that the warm-up leads to.
        warmup_factor: not negative.
        warmup_length: share of the run, in [0, 1]. For a number of iterations, that number
            divided by the length of the run.
        warmup_method: "linear" or "constant".
        rescale_interval: by default the warm-up covers the beginning of the schedule, which goes
            on at the progress of the whole run. If true, the schedule begins at its own start
            when the warm-up ends, and runs through the rest of the run.

    >>> from hooktrain.solver.schedule import LinearParamScheduler
    >>> schedule = WarmupParamScheduler(LinearParamScheduler(1.0, 0.0), 0.0, 0.5)
    >>> [schedule(w) for w in (0.0, 0.25, 0.5, 0.75, 1.0)]
    [0.0, 0.25, 0.5, 0.25, 0.0]
    """

    scheduler: ParamScheduler
    warmup_factor: float
    warmup_length: float
    warmup_method: str = "linear"
    rescale_interval: bool = False

    def __post_init__(self) -> None:
        check_is_schedule("scheduler", self.scheduler)
        if not self.warmup_factor >= 0:
            raise ValueError(f"warmup_factor must not be negative: {self.warmup_factor!r}")
        if not 0 <= self.warmup_length <= 1:
            raise ValueError(
                "warmup_length is a share of the run, in [0, 1] (for a number of iterations divide "
                f"it by max_iter): {self.warmup_length!r}"
            )
        if self.warmup_method not in ("linear", "constant"):
            raise ValueError(
                f"warmup_method must be 'linear' or 'constant': {self.warmup_method!r}"
            )

    def _value_at(self, where: float) -> float:
        length = self.warmup_length
        if length < 1 and where + ROUNDING > length:
            if self.rescale_interval:
                where = max(0.0, (where - length) / (1 - length))
            return self.scheduler(where)
        start = self.warmup_factor * self.scheduler(0.0)
        if self.warmup_method == "constant":
            return start
        end = self.scheduler(0.0 if self.rescale_interval else length)
        return end * (where / length) + start * (1 - where / length)
