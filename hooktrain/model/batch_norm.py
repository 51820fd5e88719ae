"""Batch norm with the statistics of all ranks together, and exact statistics after training."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hooktrain.model.base_model import BaseModel, compute_losses
from hooktrain.utils import comm, timer
from hooktrain.utils.registry import unwrap_model
from hooktrain.utils.workers import start_workers


class BatchNormXd(nn.BatchNorm2d):
    """Batch norm over inputs of shape (N, C) or (N, C, ...), with any number of dimensions.

    It is a BatchNorm2d for those who look for batch norms by their type.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"the input must be of shape (N, C, ...), but got {input.shape}")


def convert_sync_batchnorm(module: nn.Module, implementation: str = "torch") -> nn.Module:
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


def _replace(module: nn.Module, kind: type[_BatchNorm], new: type[_BatchNorm]) -> nn.Module:
    found = [m for m in module.modules() if isinstance(m, kind) and not isinstance(m, new)]
    made = {norm: _like(norm, new) for norm in found}
    for parent in list(module.modules()):
        # named_children() leaves out the second name of a module.
        for name, child in parent._modules.items():
            if child in made:
                parent._modules[name] = made[child]
    return made.get(module, module)  # type: ignore[call-overload, no-any-return]


def _like(norm: _BatchNorm, new_type: type[_BatchNorm]) -> _BatchNorm:
    """A batch norm of another type with the same tensors; its own would be thrown away."""
    arguments = (norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    new = new_type(*arguments, device="meta")
    new._parameters.update(norm._parameters)
    new._buffers.update(norm._buffers)
    return new.train(norm.training)


def get_bn_modules(model: nn.Module) -> list[nn.Module]:
    """The BatchNorm layers of a model that are in training mode and keep running statistics."""
    return [statistics.layer for statistics in _statistics(model)]


@torch.no_grad()
def update_bn_stats(model: nn.Module, data_loader: Iterable[Any], num_iters: int = 200) -> None:
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
    layers = _statistics(model)
    if not layers:
        return
    seen, bare = 0, unwrap_model(model)
    forward = partial(compute_losses, bare, forward=bare) if isinstance(bare, BaseModel) else model
    with _observing(layers):
        for batch in islice(start_workers(data_loader), num_iters):
            for statistics in layers:
                statistics.used = False
            forward(batch)
            timer.beat()
            seen += 1
    sums = torch.cat([*(s.sums.flatten() for s in layers), layers[0].sums.new_tensor([seen])])
    if comm.get_world_size() > 1:
        dist.all_reduce(sums)
    *layer_sums, total = torch.split(sums, [*(s.sums.numel() for s in layers), 1])
    # On every rank alike; it waits for the device.
    if int(total) < num_iters * comm.get_world_size():
        raise ValueError(
            f"data_loader gave {seen} of num_iters={num_iters} batches, {int(total)} on all ranks"
        )
    for statistics, merged in zip(layers, layer_sums, strict=True):
        statistics.write(merged.view(3, -1))


class _Statistics:
    """The values that reach one layer: how many, their sum and the sum of their squares.

    By channel, shape (3, C), in float64, so that little cancels where the mean is large.
    """

    def __init__(self, name: str, layer: nn.Module, running_mean: Tensor) -> None:
        self.name, self.layer = name, layer
        self.used = False  # in the current forward pass
        # Apple's devices have no float64.
        dtype = torch.float32 if running_mean.device.type == "mps" else torch.float64
        self.sums = running_mean.new_zeros((3, len(running_mean)), dtype=dtype)

    def observe(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take in the input of the layer: a forward pre-hook."""
        if self.used:
            raise RuntimeError(
                f"BatchNorm layer {self.name!r} is used twice in one forward pass, so it has no "
                "single mean and variance"
            )
        self.used = True
        values: Tensor = args[0] if args else kwargs["input"]
        if values.numel() == 0:
            return
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        dims = [d for d in range(values.dim()) if d != 1]
        var, mean = (v.to(self.sums) for v in torch.var_mean(values, dims, correction=0))
        count = values.numel() // values.shape[1]
        self.sums += count * torch.stack([torch.ones_like(mean), mean, var + mean**2])

    def write(self, sums: Tensor) -> None:
        """Put mean and variance into the layer, if any value has reached it."""
        count, mean, square = sums[0], sums[1] / sums[0], sums[2] / sums[0]
        if count[0] > 0:  # waits for the device
            self.layer.get_buffer("running_mean").copy_(mean)
            self.layer.get_buffer("running_var").copy_((square - mean**2).clamp(min=0))


def _statistics(model: nn.Module) -> list[_Statistics]:
    return [
        _Statistics(name, layer, layer.running_mean)
        for name, layer in model.named_modules()
        if isinstance(layer, _BatchNorm) and layer.training and layer.running_mean is not None
    ]


@contextmanager
def _observing(layers: list[_Statistics]) -> Iterator[None]:
    """Watch the inputs of the layers; at the end their buffers are what they were before."""
    buffers = [buffer for s in layers for buffer in s.layer.buffers(recurse=False)]
    saved = [buffer.clone() for buffer in buffers]
    hooks = [s.layer.register_forward_pre_hook(s.observe, with_kwargs=True) for s in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for buffer, value in zip(buffers, saved, strict=True):
            buffer.copy_(value)
