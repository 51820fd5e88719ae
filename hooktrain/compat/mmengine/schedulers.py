"""MMEngine's other schedulers: restarts, one cycle, plateaus, and all of the momentum.

Those of the momentum schedule the first of Adam's betas where there is no momentum.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from hooktrain.compat.mmengine.param_scheduler import (
    ConstantParamScheduler,
    CosineAnnealingParamScheduler,
    ExponentialParamScheduler,
    Falling,
    GroupParamScheduler,
    LinearParamScheduler,
    LRSchedulerMixin,
    MultiStepParamScheduler,
    PolyParamScheduler,
    Schedulable,
    StepParamScheduler,
    half_cosine,
)


@dataclass(eq=False)
class CosineRestartParamScheduler(Falling):
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
        *self._starts, self._end = accumulate(self.periods, initial=0)
        self._weights = dict(zip(self._starts, self.restart_weights, strict=True))

    def _share(self, k: int) -> float:
        k = min(k, self._end - 1)
        period = bisect_right(self._starts, k) - 1
        return half_cosine((k - self._starts[period]) / self.periods[period])

    def _base(self, i: int, value: Any) -> Any:
        weight = self._weights.get(self.last_step)
        if weight is None:
            return super()._base(i, value)
        return self.base_values[i] * weight


@dataclass(eq=False)
class OneCycleParamScheduler(GroupParamScheduler):
    """From ``eta_max / div_factor`` up to ``eta_max``, then down to the final value.

    It overwrites what others do to the value. Smith and Topin (Super-Convergence,
    arXiv:1708.07120).

    Args:
        eta_max: the maximum.
        total_steps: the steps of a loop that steps after each iteration; one more raises
            ValueError. By default the length of the range.
        pct_start: the share of the steps that goes up, in [0, 1].
        anneal_strategy: ``"cos"`` or ``"linear"``.
        div_factor: the first value is the maximum divided by this.
        final_div_factor: the final value is the first one divided by this.
        three_phase: go down to the first value in as many steps as up, then to the final one.
    """

    SHARES = ("pct_start",)

    eta_max: float
    total_steps: int | None = None
    pct_start: float = 0.3
    anneal_strategy: str = "cos"
    div_factor: float = 25.0
    final_div_factor: float = 1e4
    three_phase: bool = False

    def _check_arguments(self) -> None:
        super()._check_arguments()
        if self.anneal_strategy not in ("cos", "linear"):
            raise ValueError(
                f"anneal_strategy must be 'cos' or 'linear': {self.anneal_strategy!r}"
            )

    def _share(self, k: int) -> float:
        total = self.total_steps or self._length()
        if k > total:
            raise ValueError(
                f"the cycle has total_steps={total!r}, and this is step {k}"
            )
        low = 1 / self.div_factor
        peak = self.pct_start * total - 1
        corners = [(0.0, low), (peak, 1.0), (total - 1, low / self.final_div_factor)]
        if self.three_phase:
            corners.insert(2, (2 * peak, low))
        for (start, first), (end, last) in pairwise(corners):
            if k > end:
                continue
            where = 1.0
            if end > start:
                where = (k - start) / (end - start)
            if self.anneal_strategy == "cos":
                where = 1 - half_cosine(where)
            return first * (1 - where) + last * where
        return corners[-1][1]

    def _base(self, i: int, value: Any) -> Any:
        return self.eta_max


@dataclass(eq=False)
class ReduceOnPlateauParamScheduler(GroupParamScheduler):
    """Multiplies by ``factor`` after more than ``patience`` metrics without improvement.

    Call ``step({monitor: value})`` after each evaluation. ``step()`` without metrics only
    counts an epoch, or with ``by_epoch=False`` an iteration, for ``begin`` and ``end``:
    outside of that range metrics are ignored.

    Args:
        monitor: the name of the metric.
        rule: ``"less"`` if less is better, ``"greater"`` if more is.
        factor: what to multiply by, below 1.
        patience: how many values in a row may be no improvement.
        threshold: by how much a value must be better than the best one, at least 0.
        threshold_rule: ``"rel"``, a share of the best value, or ``"abs"``.
        cooldown: how many values after a reduction do not count as bad.
        min_value: the least value to reduce to; or one for each parameter group.
        eps: a reduction by no more than this is not made.

    Attributes:
        best: the best value so far; infinite before the first.
        num_bad_epochs: how many values in a row were no improvement.
        cooldown_counter: how many values the cooldown still lasts.
    """

    _COUNTED = ("best", "num_bad_epochs", "cooldown_counter")

    monitor: str = "loss"
    rule: str = "less"
    factor: float = 0.1
    patience: int = 10
    threshold: float = 1e-4
    threshold_rule: str = "rel"
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
        count = len(self.optimizer.param_groups)
        least = self.min_value
        if not isinstance(least, Sequence):
            least = [least] * count
        if len(least) != count:
            raise ValueError(
                f"give one min_value, or one for each of the {count} groups: {least!r}"
            )
        self._least = least  # of each group
        is_known = self.rule in ("less", "greater")
        is_known &= self.threshold_rule in ("rel", "abs")
        if not is_known or self.threshold < 0 or not 0 <= self.factor < 1:
            raise ValueError(
                "rule must be 'less' or 'greater', threshold_rule 'rel' or 'abs', threshold "
                f"at least 0 and factor in [0, 1): {self!r}"
            )

    def step(self, metrics: Mapping[str, float] | None = None) -> None:
        """Take in the metrics of an evaluation; without any, count a step.

        Raises:
            KeyError: if the metric is not among them.
        """
        if metrics is None:
            self.global_step += 1
            return
        is_inside = self.begin <= self.global_step < self.end
        if not is_inside or not self._is_due(metrics[self.monitor]):
            return
        # Synchronises with the device, if the values are tensors there.
        values = self.get_last_value()
        groups = zip(self._groups(), values, self._least, strict=True)
        for group, value, least in groups:
            reduced = max(value * self.factor, least)
            if value - reduced > self.eps:
                self._write(group, reduced)

    def _is_better(self, value: float, best: float) -> bool:
        """Whether a value of the metric is an improvement; MMEngine's name."""
        sign = -1 if self.rule == "less" else 1
        margin = sign * self.threshold
        bound = best + margin
        if self.threshold_rule == "rel":
            bound = best * (1 + margin)
        return sign * value > sign * bound

    def _is_due(self, value: float) -> bool:
        """Count a value of the metric; whether to reduce."""
        self.num_bad_epochs += 1
        if self._is_better(value, self.best):
            self.best = float(value)
            self.num_bad_epochs = 0
        if self.cooldown_counter > 0:
            self.cooldown_counter -= 1
            self.num_bad_epochs = 0
        if self.num_bad_epochs <= self.patience:
            return False
        self.cooldown_counter = self.cooldown
        self.num_bad_epochs = 0
        return True

    def state_dict(self) -> dict[str, Any]:
        """That of every scheduler, the best value and the counters."""
        own = {name: getattr(self, name) for name in self._COUNTED}
        return super().state_dict() | own

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See :meth:`GroupParamScheduler.load_state_dict`."""
        super().load_state_dict(state_dict)
        for name in self._COUNTED:
            setattr(self, name, state_dict[name])


@dataclass(eq=False)
class CosineRestartLR(LRSchedulerMixin, CosineRestartParamScheduler):
    """:class:`CosineRestartParamScheduler` of the learning rate."""


@dataclass(eq=False)
class OneCycleLR(LRSchedulerMixin, OneCycleParamScheduler):
    """:class:`OneCycleParamScheduler` of the learning rate."""


@dataclass(eq=False)
class ReduceOnPlateauLR(LRSchedulerMixin, ReduceOnPlateauParamScheduler):
    """:class:`ReduceOnPlateauParamScheduler` of the learning rate."""


class MomentumSchedulerMixin:
    """Makes the scheduler that follows it among the bases one of the momentum.

    Where the groups have ``betas``, it is the first of them, and ``momentum`` beside them
    says what it is.
    """

    def __init__(self, optimizer: Schedulable, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, "momentum", *args, **kwargs)  # type: ignore[call-arg]

    def _read(self, group: dict[str, Any]) -> Any:
        if "betas" in group:
            return group["betas"][0]
        return group["momentum"]

    def _write(self, group: dict[str, Any], value: Any) -> Any:
        written = super()._write(group, value)  # type: ignore[misc]
        if "betas" in group:
            _, *others = group["betas"]
            group["betas"] = (group["momentum"], *others)
        return written

    def _base_value(self, group: dict[str, Any]) -> float:
        if "betas" in group:  # says that they are scheduled
            group.setdefault("initial_betas", group["betas"])
        group["momentum"] = self._read(group)
        base: float = super()._base_value(group)  # type: ignore[misc]
        return base


class ConstantMomentum(MomentumSchedulerMixin, ConstantParamScheduler):
    """:class:`ConstantParamScheduler` of the momentum."""


class LinearMomentum(MomentumSchedulerMixin, LinearParamScheduler):
    """:class:`LinearParamScheduler` of the momentum."""


class StepMomentum(MomentumSchedulerMixin, StepParamScheduler):
    """:class:`StepParamScheduler` of the momentum."""


class MultiStepMomentum(MomentumSchedulerMixin, MultiStepParamScheduler):
    """:class:`MultiStepParamScheduler` of the momentum."""


class ExponentialMomentum(MomentumSchedulerMixin, ExponentialParamScheduler):
    """:class:`ExponentialParamScheduler` of the momentum."""


class CosineAnnealingMomentum(MomentumSchedulerMixin, CosineAnnealingParamScheduler):
    """:class:`CosineAnnealingParamScheduler` of the momentum."""


class PolyMomentum(MomentumSchedulerMixin, PolyParamScheduler):
    """:class:`PolyParamScheduler` of the momentum."""


class CosineRestartMomentum(MomentumSchedulerMixin, CosineRestartParamScheduler):
    """:class:`CosineRestartParamScheduler` of the momentum."""


class ReduceOnPlateauMomentum(MomentumSchedulerMixin, ReduceOnPlateauParamScheduler):
    """:class:`ReduceOnPlateauParamScheduler` of the momentum."""
