"""Batch norm with the statistics of all ranks together, and exact statistics after training."""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hooktrain.model.base_model import BaseModel, compute_losses
from hooktrain.model.wrappers import unwrap_model
from hooktrain.utils import comm, timer
from hooktrain.utils.tensors import mover_to
from hooktrain.utils.workers import start_workers


class BatchNormXd(nn.BatchNorm2d):
    """Batch norm over inputs of shape (N, C) or (N, C, ...), with any number of dimensions.

    It is a BatchNorm2d for those who look for batch norms by their type.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                f"the input must be of shape (N, C, ...), but got {input.shape}"
            )


def convert_sync_batchnorm(
    module: nn.Module, implementation: str = "torch"
) -> nn.Module:
    """Replace each batch norm by a :class:`torch.nn.SyncBatchNorm`, in place.

    Parameters, buffers and mode stay, and a layer at several places is still one.
    (:meth:`torch.nn.SyncBatchNorm.convert_sync_batchnorm` makes several of it.) Convert before the
    model is wrapped in DistributedDataParallel. torch refuses these layers on the CPU.

    Args:
        module: the model.
        implementation: ``"torch"``; MMEngine has others.

    Returns:
        The module, or its replacement if it was a batch norm itself.

    Raises:
        ValueError: for another implementation.
    """
    if implementation != "torch":
        raise ValueError(f"implementation must be 'torch', but got {implementation!r}")
    return _replace(module, _BatchNorm, nn.SyncBatchNorm)


def revert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Replace each :class:`torch.nn.SyncBatchNorm` by a :class:`BatchNormXd`, in place.

    So a model that was trained on several accelerators runs on the CPU too. Parameters, buffers
    and mode stay, and a layer at several places is still one.

    Returns:
        The module, or its replacement if it was such a batch norm itself.
    """
    return _replace(module, nn.SyncBatchNorm, BatchNormXd)


def _replace(
    module: nn.Module, kind: type[_BatchNorm], new: type[_BatchNorm]
) -> nn.Module:
    found = [
        m for m in module.modules() if isinstance(m, kind) and not isinstance(m, new)
    ]
    made: dict[nn.Module | None, nn.Module] = {norm: _like(norm, new) for norm in found}
    for parent in module.modules():
        # named_children() leaves out the second name of a module.
        for name, child in parent._modules.items():
            parent._modules[name] = made.get(child, child)
    return made.get(module, module)


def _like(norm: _BatchNorm, new_type: type[_BatchNorm]) -> _BatchNorm:
    """A batch norm of another type with the same tensors; its own would be thrown away."""
    arguments = (
        norm.num_features,
        norm.eps,
        norm.momentum,
        norm.affine,
        norm.track_running_stats,
    )
    new = new_type(*arguments, device="meta")
    new._parameters.update(norm._parameters)
    new._buffers.update(norm._buffers)
    return new.train(norm.training)


def get_bn_modules(model: nn.Module) -> list[nn.Module]:
    """The BatchNorm layers of a model that are in training mode and keep running statistics."""
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.training]
    return [norm for norm in norms if norm.running_mean is not None]


@torch.no_grad()
def update_bn_stats(
    model: nn.Module, data_loader: Iterable[Any], num_iters: int = 200
) -> None:
    """Replace the running statistics of BatchNorm layers by those of a sample of the data.

    Moving averages lag behind weights that change fast, and weigh the last batches most. Here mean
    and (biased) variance are those of all values that a layer sees in ``num_iters`` batches, each
    value with the same weight (Wu and Johnson, Rethinking "Batch" in BatchNorm, arXiv:2105.07576,
    section 3). With ``torch.distributed`` initialised they are those of all ranks, and every rank
    must call this.

    Concerns the layers that :func:`get_bn_modules` gives; those that no batch reaches keep their
    statistics. Buffers are written in place, once all batches went well; an error changes none.

    Args:
        model: is called with each batch, without gradients, in the mode that it is in; a
            :class:`~hooktrain.model.BaseModel` as in training.
        data_loader: at least ``num_iters`` batches. No more are drawn from it.
        num_iters: how many batches; with 0 nothing changes.

    Raises:
        RuntimeError: if a layer is used twice in one forward pass: it has no single statistics.
        ValueError: if the loader of any rank is shorter.
    """
    layers: list[Any] = get_bn_modules(model)
    if not layers:
        return
    bare = unwrap_model(model)
    forward = (
        partial(compute_losses, bare, forward=bare)
        if isinstance(bare, BaseModel)
        else model
    )
    batches = map(mover_to(model), islice(start_workers(data_loader), num_iters))
    sums, seen = _sums(model, layers, forward, batches)
    if comm.any_rank(seen < num_iters):
        raise ValueError(
            f"a data_loader is too short: this gave {seen} of num_iters={num_iters}"
        )
    merged = torch.cat(sums, 1)
    if comm.get_world_size() > 1:
        dist.all_reduce(merged)
    parts = torch.split(merged, [each.shape[1] for each in sums], 1)
    for layer, (count, mean, square) in zip(layers, parts, strict=True):
        if count[0] > 0:  # waits for the device
            mean, square = mean / count, square / count
            layer.running_mean.copy_(mean)
            layer.running_var.copy_((square - mean**2).clamp(min=0))


def _sums(
    model: nn.Module,
    layers: list[Any],
    forward: Callable[[Any], Any],
    batches: Iterable[Any],
) -> tuple[list[Tensor], int]:
    """What the layers see in the batches, and how many there were; no buffer is changed.

    Of each layer, by channel: the number of values, their sum and the sum of their squares.
    """
    seen = 0
    buffers = [buffer for layer in layers for buffer in layer.buffers(recurse=False)]
    saved = [buffer.clone() for buffer in buffers]
    reached: set[nn.Module] = set()  # in the current forward pass
    # In float64, so that little cancels where the mean is large; Apple's devices have none.
    dtype = (
        torch.float32 if layers[0].running_mean.device.type == "mps" else torch.float64
    )
    sums = {
        m: m.running_mean.new_zeros((3, len(m.running_mean)), dtype=dtype)
        for m in layers
    }

    def observe(
        layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if layer in reached:
            name = next(
                name for name, module in model.named_modules() if module is layer
            )
            raise RuntimeError(
                f"{name!r} is used twice in one forward pass: it has no one mean"
            )
        reached.add(layer)
        values: Tensor = args[0] if args else kwargs["input"]
        if values.numel() > 0:
            values = values.to(torch.promote_types(values.dtype, torch.float32))
            dims = [d for d in range(values.dim()) if d != 1]
            var, mean = (
                v.to(sums[layer]) for v in torch.var_mean(values, dims, correction=0)
            )
            count = values.numel() // values.shape[1]
            sums[layer] += count * torch.stack(
                [torch.ones_like(mean), mean, var + mean**2]
            )

    hooks = [
        layer.register_forward_pre_hook(observe, with_kwargs=True) for layer in layers
    ]
    try:
        for batch in batches:
            reached.clear()
            forward(batch)
            timer.beat()
            seen += 1
    finally:
        for hook in hooks:
            hook.remove()
        torch._foreach_copy_(buffers, saved)
    return list(sums.values()), seen
