"""What reduces a parameter of an optimizer's groups when a metric no longer improves."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from hooktrain.solver.group_scheduler import GroupParamScheduler
from hooktrain.solver.group_values import read
from hooktrain.solver.param_curves import Curve, of_group


def reduce_on_plateau(
    k: int,
    length: int,
    *,
    monitor: str = "loss",
    rule: Literal["less", "greater"] = "less",
    factor: float = 0.1,
    patience: int = 10,
    threshold: float = 1e-4,
    threshold_rule: Literal["rel", "abs"] = "rel",
    cooldown: int = 0,
    min_value: float | Sequence[float] = 0.0,
    eps: float = 1e-8,
) -> float:
    """``factor`` after more than ``patience`` values of a metric without improvement, otherwise 1.

    Call ``step({monitor: value})`` after each evaluation. ``step()`` without metrics only counts an
    epoch, for ``begin`` and ``end``: outside of that range metrics are ignored.

    Args:
        k: how many values in a row were no improvement.
        length: makes no difference.
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
    if rule not in ("less", "greater"):
        raise ValueError(f"rule must be 'less' or 'greater': {rule!r}")
    if threshold_rule not in ("rel", "abs"):
        raise ValueError(f"threshold_rule must be 'rel' or 'abs': {threshold_rule!r}")
    if not 0 <= factor < 1:
        raise ValueError(f"factor must lie in [0, 1): {factor!r}")
    if not threshold >= 0:
        raise ValueError(f"threshold must not be negative: {threshold!r}")
    return factor if k > patience else 1.0


def is_better(
    value: float, best: float | None, *, rule: str, threshold: float, threshold_rule: str
) -> bool:
    """Whether a value is an improvement on the best one; the first one always is."""
    if best is None:
        return True
    margin = threshold * (best if threshold_rule == "rel" else 1.0)
    return value < best - margin if rule == "less" else value > best + margin


PLATEAU = Curve(reduce_on_plateau, per_group=["min_value"])


class PlateauScheduler(GroupParamScheduler):
    """Reduces one parameter of an optimizer's groups when a metric no longer improves.

    Attributes:
        best: the best value so far, or None.
        num_bad_epochs: how many values in a row were no improvement.
        cooldown_counter: how many values the cooldown still lasts.
    """

    PROGRESS: ClassVar[tuple[str, ...]] = ("best", "num_bad_epochs", "cooldown_counter")

    monitor: str
    cooldown: int
    min_value: float | Sequence[float]
    eps: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.best: float | None = None
        self.num_bad_epochs = 0
        self.cooldown_counter = 0

    def _check_arguments(self) -> None:
        if not self.by_epoch:
            raise ValueError(
                f"by_epoch=False: {type(self).__name__} steps after evaluations, and its begin and "
                f"end are epochs"
            )
        super()._check_arguments()

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
        share = self._take_in(float(metrics[self.monitor]))
        if share < 1:
            self._reduce(share)

    def _take_in(self, value: float) -> float:
        """Count a value of the metric: what to multiply with."""
        if self._bound(is_better)(value, self.best):
            self.best = value
            self.num_bad_epochs = 0
        else:
            self.num_bad_epochs += 1
        if self.cooldown_counter > 0:
            self.cooldown_counter -= 1
            self.num_bad_epochs = 0
        share = self._share(self.num_bad_epochs, self.end - self.begin)
        if share < 1:
            self.cooldown_counter = self.cooldown
            self.num_bad_epochs = 0
        return share

    def _reduce(self, share: float) -> None:
        for i, group in enumerate(self.groups()):
            # Synchronises with the device, if it is a tensor there.
            current = float(read(group, self.param_name))
            reduced = max(current * share, of_group(self.min_value, i))
            if current - reduced > self.eps:
                self._write(group, reduced)
