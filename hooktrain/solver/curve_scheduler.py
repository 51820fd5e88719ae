"""What applies a curve to a parameter of an optimizer's groups."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, tensor

from hooktrain.solver.group_scheduler import GroupParamScheduler
from hooktrain.solver.param_curves import Curve


@dataclass(eq=False)
class CurveScheduler(GroupParamScheduler, Curve):
    """Applies a curve: at step ``k`` of the range, ``floor + (base - floor) * share(k)``.

    The base is the value where the range begins. Whoever else changes the value in between changes
    the base with it, so that schedulers compose in the order in which they are stepped. MMEngine
    multiplies the current value at each step, which is the same where nothing is 0; this neither
    drifts, nor divides by a share of 0: then the base stays as it was.

    Attributes:
        start_values: the base of each group.
        written_values: what this scheduler set last; empty before its range.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.start_values = list(self.initial_values)
        self.written_values: list[float] = []
        self._versions: dict[int, tuple[Tensor, int]] = {}
        self.step()

    def _check_arguments(self) -> None:
        self.check(self.own_groups)

    def step(self) -> None:
        """Go on by one step; inside the range, set the values.

        Raises:
            ValueError: if parameter groups were added or removed, or a cycle is at its end.
        """
        if not self._go_to(self.global_step + 1):
            return
        share = self.share(self.last_step, self.end - self.begin)
        written = []
        for i, group in enumerate(self.groups()):
            floor = self.floor(self.initial_values[i])
            base = self.start_values[i] = self._base(i, self._read(group), floor)
            # This form gives exactly the base at 1, and exactly the floor at 0.
            written.append(base * share + floor * (1 - share))
            self._write(group, written[i])
            if isinstance(value := self._read(group), Tensor):
                self._versions[i] = (value, value._version)
        self.written_values = written

    def _base(self, i: int, value: float | Tensor, floor: float) -> float:
        """The base of a group, whose value is now ``value``."""
        restart = self.restart(self.last_step, i, self.initial_values[i])
        if restart is not None:
            return restart
        if self.last_step > 0 and self._is_mine(i, value):
            return self.start_values[i]
        # From here on it waits for the device, if the value is a tensor there.
        if self.last_step == 0:
            return float(value)
        share = self.share(self.last_step - 1, self.end - self.begin)
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

    def state_dict(self) -> dict[str, Any]:
        """Also the bases and what was set last."""
        progress = {
            "start_values": list(self.start_values),
            "written_values": list(self.written_values),
        }
        return {**super().state_dict(), **progress}

    def _load_progress(self, state: Mapping[str, Any]) -> None:
        self.start_values = list(state["start_values"])
        self.written_values = list(state["written_values"])
        self._versions = {}
