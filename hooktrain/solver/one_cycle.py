"""The curve of the 1cycle policy: up to a maximum, and down to far below the start."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

from hooktrain.solver.param_curves import AT_LEAST_1, Curve, Limits


@dataclass(eq=False)
class OneCycleCurve(Curve):
    """From ``eta_max / div_factor`` up to ``eta_max``, then down to the final value.

    The values are absolute: what others do to them in between is overwritten. Each step up to
    ``total_steps`` may be made, as in a loop that steps after each of its iterations, and no more.
    From Smith and Topin, Super-Convergence, arXiv:1708.07120; in two phases, as fastai does it.

    Args:
        eta_max: the maximum; or one for each parameter group.
        total_steps: the length of the cycle. None takes the length of the range.
        pct_start: the share of the steps that go up, in [0, 1].
        anneal_strategy: ``"cos"``, half of a cosine in each phase, or ``"linear"``.
        div_factor: the first value is ``eta_max / div_factor``.
        final_div_factor: the final value is the first one divided by this.
        three_phase: go down to the first value in as many steps as up, then to the final one.

    >>> curve = OneCycleCurve(1.0, 6, 0.5, "linear", div_factor=5, final_div_factor=2)
    >>> [round(curve.share(k, length=100), 9) for k in range(6)]
    [0.2, 0.6, 1.0, 0.7, 0.4, 0.1]
    """

    LIMITS: ClassVar[dict[str, Limits]] = {"total_steps": AT_LEAST_1, "pct_start": (0, 1)}
    STEP_ARGUMENTS: ClassVar[tuple[str, ...]] = ("total_steps",)
    LENGTH_ARGUMENTS: ClassVar[tuple[str, ...]] = ("end", "total_steps")

    eta_max: float | Sequence[float]
    total_steps: int | None = None
    pct_start: float = 0.3
    anneal_strategy: Literal["cos", "linear"] = "cos"
    div_factor: float = 25.0
    final_div_factor: float = 1e4
    three_phase: bool = False

    def share(self, k: int, length: int) -> float:
        """The share of ``eta_max``.

        Raises:
            ValueError: if ``k`` is more than the number of steps.
        """
        total = self.total_steps or length
        if k > total:
            raise ValueError(f"the cycle has total_steps={total!r}, and this is step {k}")
        low, peak = 1 / self.div_factor, self.pct_start * total - 1
        corners = [(0.0, low), (peak, 1.0), (total - 1, low / self.final_div_factor)]
        if self.three_phase:
            corners.insert(2, (2 * peak, low))
        for (start, first), (end, last) in pairwise(corners):
            if k <= end:
                where = (k - start) / (end - start) if end > start else 1.0
                if self.anneal_strategy == "cos":
                    where = (1 - math.cos(math.pi * where)) / 2
                return first * (1 - where) + last * where
        return corners[-1][1]

    def restart(self, k: int, group: int, initial: float) -> float | None:
        """Always the maximum."""
        if not isinstance(self.eta_max, Sequence):
            return self.eta_max
        # The settings that stand beside the groups have the last one's.
        return self.eta_max[min(group, len(self.eta_max) - 1)]

    def check(self, groups: int) -> None:
        """Also refuse a list of another length, another strategy, and factors that are not > 0."""
        super().check(groups)
        if isinstance(self.eta_max, Sequence) and len(self.eta_max) != groups:
            raise ValueError(
                f"eta_max must be a number or one for each of the {groups} parameter groups: "
                f"{self.eta_max!r}"
            )
        if self.anneal_strategy not in ("cos", "linear"):
            raise ValueError(f"anneal_strategy must be 'cos' or 'linear': {self.anneal_strategy!r}")
        if not (self.div_factor > 0 and self.final_div_factor > 0):
            raise ValueError(
                f"div_factor and final_div_factor must be greater than 0: {self.div_factor!r} and "
                f"{self.final_div_factor!r}"
            )
