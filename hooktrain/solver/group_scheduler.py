"""The class that applies a curve to one parameter of an optimizer's groups, step by step."""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any, ClassVar, TypeVar

from torch import Tensor, tensor

from hooktrain.solver.group_values import HasParamGroups, read, write
from hooktrain.solver.param_curves import INF, Curve
from hooktrain.solver.scheduler_arguments import bind, check_limits, curve_arguments, keywords

logger = logging.getLogger(__name__)

S = TypeVar("S", bound="GroupParamScheduler")
T = TypeVar("T")


class GroupParamScheduler:
    """Schedules one parameter of an optimizer's groups in a range of steps.

    A curve sets ``floor + (base - floor) * g(k)`` at step ``k`` of the range. The base is the value
    where the range begins. Whoever else changes the value in between changes the base with it, so
    that schedulers compose in the order in which they are stepped. MMEngine multiplies the current
    value at each step, which is the same where nothing is 0; this neither drifts, nor divides by a
    share of 0: then the base stays as it was.

    Args:
        optimizer: a torch optimizer or an :class:`~hooktrain.solver.OptimWrapper`.
        begin: the first step of the range, at least 0.
        end: the step after the last one of the range; from then on the value stays.
        last_step: the last finished step inside the range, of a run that goes on without a saved
            state. The groups then have their ``initial_<param_name>``. -1 begins anew.
        by_epoch: whether a step is an epoch, not an iteration. Who calls ``step`` looks at this.
        verbose: log each change.

    Attributes:
        arguments: those of the curve, by name. They are also attributes, which cannot be set.
        global_step: the current step. The constructor makes step 0.
        last_step: the current or last step inside the range, counted from its beginning.
        initial_values: the value of each group when it was scheduled for the first time.
        start_values: the base of each group.
        written_values: what this scheduler set last; empty before its range.

    Raises:
        TypeError: if ``optimizer`` has no list of parameter groups, or for an unknown argument.
        ValueError: for an argument out of range, a range that is empty or begins before 0, or a
            parameter that a group does not have. Nothing is written then.
        KeyError: with ``last_step``, if a group has no initial value.
    """

    # What make_scheduler fills in.
    curve: ClassVar[Curve]
    __signature__: ClassVar[inspect.Signature]
    param_name: str

    # What changes from step to step and is part of the state.
    PROGRESS: ClassVar[tuple[str, ...]] = ("start_values", "written_values")

    optimizer: HasParamGroups
    begin: int
    end: int
    last_step: int
    by_epoch: bool
    verbose: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        defaults = {p.name: p.default for p in self.__signature__.parameters.values()}
        given = defaults | bind(type(self), args, kwargs)
        self.arguments = {name: given.pop(name) for name in curve_arguments(self.curve)}
        for name, value in given.items():
            setattr(self, name, value)
        self._share = self._bound(self.curve.function)
        self._floor = self._bound(self.curve.floor)
        self._restart = self._bound(self.curve.restart)
        groups = getattr(self.optimizer, "param_groups", None)
        if not isinstance(groups, list):
            hint = "; make one scheduler for each of them" if isinstance(groups, dict) else ""
            raise TypeError(
                f"optimizer must be a torch optimizer or an OptimWrapper: {self.optimizer!r}{hint}"
            )
        self._check_arguments()
        self.initial_values = [self._initial_value(group) for group in groups]
        self.global_step = -1 if self.last_step < 0 else self.begin + self.last_step
        self.start_values = list(self.initial_values)
        self.written_values: list[float] = []
        self._floors = [self._floor(initial) for initial in self.initial_values]
        self._versions: dict[int, tuple[Tensor, int]] = {}
        self.step()

    def _bound(self, function: Callable[..., T]) -> Callable[..., T]:
        """A function with the arguments that it takes by keyword."""
        return partial(function, **{name: self.arguments[name] for name in keywords(function)})

    def _check_arguments(self) -> None:
        """Refuse impossible arguments, before anything is written."""
        if not 0 <= self.begin < self.end:
            raise ValueError(
                f"the range must fit 0 <= begin < end: begin={self.begin!r}, end={self.end!r}"
            )
        if self.last_step < -1:
            raise ValueError(f"last_step must be at least -1: {self.last_step!r}")
        # A wrapper of several groups adds one, for the settings beside them.
        added = getattr(self.optimizer, "base_param_settings", None) is not None
        check_limits(self.curve, self.arguments, len(self.optimizer.param_groups) - added)
        # The functions themselves refuse what else is impossible.
        self._restart(0, 0, 0.0)
        self._share(0, self.end - self.begin)
        self._floor(0.0)

    def _initial_value(self, group: dict[str, Any]) -> float:
        key = f"initial_{self.param_name}"
        value = read(group, self.param_name)
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
        cls: type[S], *args: Any, epoch_length: int | None = None, **kwargs: Any
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
        given = bind(cls, args, kwargs)
        if not given.get("by_epoch", True):
            raise ValueError(f"by_epoch=False: these arguments of {cls.__name__} are iterations")
        for name in ("begin", "end", *cls.curve.step_arguments):
            value = given.get(name)
            if isinstance(value, Sequence):
                given[name] = [int(number * epoch_length) for number in value]
            elif value is not None and value != INF:
                given[name] = int(value * epoch_length)
        return cls(**{**given, "by_epoch": False})

    def __repr__(self) -> str:
        names = [name for name in self.__signature__.parameters if name != "optimizer"]
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{type(self).__name__}({shown})"

    def step(self) -> None:
        """Go on by one step; inside the range, set the values.

        Raises:
            ValueError: if parameter groups were added or removed, or a cycle is at its end.
        """
        if not self._go_to(self.global_step + 1):
            return
        share = self._share(self.last_step, self.end - self.begin)
        written = []
        for i, group in enumerate(self.groups()):
            value = read(group, self.param_name)
            base = self.start_values[i] = self._base(i, value)
            # This form gives exactly the base at 1, and exactly the floor at 0.
            written.append(base * share + self._floors[i] * (1 - share))
            self._write(group, written[i])
            if isinstance(value, Tensor):  # still the same, filled in place
                self._versions[i] = (value, value._version)
        self.written_values = written

    def _go_to(self, step: int) -> bool:
        """Set the current step; whether it lies inside the range."""
        self.global_step = step
        self.last_step = max(min(step, self.end - 1) - self.begin, -1)
        return self.begin <= step < self.end

    def _base(self, i: int, value: float | Tensor) -> float:
        """The base of a group, whose value is now ``value``."""
        base = self._restart(self.last_step, i, self.initial_values[i])
        if base is not None:
            return base
        if self.last_step > 0 and self._is_mine(i, value):
            return self.start_values[i]
        # From here on it waits for the device, if the value is a tensor there.
        if self.last_step == 0:
            return float(value)
        share, floor = self._share(self.last_step - 1, self.end - self.begin), self._floors[i]
        return floor + (float(value) - floor) / share if share else self.start_values[i]

    def _is_mine(self, i: int, value: float | Tensor) -> bool:
        """Whether nobody has changed the value since this scheduler set it."""
        if not self.written_values:
            return False
        if not isinstance(value, Tensor):
            return value == self.written_values[i]
        known, version = self._versions.get(i, (None, -1))
        if known is value and version == value._version:
            return True
        # It waits for the device, since somebody else has set or loaded it.
        return value.item() == tensor(self.written_values[i], dtype=value.dtype).item()

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

    def _write(self, group: dict[str, Any], value: float) -> None:
        if self.verbose:
            logger.info("Step %d: %s becomes %.4e", self.global_step, self.param_name, value)
        write(group, self.param_name, value)

    def get_last_value(self) -> list[float]:
        """The current value of each group; waits for the device of those that are tensors."""
        return [float(read(group, self.param_name)) for group in self.groups()]

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, in which range, and the values; other arguments are not part of it."""
        return {
            "param_name": self.param_name,
            "by_epoch": self.by_epoch,
            "begin": self.begin,
            "end": self.end,
            "last_step": self.last_step,
            "global_step": self.global_step,
            "initial_values": list(self.initial_values),
            "group_values": self.get_last_value(),
            **{name: copy(getattr(self, name)) for name in self.PROGRESS},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where the state was taken, and give the groups their values of then.

        The arguments stay those of this scheduler: another range than that of the state is used,
        with a warning. If the optimizer has other groups than then, they keep the values that its
        own state has given them, and what lies ahead follows from these. States of MMEngine's
        schedulers load too.

        Raises:
            KeyError: if an entry is missing.
            ValueError: if the state is of another parameter, or counts iterations where this
                scheduler counts epochs. Nothing is loaded then.
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
            # Synchronises with the device, if the value is a tensor there.
            if read(group, self.param_name) != value:
                self._write(group, value)
        for name in self.PROGRESS:
            setattr(self, name, copy(state[name]))
        self._floors = [self._floor(initial) for initial in self.initial_values]
        self._versions = {}

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
        counts = {len(values) for key, values in state.items() if key.endswith("_values")}
        if counts - {0} != {len(self.initial_values)}:
            logger.warning("%s takes its values from the groups, since others were saved", name)
            first = [float(group[f"initial_{self.param_name}"]) for group in self.groups()]
            state |= {"initial_values": first, "group_values": self.get_last_value()}
            state |= {"start_values": first, "written_values": []}
        return state
