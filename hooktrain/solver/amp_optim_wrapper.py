"""An optimizer wrapper for lower precision: autocast, and a gradient scaler for float16."""

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

    The forward pass runs under :class:`torch.autocast`. With float16, a
    :class:`torch.amp.GradScaler` scales the gradients; bfloat16 has the range of float32 and needs
    no scaler. On an accelerator the scaler synchronises with the host in each step, unless the
    optimizer is Adam or AdamW with ``fused=True``.

    Args:
        optimizer: the optimizer.
        dtype: ``torch.float16``, ``torch.bfloat16`` or their names. None takes torch's
            default for the device: float16 on CUDA, bfloat16 on the CPU.
        grad_scaler: the scaler for float16; None makes one that adapts the scale.
        accumulative_counts: see :class:`OptimWrapper`.
        clip_grad: see :class:`OptimWrapper`; gradients are unscaled before they are clipped.

    Attributes:
        device_type: the type of the parameters' device, such as ``"cuda"``.
        grad_scaler: the scaler; it is disabled if the data type needs none.
        skipped_updates: the number of updates that the scaler has skipped. On an accelerator it is
            a tensor, so that the host need not wait.

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
        # A disabled scaler passes everything through.
        self.grad_scaler = grad_scaler or torch.amp.GradScaler(
            self.device_type, enabled=self.dtype == torch.float16
        )
        if isinstance(optimizer, torch.optim.SGD):
            # Let the scaler skip updates. If SGD's fused kernel skipped the first one, the
            # momentum buffers would stay uninitialised.
            optimizer._step_supports_amp_scaling = False

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """As :meth:`OptimWrapper.optim_context`, with autocast to the lower precision."""
        precision = torch.autocast(self.device_type, self.dtype)
        with super().optim_context(model), precision:
            yield

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Add the gradients of the scaled loss."""
        super().backward(self.grad_scaler.scale(loss), **kwargs)

    def start_accumulation(self) -> None:
        """Also drop the scaler's record of a step that an error has interrupted."""
        super().start_accumulation()
        if self.grad_scaler.is_enabled():
            self.grad_scaler._per_optimizer_states.clear()

    def unscale_gradients(self) -> None:
        """Divide the gradients by the scale, once per step."""
        self.grad_scaler.unscale_(self.optimizer)

    def _apply(self, kwargs: Options) -> None:
        scaler = self.grad_scaler
        if not scaler.is_enabled():
            super()._apply(kwargs)
            return
        # Host-device synchronisation: reads the overflow flag. Fused optimizers read it
        # inside their kernel.
        scaler.step(self.optimizer, **kwargs)
        found = scaler._found_inf_per_device(self.optimizer).values()
        flags = [flag.to(scaler._scale.device) for flag in found]  # type: ignore[union-attr]
        skipped = reduce(torch.maximum, flags) if flags else torch.zeros(())
        scaler.update()
        if not skipped.is_cpu:
            # The sum stays on the device and is fetched with the other metrics, so nothing waits.
            self.count_skipped_update(skipped)
        elif skipped:
            self.count_skipped_update()

    def state_dict(self) -> State:
        """The state of the :class:`OptimWrapper`, and of the scaler."""
        state = super().state_dict()
        state["grad_scaler"] = self.grad_scaler.state_dict()
        return state

    def load_state_dict(self, state_dict: State) -> None:
        """Load a state. If it has no scaler's state, the scaler is unchanged."""
        super().load_state_dict(state_dict)
        scaler = state_dict.get("grad_scaler")
        if scaler:
            self.grad_scaler.load_state_dict(scaler)
