"""Mixed precision: autocast on the way forward, a gradient scaler on the way back."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from hooktrain.solver.optim_wrapper import OptimWrapper

__all__ = ["AmpOptimWrapper"]

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class AmpOptimWrapper(OptimWrapper):
    """An :class:`OptimWrapper` that computes in lower precision, on any type of device.

    The forward pass runs under :class:`torch.autocast`. float16 needs its gradients scaled, by
    :class:`torch.amp.GradScaler`; bfloat16 has the range of float32 and needs no scaler.

    Args:
        optimizer: the optimizer.
        dtype: ``torch.float16``, ``torch.bfloat16`` or their names.
        device_type: such as ``"cuda"`` or ``"cpu"``. None takes the parameters' device.
        grad_scaler: the scaler to use. None makes one for float16, and a disabled one otherwise.
        accumulative_counts: see :class:`OptimWrapper`.
        clip_grad: see :class:`OptimWrapper`; gradients are unscaled before they are clipped.

    Raises:
        ValueError: for another dtype.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        dtype: torch.dtype | str = torch.float16,
        *,
        device_type: str | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        accumulative_counts: int = 1,
        clip_grad: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(optimizer, accumulative_counts, clip_grad)
        chosen = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
        if chosen not in DTYPES.values():
            raise ValueError(f"dtype must be float16 or bfloat16, but got {dtype!r}")
        self.dtype = chosen
        self.device_type = device_type or optimizer.param_groups[0]["params"][0].device.type
        if grad_scaler is None:
            # Disabled, it passes everything through: no branch in the step.
            enabled = chosen == torch.float16
            grad_scaler = torch.amp.GradScaler(self.device_type, enabled=enabled)
        self.grad_scaler = grad_scaler
        self._unscaled = False

    def precision_context(self) -> AbstractContextManager[Any]:
        """Autocast to the lower precision, where the operation allows."""
        return torch.autocast(self.device_type, self.dtype)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of the scaled loss."""
        super().backward(self.grad_scaler.scale(loss))

    def start_window(self) -> None:
        """Begin a new window; a scaler that was left after unscaling is made ready again."""
        super().start_window()
        if self._unscaled:
            # Host-device synchronisation, after a step that failed only. Given a scale, update()
            # forgets what it knew of the gradients, and changes nothing else.
            self.grad_scaler.update(self.grad_scaler.get_scale())
            self._unscaled = False

    def unscale_gradients(self) -> None:
        """Divide the gradients by the scale, once in a step."""
        if not self._unscaled:
            self.grad_scaler.unscale_(self.optimizer)
            self._unscaled = True

    def step(self) -> bool:
        """Unscale, clip, and update unless gradients overflowed."""
        self.unscale_gradients()
        self.clip_gradients()
        updated = self._scaler_step()
        self._unscaled = False
        self.skipped_updates += not updated
        return updated

    def _scaler_step(self) -> bool:
        scaler = self.grad_scaler
        if not scaler.is_enabled():
            self.optimizer.step()
            return True
        # Fused optimizers skip inside their kernel; only the lowered scale tells.
        # Host-device synchronisation: two reads of the scale.
        fused = getattr(self.optimizer, "_step_supports_amp_scaling", False)
        before = scaler.get_scale() if fused else 0.0
        steps: list[object] = []
        handle = self.optimizer.register_step_post_hook(lambda *_: steps.append(None))
        try:
            scaler.step(self.optimizer)  # host-device synchronisation: reads the overflow flag
        finally:
            handle.remove()
        scaler.update()
        return scaler.get_scale() >= before if fused else bool(steps)

    def state_dict(self) -> dict[str, Any]:
        """That of :class:`OptimWrapper`, and the scaler's."""
        return {**super().state_dict(), "grad_scaler": self.grad_scaler.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` gave; a state without a scaler leaves the scaler new."""
        super().load_state_dict(state_dict)
        if state_dict.get("grad_scaler"):
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])
