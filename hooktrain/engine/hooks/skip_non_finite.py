"""Goes on without the updates that would ruin the model."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hooktrain.engine.hook_base import HookBase
from hooktrain.solver import OptimWrapper, OptimWrapperDict
from hooktrain.utils import comm
from hooktrain.utils.dtensor import full_tensor

__all__ = ["SkipNonFinite"]

logger = logging.getLogger(__name__)


class SkipNonFinite(HookBase):
    """Skips an update whose gradients are infinite or NaN, up to so many times in a row.

    Without it such a loss ends the run by a FloatingPointError. With it parameters and optimizer
    stay as they were, schedules go on, and the loss is logged as it was. The optimizer's wrapper
    counts ``skipped_updates``. Where ranks exchange gradients, all of them have the same ones and
    skip the same update; of a sharded model they exchange one number.

    A loss that is not finite though its gradients are, and a buffer such as a batch norm's that
    has taken in what is not finite, still end the run: skipping an update does not mend them.

    A scaler of float16 skips updates while it looks for its scale, which counts here too.

    It costs a host-device synchronisation and the norm of the gradients in each iteration.

    Args:
        max_skips: how many in a row, at least 1.
        on_limit: after one more, ``"raise"`` raises a FloatingPointError and ``"stop"`` ends the
            run in order.

    Raises:
        ValueError: for arguments out of range.
    """

    def __init__(self, max_skips: int = 20, on_limit: str = "raise") -> None:
        if max_skips < 1:
            raise ValueError(f"max_skips must be at least 1, but got {max_skips!r}")
        if on_limit not in ("raise", "stop"):
            raise ValueError(f"on_limit must be 'raise' or 'stop', but got {on_limit!r}")
        self._max_skips = max_skips
        self._on_limit = on_limit
        self._in_a_row = 0
        self._skipping = False

    def before_step(self) -> None:
        """Nothing is skipped in this iteration yet."""
        self._skipping = False

    def after_backward(self) -> None:
        """Drop gradients that are not finite, all of an optimizer: it passes them over then."""
        wrapper = self.trainer.optim_wrapper
        for each in wrapper.values() if isinstance(wrapper, OptimWrapperDict) else [wrapper]:
            if not _has_finite_gradients(each):
                self._skip(each)

    def _skip(self, wrapper: OptimWrapper) -> None:
        _check_buffers(self.trainer.model)
        for group in wrapper.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        scaler = getattr(wrapper, "grad_scaler", None)
        if scaler is None or not scaler.is_enabled():  # a scaler counts what it skips
            wrapper.skipped_updates += 1
            self.trainer.storage.put_scalar("skipped_updates", wrapper.skipped_updates)
        self._skipping = True
        self.trainer.tolerate_losses()
        logger.warning("Iteration %d: gradients are not finite: no update", self.trainer.iter)

    def after_step(self) -> None:
        """Raise or stop, if there were too many in a row."""
        self._in_a_row = self._in_a_row + 1 if self._skipping else 0
        if self._in_a_row <= self._max_skips:
            return
        message = (
            f"gradients were not finite in {self._in_a_row} iterations in a row, up to iteration "
            f"{self.trainer.iter}; max_skips is {self._max_skips}"
        )
        if self._on_limit == "raise":
            raise FloatingPointError(message)
        self.trainer.request_stop(message)

    def state_dict(self) -> dict[str, Any]:
        """How many in a row there were."""
        return {"in_a_row": self._in_a_row}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` gave."""
        self._in_a_row = state_dict["in_a_row"]


def _has_finite_gradients(wrapper: OptimWrapper) -> bool:
    groups = wrapper.optimizer.param_groups
    grads = [p.grad for group in groups for p in group["params"] if p.grad is not None]
    norm = full_tensor(nn.utils.get_total_norm(grads))
    return bool(norm.isfinite())  # host-device synchronisation


def _check_buffers(model: nn.Module) -> None:
    """Raise if a buffer has become poisoned on any rank. A collective, while an update is skipped.

    Host-device synchronisation for each buffer, then only.
    """
    broken = [
        name
        for name, buffer in model.named_buffers()
        if buffer.is_floating_point() and not torch.isfinite(buffer).all()
    ]
    if comm.any_rank(bool(broken)):
        raise FloatingPointError(
            f"buffers of the model are not finite any more: {broken or 'those of another rank'}"
        )
