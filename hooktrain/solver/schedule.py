"""Schedules: pure functions of the progress of a run, and a scheduler that sets learning rates.

The functions have the names, arguments and values of ``fvcore.common.param_scheduler``;
:class:`WarmupParamScheduler` and :class:`LRMultiplier` have those of detectron2. Below, ``w``
is the progress: 0 at the start of the run and 1 at its end. The functions compare by
value and can be pickled.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hooktrain.utils.names import State

# A boundary between two values is reached a hair early, so that the rounding of
# `step / max_iter` never delays it. Each step of a run of up to 1e9 steps advances by at least
# this much, so the boundary is never a whole step early.
ROUNDING = 1e-9


class ParamScheduler:
    """A function from the progress of a run, in [0, 1], to a value."""

    def __call__(self, where: float) -> float:
        """The value at progress ``where``; 1.0 gives the final value."""
        raise NotImplementedError


@dataclass
class ConstantParamScheduler(ParamScheduler):
    """``value``, always.

    >>> ConstantParamScheduler(0.1)(0.7)
    0.1
    """

    value: float

    def __call__(self, where: float) -> float:
        """The value at progress ``where``."""
        return self.value


@dataclass
class CosineParamScheduler(ParamScheduler):
    """``end_value + (start_value - end_value) * (1 + cos(pi * w)) / 2``.

    Half a period of a cosine, without restarts (Loshchilov and Hutter, SGDR, arXiv:1608.03983).

    >>> schedule = CosineParamScheduler(start_value=1.0, end_value=0.0)
    >>> [round(schedule(w), 6) for w in (0.0, 0.25, 0.5, 1.0)]
    [1.0, 0.853553, 0.5, 0.0]
    """

    start_value: float
    end_value: float

    def __call__(self, where: float) -> float:
        """The value at progress ``where``."""
        height = 0.5 * (self.start_value - self.end_value)
        cosine = math.cos(math.pi * where)
        return self.end_value + height * (1 + cosine)


@dataclass
class ExponentialParamScheduler(ParamScheduler):
    """``start_value * decay ** w``, with a positive ``decay``.

    >>> schedule = ExponentialParamScheduler(start_value=2.0, decay=0.25)
    >>> [schedule(w) for w in (0.0, 0.5, 1.0)]
    [2.0, 1.0, 0.5]
    """

    start_value: float
    decay: float

    def __call__(self, where: float) -> float:
        """The value at progress ``where``."""
        return float(self.start_value * self.decay**where)


@dataclass
class LinearParamScheduler(ParamScheduler):
    """``end_value * w + start_value * (1 - w)``.

    >>> schedule = LinearParamScheduler(start_value=0.0, end_value=0.4)
    >>> [schedule(w) for w in (0.0, 0.25, 1.0)]
    [0.0, 0.1, 0.4]
    """

    start_value: float
    end_value: float

    def __call__(self, where: float) -> float:
        """The value at progress ``where``."""
        return self.end_value * where + self.start_value * (1 - where)


@dataclass
class PolynomialDecayParamScheduler(ParamScheduler):
    """``base_value * (1 - w) ** power``.

    >>> schedule = PolynomialDecayParamScheduler(base_value=1.0, power=2)
    >>> [schedule(w) for w in (0.0, 0.5, 1.0)]
    [1.0, 0.25, 0.0]
    """

    base_value: float
    power: float

    def __call__(self, where: float) -> float:
        """The value at progress ``where``."""
        return float(self.base_value * (1 - where) ** self.power)


@dataclass
class MultiStepParamScheduler(ParamScheduler):
    """``values[k]``, where ``k`` counts the milestones that ``w * num_updates`` has reached.

    Args:
        values: the values, one more than there are milestones.
        num_updates: the length of the run, in the unit of the milestones. By default the last
            milestone is the end of the run instead of a boundary.
        milestones: increasing boundaries, in (0, num_updates). By default ``num_updates`` is
            split evenly, with every part but the last rounded up.

    Only ratios matter, so iterations, epochs and percent are all valid units. Three ways to write
    the same schedule:

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
        parts = len(self.values)
        milestones = self.milestones
        end = self.num_updates
        if milestones is None:
            if end is None:
                raise ValueError("one of num_updates and milestones must be given")
            width = math.ceil(end / parts)
            milestones = [width * k for k in range(1, parts)]
        elif end is None:
            *milestones, end = milestones
        boundaries = [0, *milestones, end]
        is_increasing = boundaries == sorted(set(boundaries))
        if len(milestones) != parts - 1 or not is_increasing:
            raise ValueError(
                f"{parts} values need {parts - 1} milestones that increase, in (0, num_updates), "
                f"but got {self!r}. Without num_updates the last milestone is the end of the run"
            )
        self.milestones = milestones
        self.num_updates = end
        self._shares = [milestone / end for milestone in milestones]

    def __call__(self, where: float) -> float:
        """The value at progress ``where``."""
        k = bisect_right(self._shares, where + ROUNDING)
        return self.values[k]


@dataclass
class CompositeParamScheduler(ParamScheduler):
    """Several schedules in sequence, the k-th for the share ``lengths[k]`` of the run.

    Args:
        schedulers: the schedules, at least one.
        lengths: their shares of the run, not negative. They sum to 1 within 1e-3, and the last
            schedule continues until the end of the run. A schedule of length 0 is never used.
        interval_scaling: for each schedule, "rescaled" runs through it from 0 to 1 within its
            share, and "fixed" evaluates it at the progress of the whole run.

    >>> warm, cool = LinearParamScheduler(0.0, 1.0), LinearParamScheduler(1.0, 0.0)
    >>> schedule = CompositeParamScheduler([warm, cool], [0.25, 0.75], ["rescaled", "fixed"])
    >>> [schedule(w) for w in (0.0, 0.125, 0.25, 0.5, 1.0)]
    [0.0, 0.5, 0.75, 0.5, 0.0]
    """

    schedulers: Sequence[ParamScheduler]
    lengths: Sequence[float]
    interval_scaling: Sequence[str]

    def __post_init__(self) -> None:
        scalings = self.interval_scaling
        is_whole = abs(sum(self.lengths) - 1) < 1e-3
        is_known = {"rescaled", "fixed"}.issuperset(scalings)
        as_many = len(self.schedulers) == len(self.lengths) == len(scalings)
        if not (as_many and is_whole and is_known):
            raise ValueError(
                "each scheduler needs a length and an interval_scaling, 'rescaled' or 'fixed', "
                f"and the lengths must sum to 1: {self!r}"
            )
        ends = [0.0, *accumulate(self.lengths[:-1]), 1.0]
        self._ends = [1.0 if end >= 1 - ROUNDING else end for end in ends]

    def __call__(self, where: float) -> float:
        """The value at progress ``where``."""
        reached = min(where + ROUNDING, 1.0)
        k = bisect_left(self._ends, reached) - 1
        if self.interval_scaling[k] == "rescaled":
            start, end = self._ends[k : k + 2]
            where = max(0.0, (where - start) / (end - start))
        return self.schedulers[k](where)


class WarmupParamScheduler(CompositeParamScheduler):
    """A schedule after a warm-up, as in detectron2.

    The warm-up starts at ``a = warmup_factor * scheduler(0)`` and leads to ``b``, the value at
    which the schedule takes over. At progress ``w < warmup_length`` its value is
    ``a + (b - a) * w / warmup_length`` if linear, and ``a`` if constant.

    Args:
        scheduler: the schedule after the warm-up.
        warmup_factor: the factor of the first value, not negative.
        warmup_length: the share of the run, in [0, 1]. For a number of iterations, divide it by
            the length of the run.
        warmup_method: "linear" or "constant".
        rescale_interval: by default the warm-up replaces the beginning of the schedule, which
            then continues at the progress of the whole run. If true, the schedule starts from its
            beginning when the warm-up ends, and is stretched over the rest of the run.

    >>> schedule = WarmupParamScheduler(LinearParamScheduler(1.0, 0.0), 0.0, 0.5)
    >>> [schedule(w) for w in (0.0, 0.25, 0.5, 0.75, 1.0)]
    [0.0, 0.25, 0.5, 0.25, 0.0]
    """

    def __init__(
        self,
        scheduler: ParamScheduler,
        warmup_factor: float,
        warmup_length: float,
        warmup_method: str = "linear",
        rescale_interval: bool = False,
    ) -> None:
        is_known = warmup_method in ("linear", "constant")
        if not is_known or not 0 <= warmup_length <= 1:
            raise ValueError(
                "warmup_length must be a share of the run, in [0, 1], and warmup_method "
                f"'linear' or 'constant', not {warmup_length=}, {warmup_method=}"
            )
        start = warmup_factor * scheduler(0.0)
        warmup: ParamScheduler = ConstantParamScheduler(start)
        if warmup_method == "linear":
            end = scheduler(0.0 if rescale_interval else warmup_length)
            warmup = LinearParamScheduler(start, end)
        super().__init__(
            [warmup, scheduler],
            [warmup_length, 1 - warmup_length],
            ["rescaled", "rescaled" if rescale_interval else "fixed"],
        )


class LRMultiplier(LRScheduler):
    """Sets the learning rate of each group to ``base_lr * multiplier(step / max_iter)``.

    ``base_lr`` is the group's ``initial_lr``, or its ``lr`` if it has no ``initial_lr``, so groups
    may be added to the optimizer at any time. The constructor sets the rate of the first step.
    Steps beyond ``max_iter`` keep the final value.

    This torch ``LRScheduler`` takes a fraction of the time of torch's own schedulers, since it
    does not wrap ``optimizer.step`` and does not check the order of steps.

    Args:
        optimizer: the optimizer, whose ``param_groups`` are changed. If ``lr`` is a tensor, it is
            filled in place.
        multiplier: a function of the progress of the run, in [0, 1].
        max_iter: the number of steps of the run, at least 1.
        last_iter: the last finished step of a run to continue; -1 starts a new one.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        multiplier: ParamScheduler,
        max_iter: int,
        last_iter: int = -1,
    ) -> None:
        # torch's constructor is not called, since it would wrap optimizer.step, which costs time.
        self.optimizer = optimizer
        self.last_epoch = last_iter
        self._multiplier = multiplier
        self._max_iter = max_iter
        self.step()

    def get_lr(self) -> list[float | Tensor]:
        """The rates of step ``last_epoch``, one float per group."""
        where = self.last_epoch / self._max_iter
        if where > 1.0:  # faster than min()
            where = 1.0
        factor = self._multiplier(where)
        rates = []
        for group in self.optimizer.param_groups:
            if "initial_lr" not in group:
                # Host-device synchronisation, if the rate is a tensor on a device.
                group["initial_lr"] = float(group["lr"])
            rates.append(group["initial_lr"] * factor)
        return rates

    get_last_lr = get_lr

    def step(self, epoch: int | None = None) -> None:
        """Advance by one step, or to step ``epoch``, and set the rates."""
        if epoch is None:
            epoch = self.last_epoch + 1
        self.last_epoch = epoch
        for index, rate in enumerate(self.get_lr()):  # faster than zip(strict=True)
            group = self.optimizer.param_groups[index]
            if hasattr(group["lr"], "fill_"):
                # A tensor is filled in place, for captured graphs; no synchronisation.
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def state_dict(self) -> State:
        """The number of the current step. The base rates are part of the optimizer's state."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: State) -> None:
        """Go to the saved step, and set the rates at once."""
        self.step(state_dict["last_epoch"])
