"""Exact statistics for BatchNorm layers, in place of the moving averages of training."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hooktrain.utils import heartbeat

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


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
        model: is called with each batch, without gradients, in the mode that it is in.
        data_loader: at least ``num_iters`` batches. No more are drawn from it.
        num_iters: at least 1.

    Raises:
        RuntimeError: a layer is used twice in one forward pass: it has no single statistics.
        ValueError: ``num_iters`` is not positive, or the loader is shorter, on any rank.
    """
    if num_iters < 1:
        raise ValueError(f"num_iters must be at least 1: {num_iters!r}")
    layers = _statistics(model)
    if not layers:
        return
    seen = 0
    with _observing(layers):
        for batch in islice(data_loader, num_iters):
            for statistics in layers:
                statistics.used = False
            model(batch)
            heartbeat.beat()
            seen += 1
    # A rank with too few batches takes part in the exchange too: no other rank waits in vain.
    missing = _merge_ranks(layers, num_iters - seen)
    if missing:
        raise ValueError(
            f"data_loader gave {seen} of the num_iters={num_iters} batches asked for"
            + ("" if missing == num_iters - seen else f"; all ranks together miss {missing}")
        )
    for statistics in layers:
        statistics.write()


class _Statistics:
    """Count, mean and sum of squared deviations of the values that reach one layer.

    Batches and ranks are merged by deviations from the mean, not by sums of squares, which would
    cancel where the mean is large (Chan, Golub and LeVeque, 1979).
    """

    def __init__(self, name: str, layer: nn.Module, running_mean: Tensor) -> None:
        self.name, self.layer = name, layer
        self.used = False  # in the current forward pass
        self.count = 0  # values a channel
        # Apple's devices have no float64.
        dtype = torch.float32 if running_mean.device.type == "mps" else torch.float64
        self.mean = torch.zeros_like(running_mean, dtype=dtype)
        self.spread = torch.zeros_like(self.mean)

    def observe(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take in the input of the layer: a forward pre-hook."""
        if self.used:
            raise RuntimeError(
                f"BatchNorm layer {self.name!r} is used twice in one forward pass, so it has no "
                "single mean and variance to estimate: use a layer for each place"
            )
        self.used = True
        values: Tensor = args[0] if args else kwargs["input"]
        count = values.numel() // max(1, values.shape[1])
        if count == 0:
            return
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        dims = [d for d in range(values.dim()) if d != 1]
        var, mean = torch.var_mean(values, dims, correction=0)
        total = self.count + count
        delta = mean - self.mean
        self.mean += delta * (count / total)
        self.spread += var.to(delta.dtype) * count + delta**2 * (self.count * count / total)
        self.count = total

    def write(self) -> None:
        """Put mean and variance into the layer, if any value has reached it."""
        if self.count:
            for name, value in (
                ("running_mean", self.mean),
                ("running_var", self.spread / self.count),
            ):
                self.layer.get_buffer(name).copy_(value)


def _statistics(model: nn.Module) -> list[_Statistics]:
    return [
        _Statistics(name, layer, layer.running_mean)
        for name, layer in model.named_modules()
        if isinstance(layer, _BATCH_NORMS) and layer.training and layer.running_mean is not None
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


def _merge_ranks(layers: list[_Statistics], missing: int) -> int:
    """Make the statistics those of all ranks; return the sum of ``missing`` over the ranks."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return missing
    device, sizes = layers[0].mean.device, [s.mean.numel() for s in layers]
    counts = torch.cat([torch.full_like(s.mean, s.count, device=device) for s in layers])
    means = torch.cat([s.mean.to(device) for s in layers])
    spreads = torch.cat([s.spread.to(device) for s in layers])
    sums = torch.cat([counts, counts * means, counts.new_tensor([missing])])
    dist.all_reduce(sums)
    all_counts, all_sums = sums[:-1].view(2, -1)
    all_means = all_sums / all_counts.clamp(min=1)
    # What a rank adds: the deviations from its own mean, and of its mean from that of all.
    spreads += counts * (means - all_means) ** 2
    dist.all_reduce(spreads)
    merged = torch.stack([all_counts, all_means, spreads])
    for s, (count, mean, spread) in zip(layers, merged.split_with_sizes(sizes, dim=1), strict=True):
        s.count, s.mean, s.spread = int(count[0]), mean, spread  # synchronises with the device
    return int(sums[-1])
