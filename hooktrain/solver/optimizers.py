"""torch's optimizers by name, and which of them are fused by default."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from hooktrain.utils.registry import OPTIMIZERS

__all__ = ["fused_by_default"]

# Those whose fused kernels take whatever the others take. The fused SGD and Adagrad refuse sparse
# gradients, which only a backward pass reveals.
_FUSED_CLASSES = (torch.optim.Adam, torch.optim.AdamW)

# Not the CPU, although its fused kernels are two to four times as fast: they read tensors as flat
# memory, and silently give wrong results where a parameter, its gradient and its state differ in
# their strides (torch 2.13), as after loading a state that was saved in channels_last. CUDA's
# kernels check that.
_FUSED_DEVICES = ("cuda",)

# Who names one of these has made a choice of implementation.
_CHOICES = ("fused", "foreach", "differentiable")


def _register_torch_optimizers() -> None:
    """All of torch.optim under their own names, and Adafactor under MMEngine's name for it too."""
    base = torch.optim.Optimizer
    for name, found in vars(torch.optim).items():
        if isinstance(found, type) and issubclass(found, base) and found is not base:
            OPTIMIZERS.register(found, name=name)
    OPTIMIZERS.register(torch.optim.Adafactor, name="TorchAdafactor")


def fused_by_default(
    optimizer: Callable[..., Any],
    options: Mapping[str, Any],
    param_groups: Iterable[Mapping[str, Any]],
) -> bool:
    """Whether to build an optimizer with ``fused=True``, which torch leaves to its users.

    That is so for Adam and AdamW on CUDA, if nothing says how to compute, and all parameters are
    ordinary ones of floating point. Elsewhere torch chooses, which is foreach on CUDA.

    Args:
        optimizer: the class.
        options: what it will be built with.
        param_groups: what it will update.
    """
    groups = list(param_groups)
    if optimizer not in _FUSED_CLASSES or any(c in o for o in (options, *groups) for c in _CHOICES):
        return False
    return all(_fusible(parameter) for group in groups for parameter in group["params"])


def _fusible(parameter: torch.Tensor) -> bool:
    return (
        type(parameter) is nn.Parameter  # sharded and lazy ones are of other types
        and parameter.is_floating_point()
        and parameter.device.type in _FUSED_DEVICES
        and (
            parameter.is_contiguous()
            or parameter.is_contiguous(memory_format=torch.channels_last)
            or parameter.is_contiguous(memory_format=torch.channels_last_3d)
        )
    )


_register_torch_optimizers()
