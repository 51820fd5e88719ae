"""Exact batch norm statistics, measured after training."""

from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hooktrain.model.base_model import BaseModel
from hooktrain.model.wrappers import call_model, unwrap_model
from hooktrain.utils import comm, timer
from hooktrain.utils.tensors import mover_to
from hooktrain.utils.workers import start_workers


def get_bn_modules(model: nn.Module) -> list[nn.Module]:
    """Return the BatchNorm layers in training mode that keep running statistics."""
    norms = [each for each in model.modules() if isinstance(each, _BatchNorm)]
    return [norm for norm in norms if norm.training and norm.track_running_stats]


@torch.no_grad()
def update_bn_stats(
    model: nn.Module, data_loader: Iterable[Any], num_iters: int = 200
) -> None:
    """Replace the running statistics of BatchNorm layers by exact ones of a sample of the data.

    Moving averages lag behind weights that change fast, and weight the last batches most. The
    exact mean and (biased) variance are of all values that a layer sees in ``num_iters`` batches
    of all ranks, with equal weights (Wu and Johnson, Rethinking "Batch" in BatchNorm,
    arXiv:2105.07576, section 3). Collective.

    It changes the layers that :func:`get_bn_modules` returns, except for layers that no batch
    reaches. A layer that is used twice in a forward pass gets the statistics of both uses. After
    an error the layers keep the moving averages of training.

    Args:
        model: the model, which is called with each batch, without gradients, in its current mode.
            A :class:`hooktrain.model.BaseModel` is called as in training.
        data_loader: the loader, which must yield at least ``num_iters`` batches. No more are taken.
        num_iters: the number of batches to take; 0 changes nothing.

    Raises:
        ValueError: on all ranks, if the loader of any rank is too short.
    """
    layers: list[Any] = get_bn_modules(model)
    if not layers:
        return
    # For each channel: the number of values, their sum, and the sum of their squares, in float64,
    # which limits cancellation if the mean is large.
    sums: dict[Any, Tensor] = {
        layer: layer.running_mean.new_zeros(3, layer.num_features, dtype=torch.float64)
        for layer in layers
    }

    def observe(layer: nn.Module, args: tuple[Tensor]) -> None:
        sums[layer] += _sums_of(args[0])

    hooks = [layer.register_forward_pre_hook(observe) for layer in layers]
    move = mover_to(model)
    seen = 0
    try:
        for batch in islice(start_workers(data_loader), num_iters):
            _compute_losses(model, move(batch))
            timer.beat()
            seen += 1
    finally:
        for hook in hooks:
            hook.remove()
    if comm.any_rank(seen < num_iters):
        raise ValueError(
            f"data_loader is too short on some rank: on this one it has {seen} of {num_iters=}"
        )
    for layer, own in sums.items():
        count, total, square = comm.all_reduce(own)
        if count[0] > 0:  # a host-device synchronisation
            mean = total / count
            variance = square / count - mean**2
            layer.running_mean.copy_(mean)
            layer.running_var.copy_(variance.clamp(min=0))


def _compute_losses(model: nn.Module, batch: Any) -> None:
    bare = unwrap_model(model)
    if isinstance(bare, BaseModel):
        arguments = bare.data_preprocessor(batch, True)
        bare._run_forward(arguments, mode="loss")
    else:
        call_model(model, batch)


def _sums_of(values: Tensor) -> Tensor:
    """The number of values in each channel, their sum, and the sum of their squares."""
    dims = [dim for dim in range(values.dim()) if dim != 1]
    total = values.sum(dims, dtype=torch.float64)
    norm = torch.linalg.vector_norm(values, dim=dims, dtype=torch.float64)
    count = torch.full_like(total, values.numel() / len(total))
    return torch.stack([count, total, norm.square()])
