"""MMEngine's schedulers of the momentum, or of the first of Adam's betas."""

from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer

from hooktrain.solver import OptimWrapper
from hooktrain.solver.param_scheduler import (
    ConstantParamScheduler,
    CosineAnnealingParamScheduler,
    CosineRestartParamScheduler,
    ExponentialParamScheduler,
    LinearParamScheduler,
    MultiStepParamScheduler,
    PolyParamScheduler,
    ReduceOnPlateauParamScheduler,
    StepParamScheduler,
)
from hooktrain.utils.registry import PARAM_SCHEDULERS


@dataclass(eq=False)
class MomentumSchedulerMixin:
    """Makes the scheduler that follows it among the bases one of the momentum.

    Where the groups have ``betas``, it is the first of them, and ``momentum`` beside them
    says what it is.
    """

    param_name: str = field(default="momentum", init=False, repr=False)

    def __init__(
        self, optimizer: Optimizer | OptimWrapper, *args: Any, **kwargs: Any
    ) -> None:
        # Only for classes that are no dataclasses, as users of MMEngine write them.
        super().__init__(optimizer, "momentum", *args, **kwargs)  # type: ignore[call-arg]

    def _read(self, group: dict[str, Any]) -> Any:
        return group["betas"][0] if "betas" in group else group["momentum"]

    def _write(self, group: dict[str, Any], value: Any) -> None:
        super()._write(group, value)  # type: ignore[misc]
        if "betas" in group:
            group["betas"] = (group["momentum"], *group["betas"][1:])

    def _base_value(self, group: dict[str, Any]) -> float:
        group["momentum"] = self._read(group)
        base: float = super()._base_value(group)  # type: ignore[misc]
        return base


@dataclass(eq=False)
class ConstantMomentum(MomentumSchedulerMixin, ConstantParamScheduler):
    """:class:`ConstantParamScheduler` of the momentum."""


@dataclass(eq=False)
class LinearMomentum(MomentumSchedulerMixin, LinearParamScheduler):
    """:class:`LinearParamScheduler` of the momentum."""


@dataclass(eq=False)
class StepMomentum(MomentumSchedulerMixin, StepParamScheduler):
    """:class:`StepParamScheduler` of the momentum."""


@dataclass(eq=False)
class MultiStepMomentum(MomentumSchedulerMixin, MultiStepParamScheduler):
    """:class:`MultiStepParamScheduler` of the momentum."""


@dataclass(eq=False)
class ExponentialMomentum(MomentumSchedulerMixin, ExponentialParamScheduler):
    """:class:`ExponentialParamScheduler` of the momentum."""


@dataclass(eq=False)
class CosineAnnealingMomentum(MomentumSchedulerMixin, CosineAnnealingParamScheduler):
    """:class:`CosineAnnealingParamScheduler` of the momentum."""


@dataclass(eq=False)
class PolyMomentum(MomentumSchedulerMixin, PolyParamScheduler):
    """:class:`PolyParamScheduler` of the momentum."""


@dataclass(eq=False)
class CosineRestartMomentum(MomentumSchedulerMixin, CosineRestartParamScheduler):
    """:class:`CosineRestartParamScheduler` of the momentum."""


@dataclass(eq=False)
class ReduceOnPlateauMomentum(MomentumSchedulerMixin, ReduceOnPlateauParamScheduler):
    """:class:`ReduceOnPlateauParamScheduler` of the momentum."""


for _name, _member in [*globals().items()]:
    if _name.endswith("Momentum"):
        PARAM_SCHEDULERS.register(_member)
