"""Schedulers of the parameters of an optimizer's groups, with MMEngine's names and values.

Several of them on one optimizer, stepped in order, compose: one range after the other chains,
overlapping ranges multiply, and in a gap the value stays::

    schedulers = [
        LinearLR(optimizer, start_factor=0.001, by_epoch=False, begin=0, end=500),
        CosineAnnealingLR(optimizer, by_epoch=False, begin=500, end=10_000),
    ]
    for scheduler in schedulers:  # after each iteration
        scheduler.step()

Each kind has three classes: ``XxxParamScheduler`` for any number that the parameter groups hold,
``XxxLR`` for the learning rate, and ``XxxMomentum``. Five of the first are also names of pure
functions in ``schedule.py``. ``hooktrain.solver`` exports these; import those here from here.

Below, ``k`` is the step in the range of a scheduler, counted from 0, and the base is the value
where the range begins. The arguments that all schedulers have are those of
:class:`~hooktrain.solver.param_scheduler.GroupParamScheduler`; the range is given by keyword.
"""

import logging
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import KW_ONLY, dataclass, field
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Literal, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from hooktrain.solver.optim_wrapper import OptimWrapper
from hooktrain.utils.names import refuse_overrides
from hooktrain.utils.registry import PARAM_SCHEDULERS

logger = logging.getLogger(__name__)

S = TypeVar("S", bound="GroupParamScheduler")

INF = 10**9  # The end of a range without one.

# The arguments that count steps.
STEPS = ("begin", "end", "step_size", "milestones", "T_max", "periods", "total_steps")

# What schedulers for MMEngine override.
_NOT_CALLED = ("print_value", "_annealing_cos", "_annealing_linear", "_format_param")


@dataclass(eq=False)
class GroupParamScheduler:
    """Schedules one parameter of an optimizer's groups in a range of steps.

    At step ``k`` of the range the value is ``floor + (base - floor) * share(k)``. The base is the
    value where the range begins. Whoever else changes the value in between changes the base with
    it, so that schedulers compose. MMEngine multiplies the current value at each step, which is the
    same where nothing is 0; this neither drifts, nor divides by a share of 0: the base then stays.
    A tensor is multiplied on its device, as in MMEngine, without a synchronisation.

    To write another schedule, override ``_share(k)``, or ``_get_value()`` as in MMEngine. A
    subclass that overrides what only MMEngine calls is a TypeError when it is defined.

    Args:
        optimizer: a torch optimizer or an :class:`~hooktrain.solver.OptimWrapper`.
        param_name: what the groups call the parameter, such as ``"weight_decay"``.
        begin: the first step of the range, at least 0.
        end: the step after the last one of the range; from then on the value stays.
        last_step: the last finished step inside the range, of a run that goes on without a saved
            state. The groups then have their ``initial_<param_name>``. -1 starts a new run.
        by_epoch: whether a step is an epoch, not an iteration, for the caller of ``step``.
        verbose: log each change.

    Attributes:
        global_step: the current step. The constructor makes step 0.
        last_step: the current or last step inside the range, counted from its beginning.
        base_values: the value of each group when it was scheduled for the first time.
        start_values: the base of each group.
        written_values: what this scheduler set last; None before its range, and for tensors.

    Raises:
        TypeError: if ``optimizer`` has no list of parameter groups.
        ValueError: for an argument out of range, or an empty range. Nothing is written then.
        KeyError: if a group does not have the parameter; or, with ``last_step``, its initial value.
    """

    # One of these arguments must be given for the scheduler to know where it ends.
    NEEDS: ClassVar[tuple[str, ...]] = ()
    # The arguments that lie in [0, 1].
    SHARES: ClassVar[tuple[str, ...]] = ()
    # The attributes that change from step to step and are part of the state.
    PROGRESS: ClassVar[tuple[str, ...]] = ("start_values", "written_values")

    optimizer: Optimizer | OptimWrapper = field(repr=False)
    param_name: str
    _: KW_ONLY
    begin: int = 0
    end: int = INF
    last_step: int = -1
    by_epoch: bool = True
    verbose: bool = False

    def __init_subclass__(cls) -> None:
        refuse_overrides(
            cls, dict.fromkeys(_NOT_CALLED, "override _get_value() or step()")
        )

    def __post_init__(self) -> None:
        self._check_arguments()
        self.base_values = [
            self._base_value(group) for group in self.optimizer.param_groups
        ]
        self.global_step = -1 if self.last_step < 0 else self.begin + self.last_step
        self.start_values = list(self.base_values)
        self.written_values: list[float | None] = [None] * len(self.base_values)
        self.step()

    def _check_arguments(self) -> None:
        """Refuse impossible arguments, before anything is written."""
        if not isinstance(getattr(self.optimizer, "param_groups", None), list):
            raise TypeError(
                f"optimizer must be one optimizer or OptimWrapper: {self.optimizer!r}"
            )
        if not 0 <= self.begin < self.end:
            raise ValueError(
                f"0 <= begin < end must hold: begin={self.begin!r}, end={self.end!r}"
            )
        for name in self.SHARES:
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in [0, 1]: {getattr(self, name)!r}")
        self._floor(1.0)  # refuses one that is given twice

    def _for_each_group(self, value: float | Sequence[float]) -> Sequence[float]:
        """A number for each group. The base settings of a wrapper, at the end, get the last one."""
        added = getattr(self.optimizer, "base_param_settings", None) is not None
        groups = len(self.optimizer.param_groups) - added
        values = list(value) if isinstance(value, Sequence) else [value] * groups
        if len(values) != groups:
            raise ValueError(
                f"give a number, or one for each of the {groups} groups: {value!r}"
            )
        return values + values[-1:] * added

    def _read(self, group: dict[str, Any]) -> Any:
        """The value of a group, a number or a tensor; a momentum may be the first of ``betas``."""
        name = self.param_name
        return (
            group["betas"][0]
            if name == "momentum" and "betas" in group
            else group[name]
        )

    def _write(self, group: dict[str, Any], value: Any) -> None:
        if self.verbose:
            logger.info(
                "Step %d: %s becomes %.4e", self.global_step, self.param_name, value
            )
        if isinstance(old := self._read(group), Tensor):
            old.fill_(value)  # In place, for captured graphs; no synchronisation.
            return
        if self.param_name == "momentum" and "betas" in group:
            group["betas"] = (value, *group["betas"][1:])
        group[self.param_name] = value

    def _base_value(self, group: dict[str, Any]) -> float:
        key, value = f"initial_{self.param_name}", self._read(group)
        if self.last_step < 0:
            # Synchronises with the device once, if the value is a tensor there.
            group.setdefault(key, float(value))
        if self.param_name == "momentum":
            group["momentum"] = value  # For those who log it, also where betas hold it.
        return float(group[key])

    @classmethod
    def build_iter_from_epoch(
        cls: type[S],
        optimizer: Optimizer | OptimWrapper,
        *,
        epoch_length: int | None = None,
        **kwargs: Any,
    ) -> S:
        """Make a scheduler that steps in iterations from arguments that count epochs.

        Args:
            optimizer: as for the constructor.
            epoch_length: the number of iterations of an epoch.
            kwargs: the others of the constructor.

        Raises:
            ValueError: if ``by_epoch`` is False, or ``epoch_length`` is not at least 1.
        """
        if epoch_length is None or epoch_length < 1:
            raise ValueError(f"epoch_length must be at least 1: {epoch_length!r}")
        if not kwargs.pop("by_epoch", True):
            raise ValueError(
                f"by_epoch=False: these arguments of {cls.__name__} are iterations"
            )
        for name in STEPS:
            value = kwargs.get(name)
            if isinstance(value, Sequence):
                kwargs[name] = [int(number * epoch_length) for number in value]
            elif value is not None and value != INF:
                kwargs[name] = int(value * epoch_length)
        return cls(optimizer, by_epoch=False, **kwargs)

    def step(self) -> None:
        """Go on by one step; inside the range, set the values.

        Raises:
            ValueError: if parameter groups were added or removed, or a cycle is at its end.
        """
        self.global_step += 1
        if self.begin <= self.global_step < self.end:
            self.last_step = self.global_step - self.begin
            groups, values = self._groups(), self._get_value()
            for group, value in zip(groups, values, strict=True):
                self._write(group, value)
            self.written_values = [None if isinstance(v, Tensor) else v for v in values]

    def _get_value(self) -> list[Any]:
        """The value of each group at step ``last_step`` of the range."""
        share = self._share(self.last_step)
        values = []
        for i, group in enumerate(self.optimizer.param_groups):
            floor = self._floor(self.base_values[i])
            base = self._base(i, self._read(group), floor)
            if not isinstance(base, Tensor):
                self.start_values[i] = base
            # This form gives exactly the base at 1, and exactly the floor at 0.
            values.append(base * share + floor * (1 - share))
        return values

    def _share(self, k: int) -> float:
        """The share of the base that is left at step ``k`` of the range, counted from 0."""
        raise NotImplementedError(
            f"{type(self).__name__} must define _share(k) or _get_value()"
        )

    def _floor(self, base_value: float) -> float:
        """The value where the share is 0, of a group that had ``base_value`` at first."""
        return 0.0

    def _base(self, i: int, value: Any, floor: float) -> Any:
        """The base of group ``i``, whose value is now ``value``; a tensor if that is one."""
        if self.last_step == 0:
            return float(
                value
            )  # Synchronises with the device once, if it is a tensor there.
        # A tensor always counts as changed: to compare it would synchronise with the device.
        changed = isinstance(value, Tensor) or value != self.written_values[i]
        if changed and (before := self._share(self.last_step - 1)):
            return floor + (value - floor) / before
        return self.start_values[i]

    def _groups(self) -> list[dict[str, Any]]:
        groups = self.optimizer.param_groups
        if len(groups) != len(self.base_values):
            raise ValueError(
                f"there are {len(groups)} parameter groups now: make a new {self!r}"
            )
        return groups

    def get_last_value(self) -> list[float]:
        """The current value of each group; waits for the device of those that are tensors."""
        return [float(self._read(group)) for group in self._groups()]

    def state_dict(self) -> dict[str, Any]:
        """The current step, the range and the values; other arguments are not part of it."""
        names = (
            "param_name",
            "by_epoch",
            "begin",
            "end",
            "base_values",
            *self.PROGRESS,
        )
        state = {name: copy(getattr(self, name)) for name in names}
        return state | {
            "_global_step": self.global_step,
            "_last_value": self.get_last_value(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where the state was taken, and give the groups their values of then.

        The arguments stay those of this scheduler: another range than that of the state is used,
        with a warning. If the optimizer has another number of groups than then, they keep the
        values that its own state has given them, and what lies ahead follows from these. States of
        MMEngine's schedulers load too.

        Raises:
            KeyError: if an entry is missing.
            ValueError: if the state is of another parameter, or counts iterations where this
                scheduler counts epochs. Nothing is loaded then.
        """
        groups, initial = self._groups(), f"initial_{self.param_name}"
        for key in ("param_name", "by_epoch"):
            if state_dict[key] != getattr(self, key):
                raise ValueError(
                    f"the state has {key}={state_dict[key]!r}, and this is {self!r}"
                )
        first = [float(group.get(initial, self._read(group))) for group in groups]
        blank: dict[str, Any] = {"base_values": first, "start_values": first}
        blank["written_values"] = [None] * len(groups)
        state = blank | dict(state_dict)  # MMEngine's do not have all of these.
        if len(state["_last_value"]) != len(groups):
            logger.warning(
                "%r takes its values from the groups, since others were saved", self
            )
            state |= blank | {"_last_value": self.get_last_value()}
        step, begin, end = state["_global_step"], state["begin"], state["end"]
        if (begin, end) != (self.begin, self.end):
            logger.warning(
                "%r had the range [%d, %d) when it was saved", self, begin, end
            )
        vars(self).update(
            {key: copy(state[key]) for key in ("base_values", *self.PROGRESS)}
        )
        self.global_step = step
        self.last_step = max(min(step, self.end - 1) - self.begin, -1)
        for group, value in zip(groups, state["_last_value"], strict=True):
            self._write(group, value)


_ParamScheduler = GroupParamScheduler  # MMEngine's name


@dataclass(eq=False)
class ConstantParamScheduler(GroupParamScheduler):
    """``base * factor``, with ``factor`` in [0, 1], and the base at the last step."""

    SHARES = ("factor",)

    factor: float = 1.0 / 3

    def _share(self, k: int) -> float:
        return 1.0 if 0 < k == self.end - self.begin - 1 else self.factor


@dataclass(eq=False)
class LinearParamScheduler(GroupParamScheduler):
    """A line from ``base * start_factor`` to ``base * end_factor``; both factors in [0, 1]."""

    NEEDS = ("end",)
    SHARES = ("start_factor", "end_factor")

    start_factor: float = 1.0 / 3
    end_factor: float = 1.0

    def _share(self, k: int) -> float:
        where = k / max(self.end - self.begin - 1, 1)
        return self.start_factor * (1 - where) + self.end_factor * where


@dataclass(eq=False)
class StepParamScheduler(GroupParamScheduler):
    """``base * gamma ** (k // step_size)``."""

    step_size: int
    gamma: float = 0.1

    def _share(self, k: int) -> float:
        return float(self.gamma ** (k // self.step_size))


@dataclass(eq=False)
class MultiStepParamScheduler(GroupParamScheduler):
    """``base * gamma ** n`` after ``n`` milestones, in any order; one may be there twice."""

    milestones: Sequence[int]
    gamma: float = 0.1

    def _share(self, k: int) -> float:
        return float(self.gamma ** sum(milestone <= k for milestone in self.milestones))


@dataclass(eq=False)
class ExponentialParamScheduler(GroupParamScheduler):
    """``base * gamma ** k``."""

    gamma: float

    def _share(self, k: int) -> float:
        return float(self.gamma**k)


class _Falling(GroupParamScheduler):
    """Its floor is ``eta_min``, or ``eta_min_ratio`` times the first value; 0 by default."""

    eta_min: float | None
    eta_min_ratio: float | None = None

    def _floor(self, base_value: float) -> float:
        if self.eta_min is None:
            return base_value * (self.eta_min_ratio or 0.0)
        if self.eta_min_ratio is not None:
            given = f"eta_min={self.eta_min!r} or eta_min_ratio={self.eta_min_ratio!r}"
            raise ValueError(f"give {given}, not both")
        return self.eta_min


@dataclass(eq=False)
class PolyParamScheduler(_Falling):
    """``eta_min + (base - eta_min) * (1 - k / T) ** power``, where ``T`` is the last step."""

    NEEDS = ("end",)

    eta_min: float = 0
    power: float = 1.0

    def _share(self, k: int) -> float:
        return float((1 - k / max(self.end - self.begin - 1, 1)) ** self.power)


def half_cosine(k: float, length: float) -> float:
    """``(1 + cos(pi * k / length)) / 2``, which goes from 1 to 0 (SGDR, arXiv:1608.03983)."""
    return (1 + math.cos(math.pi * (k / length))) / 2


@dataclass(eq=False)
class CosineAnnealingParamScheduler(_Falling):
    """``floor + (base - floor) * (1 + cos(pi * k / T_max)) / 2``.

    It rises again after ``T_max``, which is the length of the range by default. The floor is
    ``eta_min``, or ``eta_min_ratio`` times the first value.
    """

    NEEDS = ("end", "T_max")

    T_max: int | None = None
    eta_min: float | None = None
    eta_min_ratio: float | None = field(default=None, kw_only=True)

    def _share(self, k: int) -> float:
        return half_cosine(k, self.T_max or self.end - self.begin)


@dataclass(eq=False)
class CosineRestartParamScheduler(_Falling):
    """Half a cosine in each of the ``periods``, whose lengths in steps are given.

    Each starts at its ``restart_weights`` times the first value. After the last one the value
    stays. The floor is that of :class:`CosineAnnealingParamScheduler`.
    """

    periods: Sequence[int]
    restart_weights: Sequence[float] = (1,)
    eta_min: float | None = None
    eta_min_ratio: float | None = None

    def _check_arguments(self) -> None:
        super()._check_arguments()
        if not 0 < len(self.periods) == len(self.restart_weights):
            raise ValueError(
                f"periods must be at least one, and restart_weights as many: {self!r}"
            )

    def _share(self, k: int) -> float:
        starts = [*accumulate(self.periods, initial=0)]
        k = min(k, starts[-1] - 1)
        period = bisect_right(starts, k) - 1
        return half_cosine(k - starts[period], self.periods[period])

    def _base(self, i: int, value: Any, floor: float) -> Any:
        starts = [*accumulate(self.periods[:-1], initial=0)]
        if self.last_step in starts:
            return (
                self.base_values[i] * self.restart_weights[starts.index(self.last_step)]
            )
        return super()._base(i, value, floor)


@dataclass(eq=False)
class OneCycleParamScheduler(GroupParamScheduler):
    """From ``eta_max / div_factor`` up to ``eta_max``, then down to the final value.

    It overwrites what others do to the value. Smith and Topin (Super-Convergence,
    arXiv:1708.07120).

    Args:
        eta_max: the maximum, or one for each parameter group.
        total_steps: the steps of a loop that steps after each iteration; one more raises
            ValueError. By default the length of the range.
        pct_start: the share of the steps that goes up, in [0, 1].
        anneal_strategy: ``"cos"`` or ``"linear"``.
        div_factor: the first value is the maximum divided by this.
        final_div_factor: the final value is the first one divided by this.
        three_phase: go down to the first value in as many steps as up, then to the final one.
    """

    NEEDS = ("end", "total_steps")
    SHARES = ("pct_start",)

    eta_max: float | Sequence[float]
    total_steps: int | None = None
    pct_start: float = 0.3
    anneal_strategy: Literal["cos", "linear"] = "cos"
    div_factor: float = 25.0
    final_div_factor: float = 1e4
    three_phase: bool = False

    def _check_arguments(self) -> None:
        super()._check_arguments()
        self._for_each_group(self.eta_max)
        self._share(0)  # refuses divisions by 0
        if self.anneal_strategy not in ("cos", "linear"):
            raise ValueError(
                f"anneal_strategy must be 'cos' or 'linear': {self.anneal_strategy!r}"
            )

    def _share(self, k: int) -> float:
        total = self.total_steps or self.end - self.begin
        if k > total:
            raise ValueError(
                f"the cycle has total_steps={total!r}, and this is step {k}"
            )
        low, peak = 1 / self.div_factor, self.pct_start * total - 1
        corners = [(0.0, low), (peak, 1.0), (total - 1, low / self.final_div_factor)]
        if self.three_phase:
            corners.insert(2, (2 * peak, low))
        for (start, first), (end, last) in pairwise(corners):
            if k <= end:
                where = (k - start) / (end - start) if end > start else 1.0
                if self.anneal_strategy == "cos":
                    where = 1 - half_cosine(where, 1)
                return first * (1 - where) + last * where
        return corners[-1][1]

    def _base(self, i: int, value: Any, floor: float) -> Any:
        return self._for_each_group(self.eta_max)[i]


@dataclass(eq=False)
class ReduceOnPlateauParamScheduler(GroupParamScheduler):
    """Multiplies by ``factor`` after more than ``patience`` metrics without improvement.

    Call ``step({monitor: value})`` after each evaluation. ``step()`` without metrics only counts an
    epoch, for ``begin`` and ``end``: outside of that range metrics are ignored.

    Args:
        monitor: the name of the metric.
        rule: ``"less"`` if less is better, ``"greater"`` if more is.
        factor: what to multiply by, in [0, 1).
        patience: how many values in a row may be no improvement.
        threshold: by how much a value must be better than the best one.
        threshold_rule: ``"rel"``, a share of the best value, or ``"abs"``.
        cooldown: how many values after a reduction do not count as bad.
        min_value: the least value to reduce to; or one for each parameter group.
        eps: a reduction by no more than this is not made.

    Attributes:
        best: the best value so far; infinite before the first.
        num_bad_epochs: how many values in a row were no improvement.
        cooldown_counter: how many values the cooldown still lasts.
    """

    PROGRESS = ("best", "num_bad_epochs", "cooldown_counter")

    monitor: str = "loss"
    rule: Literal["less", "greater"] = "less"
    factor: float = 0.1
    patience: int = 10
    threshold: float = 1e-4
    threshold_rule: Literal["rel", "abs"] = "rel"
    cooldown: int = 0
    min_value: float | Sequence[float] = 0.0
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        self.best = math.inf if self.rule == "less" else -math.inf
        self.num_bad_epochs = 0
        self.cooldown_counter = 0

    def _check_arguments(self) -> None:
        super()._check_arguments()
        self._for_each_group(self.min_value)
        if self.rule not in ("less", "greater"):
            raise ValueError(f"rule must be 'less' or 'greater': {self.rule!r}")
        if self.threshold_rule not in ("rel", "abs"):
            raise ValueError(
                f"threshold_rule must be 'rel' or 'abs': {self.threshold_rule!r}"
            )
        if not 0 <= self.factor < 1:
            raise ValueError(f"factor must lie in [0, 1): {self.factor!r}")
        if not self.by_epoch:
            raise ValueError("by_epoch=False: a plateau's begin and end are epochs")

    def step(self, metrics: Mapping[str, float] | None = None) -> None:
        """Take in the metrics of an evaluation; without any, count an epoch.

        Raises:
            KeyError: if the metric is not among them.
        """
        if metrics is None:
            self.global_step += 1
        elif self.begin <= self.global_step < self.end and self._is_due(
            metrics[self.monitor]
        ):
            for group, value in zip(self._groups(), self._get_value(), strict=True):
                # Synchronises with the device, if the value is a tensor there.
                if self._read(group) - value > self.eps:
                    self._write(group, value)

    def _is_better(self, value: float, best: float) -> bool:
        """Whether a value of the metric is an improvement; MMEngine's name."""
        less = self.rule == "less"
        margin = -self.threshold if less else self.threshold
        bound = best * (1 + margin) if self.threshold_rule == "rel" else best + margin
        return value < bound if less else value > bound

    def _is_due(self, value: float) -> bool:
        """Count a value of the metric; whether to reduce."""
        if self._is_better(value, self.best):
            self.best = float(value)
            self.num_bad_epochs = 0
        else:
            self.num_bad_epochs += 1
        if self.cooldown_counter > 0:
            self.cooldown_counter -= 1
            self.num_bad_epochs = 0
        if self.num_bad_epochs <= self.patience:
            return False
        self.cooldown_counter = self.cooldown
        self.num_bad_epochs = 0
        return True

    def _get_value(self) -> list[Any]:
        values, least = self.get_last_value(), self._for_each_group(self.min_value)
        return [
            max(value * self.factor, low)
            for value, low in zip(values, least, strict=True)
        ]


@dataclass(eq=False)
class LRSchedulerMixin:
    """Makes the scheduler that follows it among the bases one of the learning rate."""

    param_name: str = field(default="lr", init=False, repr=False)

    def __init__(
        self, optimizer: Optimizer | OptimWrapper, *args: Any, **kwargs: Any
    ) -> None:
        # Only for classes that are no dataclasses, as users of MMEngine write them.
        super().__init__(optimizer, "lr", *args, **kwargs)  # type: ignore[call-arg]


@dataclass(eq=False)
class MomentumSchedulerMixin:
    """Makes the scheduler that follows it among the bases one of the momentum, or first beta."""

    param_name: str = field(default="momentum", init=False, repr=False)

    def __init__(
        self, optimizer: Optimizer | OptimWrapper, *args: Any, **kwargs: Any
    ) -> None:
        # Only for classes that are no dataclasses, as users of MMEngine write them.
        super().__init__(optimizer, "momentum", *args, **kwargs)  # type: ignore[call-arg]


@dataclass(eq=False)
class ConstantLR(LRSchedulerMixin, ConstantParamScheduler):
    """:class:`ConstantParamScheduler` of the learning rate."""


@dataclass(eq=False)
class ConstantMomentum(MomentumSchedulerMixin, ConstantParamScheduler):
    """:class:`ConstantParamScheduler` of the momentum."""


@dataclass(eq=False)
class LinearLR(LRSchedulerMixin, LinearParamScheduler):
    """:class:`LinearParamScheduler` of the learning rate."""


@dataclass(eq=False)
class LinearMomentum(MomentumSchedulerMixin, LinearParamScheduler):
    """:class:`LinearParamScheduler` of the momentum."""


@dataclass(eq=False)
class StepLR(LRSchedulerMixin, StepParamScheduler):
    """:class:`StepParamScheduler` of the learning rate."""


@dataclass(eq=False)
class StepMomentum(MomentumSchedulerMixin, StepParamScheduler):
    """:class:`StepParamScheduler` of the momentum."""


@dataclass(eq=False)
class MultiStepLR(LRSchedulerMixin, MultiStepParamScheduler):
    """:class:`MultiStepParamScheduler` of the learning rate."""


@dataclass(eq=False)
class MultiStepMomentum(MomentumSchedulerMixin, MultiStepParamScheduler):
    """:class:`MultiStepParamScheduler` of the momentum."""


@dataclass(eq=False)
class ExponentialLR(LRSchedulerMixin, ExponentialParamScheduler):
    """:class:`ExponentialParamScheduler` of the learning rate."""


@dataclass(eq=False)
class ExponentialMomentum(MomentumSchedulerMixin, ExponentialParamScheduler):
    """:class:`ExponentialParamScheduler` of the momentum."""


@dataclass(eq=False)
class CosineAnnealingLR(LRSchedulerMixin, CosineAnnealingParamScheduler):
    """:class:`CosineAnnealingParamScheduler` of the learning rate."""


@dataclass(eq=False)
class CosineAnnealingMomentum(MomentumSchedulerMixin, CosineAnnealingParamScheduler):
    """:class:`CosineAnnealingParamScheduler` of the momentum."""


@dataclass(eq=False)
class PolyLR(LRSchedulerMixin, PolyParamScheduler):
    """:class:`PolyParamScheduler` of the learning rate."""


@dataclass(eq=False)
class PolyMomentum(MomentumSchedulerMixin, PolyParamScheduler):
    """:class:`PolyParamScheduler` of the momentum."""


@dataclass(eq=False)
class CosineRestartLR(LRSchedulerMixin, CosineRestartParamScheduler):
    """:class:`CosineRestartParamScheduler` of the learning rate."""


@dataclass(eq=False)
class CosineRestartMomentum(MomentumSchedulerMixin, CosineRestartParamScheduler):
    """:class:`CosineRestartParamScheduler` of the momentum."""


@dataclass(eq=False)
class OneCycleLR(LRSchedulerMixin, OneCycleParamScheduler):
    """:class:`OneCycleParamScheduler` of the learning rate."""


@dataclass(eq=False)
class ReduceOnPlateauLR(LRSchedulerMixin, ReduceOnPlateauParamScheduler):
    """:class:`ReduceOnPlateauParamScheduler` of the learning rate."""


@dataclass(eq=False)
class ReduceOnPlateauMomentum(MomentumSchedulerMixin, ReduceOnPlateauParamScheduler):
    """:class:`ReduceOnPlateauParamScheduler` of the momentum."""


for _name, _member in [*globals().items()]:
    if (
        _name.endswith(("LR", "Momentum", "ParamScheduler"))
        and _member is not GroupParamScheduler
    ):
        PARAM_SCHEDULERS.register(_member)
