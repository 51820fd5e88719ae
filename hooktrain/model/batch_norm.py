"""Batch norm with the statistics of one rank, or of all ranks together."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["BatchNormXd", "CPUSyncBatchNorm", "convert_sync_batchnorm", "revert_sync_batchnorm"]


class BatchNormXd(nn.BatchNorm2d):
    """Batch norm over inputs of shape (N, C) or (N, C, ...), with any number of dimensions.

    It is a BatchNorm2d for those who look for batch norms by their type.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"the input must be of shape (N, C, ...), but got {input.shape}")


class CPUSyncBatchNorm(BatchNormXd):
    """Batch norm with the mean and the variance of all ranks' batches together, on the CPU.

    What :class:`torch.nn.SyncBatchNorm` does on accelerators: it refuses the CPU, and so does
    DistributedDataParallel for it. Forward and backward communicate twice each, in training only.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalise an input of shape (N, C) or (N, C, ...)."""
        if not self.training or not dist.is_initialized() or dist.get_world_size() == 1:
            return super().forward(input)
        self._check_input_dim(input)
        shape = [1, -1] + [1] * (input.dim() - 2)
        dims = [0, *range(2, input.dim())]
        size = input.new_tensor([input.numel() / input.shape[1]])
        total = _sum_of_ranks(torch.cat([input.sum(dims), size]))
        size = total[-1].detach()
        mean = total[:-1] / size
        centered = input - mean.view(shape)
        # A second exchange, as the mean of the squares less the square of the mean loses digits.
        var = _sum_of_ranks(centered.square().sum(dims)) / size
        self._track(mean, var * size / (size - 1))
        output = centered * (var + self.eps).rsqrt().view(shape)
        return output * self.weight.view(shape) + self.bias.view(shape) if self.affine else output

    @torch.no_grad()
    def _track(self, mean: Tensor, unbiased_var: Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        # Without a momentum, the mean over all batches.
        share = 1 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, share)
        self.running_var.lerp_(unbiased_var, share)


def _sum_of_ranks(values: Tensor) -> Tensor:
    total: Tensor = _AllReduce.apply(values)  # type: ignore[no-untyped-call]
    return total


class _AllReduce(torch.autograd.Function):
    """The sum over the ranks, of the values and, on the way back, of their gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total


_SYNCHRONISED: dict[str, type[_BatchNorm]] = {"torch": nn.SyncBatchNorm, "cpu": CPUSyncBatchNorm}


def convert_sync_batchnorm(module: nn.Module, implementation: str = "torch") -> nn.Module:
    """Replace each batch norm by a :class:`torch.nn.SyncBatchNorm`, in place.

    Parameters, buffers and mode stay, and a layer that stands at several places is still one.
    (:meth:`torch.nn.SyncBatchNorm.convert_sync_batchnorm` makes several of it.) Convert before the
    model is wrapped in DistributedDataParallel.

    Args:
        module: the model.
        implementation: ``"torch"``, which runs on accelerators only, or ``"cpu"`` for
            :class:`~hooktrain.model.CPUSyncBatchNorm`.

    Returns:
        The module, or what took its place if it was a batch norm itself.

    Raises:
        ValueError: for another implementation.
    """
    if implementation not in _SYNCHRONISED:
        raise ValueError(f"implementation must be 'torch' or 'cpu', but got {implementation!r}")
    return _replace(
        module,
        lambda m: isinstance(m, _BatchNorm) and type(m) not in _SYNCHRONISED.values(),
        _SYNCHRONISED[implementation],
    )


def revert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Replace each batch norm that communicates by a :class:`BatchNormXd`, in place.

    So a model that was trained on several accelerators runs on the CPU too. Parameters, buffers
    and mode stay, and a layer that stands at several places is still one.

    Returns:
        The module, or what took its place if it was such a batch norm itself.
    """
    return _replace(module, lambda m: isinstance(m, (*_SYNCHRONISED.values(),)), BatchNormXd)


def _replace(
    module: nn.Module, wanted: Callable[[nn.Module], bool], new_type: type[_BatchNorm]
) -> nn.Module:
    made = {old: _like(old, new_type) for old in module.modules() if wanted(old)}
    for parent in list(module.modules()):
        # named_children() has no second name of a module.
        for name, child in parent._modules.items():
            if child in made:
                parent._modules[name] = made[child]
    return made.get(module, module)


def _like(norm: nn.Module, new_type: type[_BatchNorm]) -> nn.Module:
    """A batch norm of another type with the same tensors."""
    assert isinstance(norm, _BatchNorm)
    # On the meta device: its own tensors are not needed.
    new = new_type(
        norm.num_features,
        norm.eps,
        norm.momentum,
        norm.affine,
        norm.track_running_stats,
        device="meta",
    )
    new._parameters.update(norm._parameters)
    new._buffers.update(norm._buffers)
    return new.train(norm.training)
