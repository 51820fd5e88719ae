"""Schedulers of settings of an optimizer's groups, with MMEngine's names and values.

Several schedulers of one optimizer, stepped in order, compose: consecutive ranges follow
each other, overlapping ranges multiply, and in a gap the value stays::

    schedulers = [
        LinearLR(optimizer, start_factor=0.001, by_epoch=False, begin=0, end=500),
        CosineAnnealingLR(optimizer, by_epoch=False, begin=500, end=10_000),
    ]
    for scheduler in schedulers:  # after each iteration
        scheduler.step()

Each kind has two classes: ``XxxParamScheduler`` for any number in the parameter groups,
and ``XxxLR`` for the learning rate. Five ``XxxParamScheduler`` have the names of functions of
progress in ``hooktrain.solver``, but are different classes. ``XxxMomentum``, OneCycle,
CosineRestart and ReduceOnPlateau come from mmengine, if that is installed, and are adapted by
:func:`adapted`.

Below, ``k`` is the step in the range of a scheduler, counted from 0, and the base is the
value at the beginning of the range. All schedulers have the arguments of
:class:`_ParamScheduler`; the range is given by keyword.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from hooktrain import solver
from hooktrain.solver.param_groups import ParamGroup
from hooktrain.utils.names import State

logger = logging.getLogger(__name__)

Schedulable = Optimizer | solver.OptimWrapper

INF = 10**9  # The end of an open range.

half_cosine = solver.CosineParamScheduler(1.0, 0.0)

# The arguments that count steps.
STEPS = ("begin", "end", "step_size", "milestones", "T_max")


@dataclass(eq=False)
class _ParamScheduler:
    """Schedules one setting of an optimizer's groups in a range of steps.

    At step ``k`` of the range the value is ``floor + (base - floor) * share(k)``. If
    other code changes the value in between, the base changes with it, so that
    schedulers compose. MMEngine multiplies the current value at each step, which gives the
    same values unless one is 0; this method neither drifts nor divides by a share of 0: the
    base then stays. A value in a tensor is changed in place, for captured graphs. Each step
    reads it, which is a host-device synchronisation if it is on a device.

    To write another schedule, override ``_share(k)``, or ``_get_value()`` as in MMEngine.

    Args:
        optimizer: a torch optimizer or an :class:`hooktrain.solver.OptimWrapper`.
        param_name: the name of the setting in the groups, such as ``"weight_decay"``.
        begin: the first step of the range, at least 0.
        end: the step after the last one of the range; from then on the value stays.
        last_step: the last finished step inside the range, of a run that is resumed without
            a saved state. The groups must then have their ``initial_<param_name>``. -1 starts
            a new run.
        by_epoch: whether a step is an epoch instead of an iteration. The caller of ``step``
            uses it.
        verbose: whether to log each change.

    Attributes:
        total_iters: the last step of the range.
        global_step: the current step. The constructor makes step 0.
        last_step: the current or last step inside the range, from its beginning.
        base_values: the value of each group when it was scheduled for the first time.
        start_values: the base of each group.
        written_values: the values that this scheduler set last; None before the first.

    Raises:
        ValueError: for an argument out of range, an empty range, or an open range if the
            values depend on its end.
        KeyError: if a group lacks the setting; or, with ``last_step``, its
            initial value.
    """

    # These arguments must lie in [0, 1].
    SHARES: ClassVar[tuple[str, ...]] = ()
    optimizer: Schedulable = field(repr=False)
    param_name: str
    _: KW_ONLY
    begin: int = 0
    end: int = INF
    last_step: int = -1
    by_epoch: bool = True
    verbose: bool = False

    def __post_init__(self) -> None:
        # All arguments are checked before anything is written.
        for name in self.SHARES:
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must be in [0, 1]: {value!r}")
        if not 0 <= self.begin < self.end or self.last_step < -1:
            raise ValueError(
                f"0 <= begin < end and last_step >= -1 must hold, but do not in {self!r}"
            )
        if not hasattr(self, "total_iters"):  # a subclass may have set it
            self.total_iters = self.end - self.begin - 1
        groups = self.optimizer.param_groups
        self.base_values = [self._base_value(group) for group in groups]
        self.start_values = [*self.base_values]
        self.written_values: Sequence[float | None] = [None] * len(groups)
        self.global_step = -1
        if self.last_step >= 0:
            self.global_step = self.begin + self.last_step
        self.step()

    def _write(self, group: ParamGroup, value: float) -> None:
        """Set the value of a group."""
        if self.verbose:
            logger.info(
                "Step %d: %s becomes %.4e", self.global_step, self.param_name, value
            )
        old = group[self.param_name]
        if isinstance(old, Tensor):
            old.fill_(value)
        else:
            group[self.param_name] = value

    def _base_value(self, group: ParamGroup) -> float:
        key = f"initial_{self.param_name}"
        if self.last_step < 0:
            group.setdefault(key, float(group[self.param_name]))
        return float(group[key])

    @classmethod
    def build_iter_from_epoch(
        cls,
        optimizer: Schedulable,
        *,
        epoch_length: int | None = None,
        by_epoch: bool = True,
        **kwargs: Any,
    ) -> "_ParamScheduler":
        """Make a scheduler that steps in iterations from arguments that count epochs.

        Args:
            optimizer: see the constructor.
            epoch_length: the number of iterations of an epoch.
            by_epoch: must be True, since the arguments count epochs.
            kwargs: further arguments of the constructor.

        Raises:
            ValueError: if ``by_epoch`` is False, or ``epoch_length`` is not at least 1.
        """
        if epoch_length is None or epoch_length < 1 or not by_epoch:
            raise ValueError(
                f"converting {cls.__name__} to iterations needs an epoch_length of at least "
                f"1 and by_epoch=True, but got {epoch_length=}, {by_epoch=}"
            )
        for name in STEPS:
            value = kwargs.get(name)
            if isinstance(value, Sequence):
                kwargs[name] = [int(number * epoch_length) for number in value]
            elif value is not None:
                kwargs[name] = int(value * epoch_length)
        return cls(optimizer, by_epoch=False, **kwargs)

    def step(self) -> None:
        """Advance by one step; inside the range, set the values."""
        self.global_step += 1
        if not self.begin <= self.global_step < self.end:
            return
        self.last_step = self.global_step - self.begin
        values = self._get_value()
        for group, value in zip(self.optimizer.param_groups, values, strict=True):
            self._write(group, value)
        self.written_values = self.get_last_value()

    def _get_value(self) -> list[float]:
        """The value of each group at step ``last_step`` of the range."""
        share = self._share(self.last_step)
        values = []
        for i, value in enumerate(self.get_last_value()):
            base = self._base(i, value)
            self.start_values[i] = base
            # This form is exactly the base at share 1, and exactly the floor at share 0.
            floor = self._floor(i)
            values.append(base * share + floor * (1 - share))
        return values

    def _share(self, k: int) -> float:
        """The share of the base that remains at step ``k`` of the range, from 0."""
        raise NotImplementedError

    def _where(self, k: int) -> float:
        """The progress of step ``k`` in the range: 0 at its first step, 1 at its last."""
        last = self._length() - 1
        return k / max(last, 1)

    def _length(self) -> int:
        """The number of steps of the range, for schedules that depend on it."""
        if self.end == INF:
            raise ValueError(
                f"pass the run's max_epochs or max_iters, or end: {self!r}"
            )
        return self.end - self.begin

    def _floor(self, i: int) -> float:
        """The value of group ``i`` at share 0."""
        return 0.0

    def _base(self, i: int, value: float) -> float:
        """The base of group ``i``, if its current value is ``value``."""
        if self.last_step == 0:
            return value
        share = self._share(self.last_step - 1)
        if value == self.written_values[i] or share == 0:
            return self.start_values[i]
        floor = self._floor(i)
        return floor + (value - floor) / share

    def get_last_value(self) -> list[float]:
        """The current value of each group."""
        return [float(group[self.param_name]) for group in self.optimizer.param_groups]

    def state_dict(self) -> State:
        """The current step and the values, not the arguments."""
        return {
            "param_name": self.param_name,
            "by_epoch": self.by_epoch,
            "base_values": self.base_values,
            "start_values": [*self.start_values],
            "written_values": self.written_values,
            "_global_step": self.global_step,
            "last_step": self.last_step,
            "_last_value": self.get_last_value(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state, and give the groups its values.

        The arguments of this scheduler are kept. If the number of groups has changed, the
        groups keep the values from the optimizer's own state, and the schedule continues
        from these. States of MMEngine's schedulers load too.

        Raises:
            KeyError: if an entry is missing.
            ValueError: if the state is of another setting, or counts iterations but this
                scheduler counts epochs. Nothing is loaded then.
        """
        for key in ("param_name", "by_epoch"):
            if state_dict[key] != getattr(self, key):
                raise ValueError(
                    f"the state has {key}={state_dict[key]!r}, but this is {self!r}"
                )
        self.global_step = state_dict["_global_step"]
        reached = min(self.global_step, self.end - 1)
        self.last_step = max(reached - self.begin, -1)
        groups = self.optimizer.param_groups
        self.written_values = [None] * len(groups)
        values = state_dict["_last_value"]
        if len(values) != len(groups):
            logger.warning("%r had %d parameter groups when saved", self, len(values))
            return
        for group, value in zip(groups, values, strict=True):
            self._write(group, value)
        # MMEngine's states lack some entries, which follow from the values.
        self.base_values = state_dict.get("base_values", self.base_values)
        self.start_values = [*state_dict.get("start_values", self.base_values)]
        self.written_values = state_dict.get("written_values", self.written_values)


@dataclass(eq=False)
class ConstantParamScheduler(_ParamScheduler):
    """``base * factor``, and the base at the last step."""

    SHARES = ("factor",)

    factor: float = 1.0 / 3

    def _share(self, k: int) -> float:
        is_last = 0 < k == self.total_iters
        return 1.0 if is_last else self.factor


@dataclass(eq=False)
class LinearParamScheduler(_ParamScheduler):
    """A line from ``base * start_factor`` to ``base * end_factor``."""

    SHARES = ("start_factor", "end_factor")

    start_factor: float = 1.0 / 3
    end_factor: float = 1.0

    def _share(self, k: int) -> float:
        where = self._where(k)
        return self.start_factor * (1 - where) + self.end_factor * where


@dataclass(eq=False)
class StepParamScheduler(_ParamScheduler):
    """``base * gamma ** (k // step_size)``."""

    step_size: int
    gamma: float = 0.1

    def _share(self, k: int) -> float:
        decays = k // self.step_size
        return float(self.gamma**decays)


@dataclass(eq=False)
class MultiStepParamScheduler(_ParamScheduler):
    """``base * gamma ** n`` after ``n`` milestones, in any order and possibly repeated."""

    milestones: Any
    gamma: float = 0.1

    def __post_init__(self) -> None:
        # As in MMEngine, whose _get_value reads how often a milestone occurs.
        self.milestones = Counter(self.milestones)
        super().__post_init__()

    def _share(self, k: int) -> float:
        reached = sum(milestone <= k for milestone in self.milestones.elements())
        return float(self.gamma**reached)


@dataclass(eq=False)
class ExponentialParamScheduler(_ParamScheduler):
    """``base * gamma ** k``."""

    gamma: float

    def _share(self, k: int) -> float:
        return float(self.gamma**k)


@dataclass(eq=False)
class PolyParamScheduler(_ParamScheduler):
    """``eta_min + (base - eta_min) * (1 - k / T) ** power``, where ``T`` is the last step."""

    eta_min: float = 0
    power: float = 1.0

    def _share(self, k: int) -> float:
        left = 1 - self._where(k)
        return float(left**self.power)

    def _floor(self, i: int) -> float:
        return self.eta_min


@dataclass(eq=False)
class CosineAnnealingParamScheduler(_ParamScheduler):
    """``floor + (base - floor) * (1 + cos(pi * k / T_max)) / 2``.

    It rises again after ``T_max``, which is the length of the range by default. The floor is
    ``eta_min``, or ``eta_min_ratio`` times the first value; 0 by default.
    """

    T_max: int | None = None
    eta_min: float | None = None
    eta_min_ratio: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if None not in (self.eta_min, self.eta_min_ratio):
            raise ValueError(f"pass eta_min or eta_min_ratio, not both: {self!r}")
        super().__post_init__()

    def _share(self, k: int) -> float:
        length = self.T_max or self._length()
        return half_cosine(k / length)

    def _floor(self, i: int) -> float:
        if self.eta_min is not None:
            return self.eta_min
        ratio = self.eta_min_ratio or 0.0
        return self.base_values[i] * ratio


def adapted(found: Any) -> Any:
    """Turn one of mmengine's scheduler classes into a :class:`_ParamScheduler`, no other class."""
    is_scheduler = isinstance(found, type) and hasattr(found, "get_last_value")
    if is_scheduler and not issubclass(found, _ParamScheduler):
        return _adapted(found)
    return found


@cache
def _adapted(theirs: type) -> type:
    names = {"__module__": __package__, "__doc__": theirs.__doc__}
    return type(theirs.__name__, (_OfMMEngine, theirs, _ParamScheduler), names)


class _OfMMEngine:
    """Lets mmengine's own schedulers take wrappers, and save their state without functions."""

    def __init__(self, optimizer: Schedulable, *args: Any, **kwargs: Any) -> None:
        optimizer = getattr(optimizer, "optimizer", optimizer)
        super().__init__(optimizer, *args, **kwargs)  # type: ignore[call-arg]
        if getattr(self, "use_betas", False):
            for group in self.optimizer.param_groups:  # type: ignore[attr-defined]
                # This entry shows in the optimizer's state that the setting is scheduled.
                group["initial_betas"] = group["betas"]

    def state_dict(self) -> State:
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        return {key: value for key, value in state.items() if not callable(value)}


class LRSchedulerMixin:
    """Makes the scheduler class after it, among the bases, schedule the learning rate."""

    def __init__(self, optimizer: Schedulable, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, "lr", *args, **kwargs)  # type: ignore[call-arg]


class ConstantLR(LRSchedulerMixin, ConstantParamScheduler):
    """:class:`ConstantParamScheduler` of the learning rate."""


class LinearLR(LRSchedulerMixin, LinearParamScheduler):
    """:class:`LinearParamScheduler` of the learning rate."""


class StepLR(LRSchedulerMixin, StepParamScheduler):
    """:class:`StepParamScheduler` of the learning rate."""


class MultiStepLR(LRSchedulerMixin, MultiStepParamScheduler):
    """:class:`MultiStepParamScheduler` of the learning rate."""


class ExponentialLR(LRSchedulerMixin, ExponentialParamScheduler):
    """:class:`ExponentialParamScheduler` of the learning rate."""


class CosineAnnealingLR(LRSchedulerMixin, CosineAnnealingParamScheduler):
    """:class:`CosineAnnealingParamScheduler` of the learning rate."""


class PolyLR(LRSchedulerMixin, PolyParamScheduler):
    """:class:`PolyParamScheduler` of the learning rate."""
