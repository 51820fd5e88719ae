"""Optimizer wrappers with MMEngine's ``get_lr``, ``get_momentum`` and ``defaults``."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from hooktrain import solver
from hooktrain.solver.param_groups import ParamGroup
from hooktrain.utils.names import State, refuse_overrides

logger = logging.getLogger(__name__)


class OptimWrapper(solver.OptimWrapper):
    """:class:`hooktrain.solver.OptimWrapper` with further methods of MMEngine's.

    Raises:
        TypeError: when a subclass is defined that overrides a method only MMEngine calls.
    """

    def __init_subclass__(cls) -> None:
        refuse_overrides(cls, {"_clip_grad": "override clip_gradients()"})

    def get_lr(self) -> dict[str, list[float]]:
        """The learning rate of each group, as ``{"lr": [0.1]}``."""
        return {"lr": [group["lr"] for group in self.param_groups]}

    @property
    def defaults(self) -> dict[str, Any]:
        """The optimizer's default settings."""
        return self.optimizer.defaults

    def get_momentum(self) -> dict[str, list[float]]:
        """The momentum of each group, as ``{"momentum": [0.9]}``.

        For Adam it is the first of its betas; without either, 0.
        """
        return {"momentum": _momenta(self.param_groups)}


class AmpOptimWrapper(OptimWrapper, solver.AmpOptimWrapper):
    """:class:`hooktrain.solver.AmpOptimWrapper` with ``get_lr`` and ``get_momentum``.

    Args:
        optimizer: the optimizer.
        dtype: see :class:`hooktrain.solver.AmpOptimWrapper`.
        loss_scale: the scale for float16. ``"dynamic"`` adapts it; a dict has the arguments of
            :class:`torch.amp.GradScaler`; a number is a fixed scale.
        kwargs: arguments of the base class.

    Raises:
        ValueError: if ``loss_scale`` is any other value.
    """

    _was_entered = False

    def __init__(
        self,
        optimizer: Optimizer,
        dtype: torch.dtype | str | None = None,
        loss_scale: str | float | Mapping[str, Any] = "dynamic",
        **kwargs: Any,
    ) -> None:
        super().__init__(optimizer, dtype, **kwargs)
        if loss_scale == "dynamic" or "grad_scaler" in kwargs:
            return
        enabled = self.grad_scaler.is_enabled()
        if isinstance(loss_scale, Mapping):
            scaler = GradScaler(self.device_type, enabled=enabled, **loss_scale)
        elif isinstance(loss_scale, int | float) and loss_scale > 0:
            scaler = _FixedScaler(self.device_type, float(loss_scale), enabled=enabled)
        else:
            raise ValueError(
                "loss_scale must be 'dynamic', a positive number or a dict of GradScaler's "
                f"arguments, but got {loss_scale!r}"
            )
        self.grad_scaler = scaler

    def optim_context(self, model: nn.Module) -> Any:
        """Compute in the precision of ``dtype`` inside this context; see the base class."""
        self._was_entered = True
        return super().optim_context(model)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Add the gradients of a loss; warn once if the context was never entered."""
        if not self._was_entered:
            self._was_entered = True
            logger.warning(
                "AmpOptimWrapper has no effect, since the model never enters its context: "
                "train_step needs `with optim_wrapper.optim_context(self):` around the forward pass"
            )
        super().backward(loss, **kwargs)

    def load_state_dict(self, state_dict: State) -> None:
        """Load a state, from this class or from MMEngine."""
        super().load_state_dict(with_our_names(state_dict))


class OptimWrapperDict(solver.OptimWrapperDict):
    """:class:`hooktrain.solver.OptimWrapperDict` with ``get_lr`` and ``get_momentum``.

    As in MMEngine, each optimizer has its own loss.

    Raises:
        NotImplementedError: by ``update_params``, ``backward`` and ``step``, which must be called
            on each wrapper.
    """

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"there are several optimizers: call optim_wrapper[name].update_params(loss) for each "
            f"of {[*self]}; if they share one loss, see docs/guide/optimizers.md"
        )

    update_params = backward = step = _refuse

    def get_lr(self) -> dict[str, list[float]]:
        """The learning rate of each group, by ``"<name>.lr"``."""
        return {
            f"{name}.lr": [group["lr"] for group in groups]
            for name, groups in self.param_groups.items()
        }

    def get_momentum(self) -> dict[str, list[float]]:
        """The momentum of each group, by ``"<name>.momentum"``."""
        return {
            f"{name}.momentum": _momenta(groups)
            for name, groups in self.param_groups.items()
        }


class _FixedScaler(GradScaler):
    """A scaler whose scale never changes, not even after an overflow."""

    def update(self, new_scale: float | Tensor | None = None) -> None:
        super().update(self._init_scale)


def with_our_names(state: State) -> State:
    """Rename MMEngine's entries in the state of one optimizer, or of several by name."""
    if "param_groups" not in state:
        return {name: with_our_names(one) for name, one in state.items()}
    renamed = dict(state)
    if "loss_scaler" in state:
        renamed["grad_scaler"] = renamed.pop("loss_scaler")
    return renamed


def as_mmengine(optim_wrapper: Any) -> Any:
    """Give a wrapper of one of the core's classes the methods above.

    It stays the same object, but its class becomes the extended class above. Several wrappers are
    put into a new dict. Wrappers of other classes are returned unchanged.
    """
    if type(optim_wrapper) is solver.OptimWrapperDict:
        return OptimWrapperDict(**optim_wrapper)
    for kind in (OptimWrapper, AmpOptimWrapper):
        if type(optim_wrapper) is getattr(solver, kind.__name__):
            optim_wrapper.__class__ = kind
    return optim_wrapper


def _momenta(groups: list[ParamGroup]) -> list[float]:
    return [group.get("momentum", group.get("betas", [0.0])[0]) for group in groups]
