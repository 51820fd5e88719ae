"""What all of MMEngine's schedulers have in common: a parameter, a range of steps, a state."""

import logging
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from hooktrain.solver.optim_wrapper import OptimWrapper
from hooktrain.utils.registry import refuse_overrides

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
        refuse_overrides(cls, dict.fromkeys(_NOT_CALLED, "override _get_value() or step()"))

    def __post_init__(self) -> None:
        self._check_arguments()
        self.base_values = [self._base_value(group) for group in self.optimizer.param_groups]
        self.global_step = -1 if self.last_step < 0 else self.begin + self.last_step
        self.start_values = list(self.base_values)
        self.written_values: list[float | None] = [None] * len(self.base_values)
        self.step()

    def _check_arguments(self) -> None:
        """Refuse impossible arguments, before anything is written."""
        if not isinstance(getattr(self.optimizer, "param_groups", None), list):
            raise TypeError(f"optimizer must be one optimizer or OptimWrapper: {self.optimizer!r}")
        if not 0 <= self.begin < self.end:
            raise ValueError(f"0 <= begin < end must hold: begin={self.begin!r}, end={self.end!r}")
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
            raise ValueError(f"give a number, or one for each of the {groups} groups: {value!r}")
        return values + values[-1:] * added

    def _read(self, group: dict[str, Any]) -> Any:
        """The value of a group, a number or a tensor; a momentum may be the first of ``betas``."""
        name = self.param_name
        return group["betas"][0] if name == "momentum" and "betas" in group else group[name]

    def _write(self, group: dict[str, Any], value: Any) -> None:
        if self.verbose:
            logger.info("Step %d: %s becomes %.4e", self.global_step, self.param_name, value)
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
            raise ValueError(f"by_epoch=False: these arguments of {cls.__name__} are iterations")
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
        raise NotImplementedError(f"{type(self).__name__} must define _share(k) or _get_value()")

    def _floor(self, base_value: float) -> float:
        """The value where the share is 0, of a group that had ``base_value`` at first."""
        return 0.0

    def _base(self, i: int, value: Any, floor: float) -> Any:
        """The base of group ``i``, whose value is now ``value``; a tensor if that is one."""
        if self.last_step == 0:
            return float(value)  # Synchronises with the device once, if it is a tensor there.
        # A tensor always counts as changed: to compare it would synchronise with the device.
        changed = isinstance(value, Tensor) or value != self.written_values[i]
        if changed and (before := self._share(self.last_step - 1)):
            return floor + (value - floor) / before
        return self.start_values[i]

    def _groups(self) -> list[dict[str, Any]]:
        groups = self.optimizer.param_groups
        if len(groups) != len(self.base_values):
            raise ValueError(f"there are {len(groups)} parameter groups now: make a new {self!r}")
        return groups

    def get_last_value(self) -> list[float]:
        """The current value of each group; waits for the device of those that are tensors."""
        return [float(self._read(group)) for group in self._groups()]

    def state_dict(self) -> dict[str, Any]:
        """The current step, the range and the values; other arguments are not part of it."""
        names = ("param_name", "by_epoch", "begin", "end", "base_values", *self.PROGRESS)
        state = {name: copy(getattr(self, name)) for name in names}
        return state | {"_global_step": self.global_step, "_last_value": self.get_last_value()}

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
                raise ValueError(f"the state has {key}={state_dict[key]!r}, and this is {self!r}")
        first = [float(group.get(initial, self._read(group))) for group in groups]
        blank: dict[str, Any] = {"base_values": first, "start_values": first}
        blank["written_values"] = [None] * len(groups)
        state = blank | dict(state_dict)  # MMEngine's do not have all of these.
        if len(state["_last_value"]) != len(groups):
            logger.warning("%r takes its values from the groups, since others were saved", self)
            state |= blank | {"_last_value": self.get_last_value()}
        step, begin, end = state["_global_step"], state["begin"], state["end"]
        if (begin, end) != (self.begin, self.end):
            logger.warning("%r had the range [%d, %d) when it was saved", self, begin, end)
        vars(self).update({key: copy(state[key]) for key in ("base_values", *self.PROGRESS)})
        self.global_step = step
        self.last_step = max(min(step, self.end - 1) - self.begin, -1)
        for group, value in zip(groups, state["_last_value"], strict=True):
            self._write(group, value)
