"""What reduces a parameter of an optimizer's groups when a metric no longer improves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hooktrain.solver.group_scheduler import GroupParamScheduler, Scheduled


@dataclass(eq=False)
class ReduceOnPlateau(Scheduled):
    """Multiplies by ``factor`` when a metric has not improved for more than ``patience`` values.

    Call ``step({monitor: value})`` after each evaluation. ``step()`` without metrics only counts an
    epoch, for ``begin`` and ``end``: outside of that range metrics are ignored.

    Args:
        monitor: the name of the metric.
        rule: ``"less"`` if less is better, ``"greater"`` if more is.
        factor: what to multiply with, in [0, 1).
        patience: how many values in a row may be no improvement.
        threshold: by how much a value must be better than the best one, not negative.
        threshold_rule: ``"rel"``, a share of the best value, or ``"abs"``.
        cooldown: how many values after a reduction do not count as bad.
        min_value: the least value to reduce to; or one for each parameter group.
        eps: a reduction by no more than this is not made.
    """

    monitor: str = "loss"
    rule: Literal["less", "greater"] = "less"
    factor: float = 0.1
    patience: int = 10
    threshold: float = 1e-4
    threshold_rule: Literal["rel", "abs"] = "rel"
    cooldown: int = 0
    min_value: float | Sequence[float] = 0.0
    eps: float = 1e-8

    def check(self, groups: int) -> None:
        """Refuse impossible arguments, for an optimizer with so many parameter groups.

        Raises:
            ValueError: for an argument out of range.
        """
        if self.rule not in ("less", "greater"):
            raise ValueError(f"rule must be 'less' or 'greater': {self.rule!r}")
        if self.threshold_rule not in ("rel", "abs"):
            raise ValueError(f"threshold_rule must be 'rel' or 'abs': {self.threshold_rule!r}")
        if not 0 <= self.factor < 1:
            raise ValueError(f"factor must lie in [0, 1): {self.factor!r}")
        if not self.threshold >= 0:
            raise ValueError(f"threshold must not be negative: {self.threshold!r}")
        if isinstance(self.min_value, Sequence) and len(self.min_value) != groups:
            raise ValueError(
                f"min_value must be a number or one for each of the {groups} parameter groups: "
                f"{self.min_value!r}"
            )

    def is_better(self, value: float, best: float | None) -> bool:
        """Whether a value is an improvement on the best one; the first one always is."""
        if best is None:
            return True
        margin = self.threshold * (best if self.threshold_rule == "rel" else 1.0)
        return value < best - margin if self.rule == "less" else value > best + margin

    def least(self, group: int) -> float:
        """The least value of a group."""
        if not isinstance(self.min_value, Sequence):
            return self.min_value
        # The settings that stand beside the groups have the last one's.
        return self.min_value[min(group, len(self.min_value) - 1)]


@dataclass(eq=False)
class PlateauScheduler(GroupParamScheduler, ReduceOnPlateau):
    """Applies :class:`ReduceOnPlateau` to the groups of an optimizer.

    Attributes:
        best: the best value so far, or None.
        num_bad_epochs: how many values in a row were no improvement.
        cooldown_counter: how many values the cooldown still lasts.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._go_to(self.global_step + 1)
        self.best: float | None = None
        self.num_bad_epochs = 0
        self.cooldown_counter = 0

    def _check_arguments(self) -> None:
        if not self.by_epoch:
            raise ValueError(
                f"by_epoch=False: {type(self).__name__} steps after evaluations, and its begin and "
                f"end are epochs"
            )
        self.check(self.own_groups)

    def step(self, metrics: Mapping[str, float] | None = None) -> None:
        """Take in the metrics of an evaluation; without any, count an epoch.

        Raises:
            TypeError: if ``metrics`` is not a dict.
            KeyError: if it does not have the metric.
        """
        if metrics is None:
            self._go_to(self.global_step + 1)
            return
        if not isinstance(metrics, Mapping):
            raise TypeError(f"metrics must be a dict of numbers by name: {metrics!r}")
        if not self.begin <= self.global_step < self.end:
            return
        if self.monitor not in metrics:
            raise KeyError(f"there is no metric {self.monitor!r} to monitor in {sorted(metrics)}")
        if self._wants_less(float(metrics[self.monitor])):
            self._reduce()

    def _wants_less(self, value: float) -> bool:
        """Take in a value of the metric: whether patience is at its end."""
        if self.is_better(value, self.best):
            self.best = value
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

    def _reduce(self) -> None:
        for i, group in enumerate(self.groups()):
            # Synchronises with the device, if it is a tensor there.
            current = float(self._read(group))
            reduced = max(current * self.factor, self.least(i))
            if current - reduced > self.eps:
                self._write(group, reduced)

    def state_dict(self) -> dict[str, Any]:
        """Also the best value and the counters."""
        progress = {
            "best": self.best,
            "num_bad_epochs": self.num_bad_epochs,
            "cooldown_counter": self.cooldown_counter,
        }
        return {**super().state_dict(), **progress}

    def _load_progress(self, state: Mapping[str, Any]) -> None:
        self.best = state["best"]
        self.num_bad_epochs = state["num_bad_epochs"]
        self.cooldown_counter = state["cooldown_counter"]
