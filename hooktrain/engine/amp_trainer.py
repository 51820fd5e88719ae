"""detectron2's trainer in mixed precision."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hooktrain.engine.trainers import SimpleTrainer
from hooktrain.solver import AmpOptimWrapper


class AMPTrainer(SimpleTrainer):
    """A :class:`SimpleTrainer` in mixed precision.

    With accumulation or clipping, give an :class:`hooktrain.solver.AmpOptimWrapper` to
    ``SimpleTrainer``. The other arguments are those of :class:`ModelTrainer`.

    Args:
        grad_scaler: the scaler; None makes one for float16.
        precision: ``torch.float16`` or ``torch.bfloat16``.
        log_grad_scaler: record the scale as ``[metric]grad_scaler``.
    """

    def __init__(
        self,
        model: nn.Module,
        data_loader: Iterable[Any],
        optimizer: torch.optim.Optimizer,
        gather_metric_period: int | str = 20,
        zero_grad_before_forward: bool = False,
        grad_scaler: torch.amp.GradScaler | None = None,
        precision: torch.dtype = torch.float16,
        log_grad_scaler: bool = False,
        async_write_metrics: bool = False,
    ) -> None:
        scale = grad_scaler or "dynamic"
        wrapper = AmpOptimWrapper(optimizer, precision, loss_scale=scale)
        super().__init__(
            model,
            data_loader,
            wrapper,
            gather_metric_period,
            zero_grad_before_forward,
            async_write_metrics,
        )
        self.grad_scaler = wrapper.grad_scaler
        self.precision = precision
        self.log_grad_scaler = log_grad_scaler

    def after_backward(self) -> None:
        """Record the scale, then call the hooks."""
        if self.log_grad_scaler:
            # A tensor, which nothing waits for; a disabled scaler has none.
            scale = getattr(self.grad_scaler, "_scale", 1.0)
            self.storage.put_scalar("[metric]grad_scaler", scale)
        super().after_backward()
