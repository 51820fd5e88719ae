"""What applies a curve to one parameter of an optimizer's groups, step by step."""

import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from torch import Tensor

from hooktrain.utils.names import did_you_mean

logger = logging.getLogger(__name__)

INF = 10**9  # The end of a range without one.

S = TypeVar("S", bound="GroupParamScheduler")


class HasParamGroups(Protocol):
    """A torch optimizer or an :class:`~hooktrain.solver.OptimWrapper`."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups."""


class Scheduled:
    """What each scheduler has."""

    optimizer: HasParamGroups
    param_name: str


# The classes below are combined by inheritance, so that each scheduler is a dataclass with all its
# arguments in its signature. They stand there in the reverse order of the bases:
# LinearLR(CurveScheduler, LinearCurve, OfLR) takes the optimizer, those of the line, the range.


@dataclass(eq=False)
class OfLR(Scheduled):
    """The learning rate."""

    optimizer: HasParamGroups = field(repr=False)
    param_name = "lr"


@dataclass(eq=False)
class OfMomentum(Scheduled):
    """The momentum: of Adam and its kin, the first of ``betas``."""

    optimizer: HasParamGroups = field(repr=False)
    param_name = "momentum"


@dataclass(eq=False)
class OfParam(Scheduled):
    """Any number that the parameter groups have, such as ``"weight_decay"``."""

    optimizer: HasParamGroups = field(repr=False)
    param_name: str


@dataclass(eq=False)
class LastStepFirst:
    """Puts ``last_step`` before ``begin``, where MMEngine has it so."""

    last_step: int = -1


@dataclass(eq=False)
class GroupParamScheduler(Scheduled):
    """Schedules one parameter of an optimizer's groups in a range of steps.

    Args:
        optimizer: a torch optimizer or an :class:`~hooktrain.solver.OptimWrapper`.
        begin: the first step of the range, at least 0.
        end: the step after the last one of the range; from then on the value stays.
        last_step: the last finished step inside the range, of a run that goes on without a saved
            state. The groups then have their ``initial_<param_name>``. -1 begins anew.
        by_epoch: whether a step is an epoch, not an iteration. Who calls ``step`` looks at this.
        verbose: log each change.

    Attributes:
        global_step: the current step. The constructor makes step 0.
        last_step: the current or last step inside the range, counted from its beginning.
        initial_values: the value of each group when it was scheduled for the first time.

    Raises:
        TypeError: if ``optimizer`` has no list of parameter groups.
        ValueError: for a range that is empty or begins before 0, or a parameter that a group does
            not have.
        KeyError: with ``last_step``, if a group has no initial value.
    """

    begin: int = 0
    end: int = INF
    last_step: int = -1
    by_epoch: bool = True
    verbose: bool = False

    def __post_init__(self) -> None:
        groups = getattr(self.optimizer, "param_groups", None)
        if not isinstance(groups, list):
            hint = "; make one scheduler for each of them" if isinstance(groups, dict) else ""
            raise TypeError(
                f"optimizer must be a torch optimizer or an OptimWrapper: {self.optimizer!r}{hint}"
            )
        if not 0 <= self.begin < self.end:
            raise ValueError(
                f"the range must fit 0 <= begin < end: begin={self.begin!r}, end={self.end!r}"
            )
        if self.last_step < -1:
            raise ValueError(f"last_step must be at least -1: {self.last_step!r}")
        self._check_arguments()
        self.initial_values = [self._initial_value(group) for group in groups]
        self.global_step = -1 if self.last_step < 0 else self.begin + self.last_step

    def _go_to(self, step: int) -> bool:
        """Set the current step; whether it lies inside the range."""
        self.global_step = step
        self.last_step = max(min(step, self.end - 1) - self.begin, -1)
        return self.begin <= step < self.end

    def _check_arguments(self) -> None:
        """Refuse impossible arguments of a subclass, before anything is written."""

    def _initial_value(self, group: dict[str, Any]) -> float:
        key = f"initial_{self.param_name}"
        value = self._read(group)
        if self.last_step < 0:
            # Synchronises with the device once, if the value is a tensor there.
            group.setdefault(key, float(value))
        elif key not in group:
            raise KeyError(f"to go on from last_step={self.last_step}, each group needs {key!r}")
        if self.param_name == "momentum":
            group["momentum"] = value  # For those who log it, also where it stands in betas.
        return float(group[key])

    @classmethod
    def build_iter_from_epoch(
        cls: type[S],
        *args: Any,
        epoch_length: int | None = None,
        **kwargs: Any,
    ) -> S:
        """Make a scheduler that steps in iterations of arguments that count epochs.

        Args:
            args: as for the constructor.
            epoch_length: the number of iterations of an epoch.
            kwargs: as for the constructor.

        Raises:
            ValueError: if ``by_epoch`` is False, or ``epoch_length`` is not at least 1.
        """
        if epoch_length is None or epoch_length < 1:
            raise ValueError(f"epoch_length must be at least 1: {epoch_length!r}")
        # Untouched what is not given, so that it has its default.
        given = inspect.signature(cls).bind(*args, **kwargs).arguments
        if not given.get("by_epoch", True):
            raise ValueError(f"by_epoch=False: these arguments of {cls.__name__} are iterations")
        for name in ("begin", "end", *getattr(cls, "STEP_ARGUMENTS", ())):
            value = given.get(name)
            if isinstance(value, Sequence):
                given[name] = [int(number * epoch_length) for number in value]
            elif value is not None and value != INF:
                given[name] = int(value * epoch_length)
        return cls(**{**given, "by_epoch": False})

    @property
    def own_groups(self) -> int:
        """The number of the optimizer's groups, without the settings that a wrapper adds."""
        added = getattr(self.optimizer, "base_param_settings", None) is not None
        return len(self.optimizer.param_groups) - added

    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups.

        Raises:
            ValueError: if they are more or fewer than at first.
        """
        groups = self.optimizer.param_groups
        if len(groups) != len(self.initial_values):
            raise ValueError(
                f"the optimizer now has {len(groups)} parameter groups, and {type(self).__name__} "
                f"was made for {len(self.initial_values)}: make a new one after adding groups"
            )
        return groups

    def _read(self, group: dict[str, Any]) -> Any:
        """The value of a group: a number, or a tensor."""
        if self.param_name == "momentum" and "betas" in group:
            return group["betas"][0]
        if self.param_name not in group:
            raise ValueError(
                f"the optimizer's groups have no {self.param_name!r} to schedule"
                + did_you_mean(self.param_name, group)
            )
        return group[self.param_name]

    def _write(self, group: dict[str, Any], value: float) -> None:
        """Set the value of a group."""
        if self.verbose:
            logger.info("Step %d: %s becomes %.4e", self.global_step, self.param_name, value)
        if isinstance(old := self._read(group), Tensor):
            # In place, for captured graphs; no synchronisation.
            old.fill_(value)
            return
        if self.param_name == "momentum" and "betas" in group:
            group["betas"] = (value, *group["betas"][1:])
        group[self.param_name] = value

    def get_last_value(self) -> list[float]:
        """The current value of each group; waits for the device of those that are tensors."""
        return [float(self._read(group)) for group in self.groups()]

    def state_dict(self) -> dict[str, Any]:
        """Where the scheduler stands, and in which range; its other arguments are not part of it.

        ``group_values`` are the current values of the groups.
        """
        return {
            "param_name": self.param_name,
            "by_epoch": self.by_epoch,
            "begin": self.begin,
            "end": self.end,
            "last_step": self.last_step,
            "global_step": self.global_step,
            "initial_values": list(self.initial_values),
            "group_values": self.get_last_value(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where the state was taken, and give the groups their values of then.

        The arguments stay those of this scheduler: another range than that of the state is used,
        with a warning. States of MMEngine's schedulers load too.

        Raises:
            KeyError: if an entry is missing.
            ValueError: if the state is of another parameter or other groups, or counts iterations
                where this scheduler counts epochs. Nothing is loaded then.
        """
        state = self._checked_state(state_dict)
        self._go_to(int(state["global_step"]))
        if [state["begin"], state["end"]] != [self.begin, self.end]:
            logger.warning(
                "%s goes on at step %d with the range [%d, %d), which was [%d, %d) when saved",
                *(type(self).__name__, self.global_step, self.begin, self.end),
                *(state["begin"], state["end"]),
            )
        self.initial_values = list(state["initial_values"])
        for group, value in zip(self.groups(), state["group_values"], strict=True):
            if self._read(group) != value:  # Synchronises with the device, if it is a tensor there.
                self._write(group, value)
        self._load_progress(state)

    def _checked_state(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """The state, by our names, if it fits."""
        state = dict(state_dict)
        if "_global_step" in state:  # MMEngine's names
            first = state.get("base_values", self.initial_values)
            state |= {"global_step": state["_global_step"], "group_values": state["_last_value"]}
            state |= {"initial_values": first, "start_values": first, "written_values": []}
        name = type(self).__name__
        if missing := [key for key in self.state_dict() if key not in state]:
            raise KeyError(f"the state of {name} has no {missing}, only {sorted(state)}")
        for key, mine in (("param_name", self.param_name), ("by_epoch", self.by_epoch)):
            if state[key] != mine:
                raise ValueError(f"the state of {name} is of {key}={state[key]!r}, not {mine!r}")
        count = len(self.initial_values)
        for key, values in state.items():
            not_begun = key == "written_values" and not values
            if key.endswith("_values") and len(values) != count and not not_begun:
                raise ValueError(
                    f"the state of {name} has {len(values)} {key}, and the optimizer {count} "
                    f"parameter groups"
                )
        return state

    def _load_progress(self, state: Mapping[str, Any]) -> None:
        """Take back what a subclass added to the state."""
