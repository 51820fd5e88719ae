"""An optimizer wrapper in lower precision: autocast, and a scaler for float16."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hooktrain.solver.optim_wrapper import OptimWrapper, Options
from hooktrain.utils.names import State
from hooktrain.utils.tensors import device_of


class AmpOptimWrapper(OptimWrapper):
    """An :class:`OptimWrapper` in lower precision, on any type of device.

    The forward pass runs under :class:`torch.autocast`. float16 needs its gradients
    scaled, by :class:`torch.amp.GradScaler`; bfloat16 has the range of float32 and needs
    no scaler. The scaler waits for an accelerator in each step, unless Adam or AdamW has
    ``fused=True``.

    Args:
        optimizer: the optimizer.
        dtype: ``torch.float16``, ``torch.bfloat16`` or their names. None takes torch's
            default for the device: float16 on CUDA, bfloat16 on the CPU.
        grad_scaler: the scaler for float16; None makes one that finds the scale by itself.
        accumulative_counts: see :class:`OptimWrapper`.
        clip_grad: see :class:`OptimWrapper`; gradients are unscaled before.

    Attributes:
        device_type: that of the parameters, such as ``"cuda"``.
        grad_scaler: the scaler; a disabled one if the data type needs none.
        skipped_updates: on an accelerator a tensor, which nothing waits for. So there
            :meth:`step` returns True, whatever the scaler has found.

    Raises:
        ValueError: for another data type.
    """

    skipped_updates: Any

    def __init__(
        self,
        optimizer: Optimizer,
        dtype: torch.dtype | str | None = None,
        *,
        grad_scaler: torch.amp.GradScaler | None = None,
        accumulative_counts: int = 1,
        clip_grad: Options | None = None,
    ) -> None:
        super().__init__(optimizer, accumulative_counts, clip_grad)
        # A group whose parameters are all frozen may be empty.
        self.device_type = device_of(self.parameters[0]).type
        if dtype is None:
            dtype = torch.get_autocast_dtype(self.device_type)
        self.dtype: Any = dtype
        if isinstance(dtype, str):
            self.dtype = getattr(torch, dtype, None)
        if self.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"dtype must be float16 or bfloat16, but got {dtype!r}")
        # A scaler that is not enabled passes everything through.
        self.grad_scaler = grad_scaler or torch.amp.GradScaler(
            self.device_type, enabled=self.dtype == torch.float16
        )
        if isinstance(optimizer, torch.optim.SGD):
            # The scaler itself skips an update then. The fused kernel would leave in the
            # momentum what the memory held before, where the first one is skipped.
            optimizer._step_supports_amp_scaling = False
        self._unscaled = False

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """That of :class:`OptimWrapper`, and autocast to the lower precision."""
        precision = torch.autocast(self.device_type, self.dtype)
        with super().optim_context(model), precision:
            yield

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Add the gradients of the scaled loss."""
        super().backward(self.grad_scaler.scale(loss), **kwargs)

    def start_accumulation(self) -> None:
        """Also make a scaler ready again that an error left after unscaling."""
        super().start_accumulation()
        if self._unscaled:
            # Host-device synchronisation, after a step that failed only. Given a scale,
            # update() forgets what it knew of the gradients, and changes nothing else.
            scale = self.grad_scaler.get_scale()
            self.grad_scaler.update(scale)
        self._unscaled = False

    def unscale_gradients(self) -> None:
        """Divide the gradients by the scale, once in a step."""
        if not self._unscaled:
            self.grad_scaler.unscale_(self.optimizer)
            self._unscaled = True

    def _apply(self, **kwargs: Any) -> bool:
        scaler = self.grad_scaler
        self._unscaled = False
        if not scaler.is_enabled():
            return super()._apply(**kwargs)
        # Host-device synchronisation: reads the overflow flag. Fused optimizers read it
        # inside their kernel.
        scaler.step(self.optimizer, **kwargs)
        found = scaler._found_inf_per_device(self.optimizer).values()
        flags = [flag.to(scaler._scale.device) for flag in found]  # type: ignore[union-attr]
        skipped = reduce(torch.maximum, flags) if flags else torch.zeros(())
        scaler.update()
        if skipped.is_cpu:
            if skipped:
                self.count_skipped_update()
            return not skipped
        # Added up there, and fetched with the other metrics: nothing waits.
        self.count_skipped_update(skipped)
        return True

    def state_dict(self) -> State:
        """That of :class:`OptimWrapper`, and the scaler's."""
        state = super().state_dict()
        state["grad_scaler"] = self.grad_scaler.state_dict()
        return state

    def load_state_dict(self, state_dict: State) -> None:
        """Load what ``state_dict`` returned; without a scaler's, ours stays as it is."""
        super().load_state_dict(state_dict)
        scaler = state_dict.get("grad_scaler")
        if scaler:
            self.grad_scaler.load_state_dict(scaler)
