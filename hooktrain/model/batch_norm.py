"""Batch norm with the statistics of one rank, or of all ranks together."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["BatchNormXd", "convert_sync_batchnorm", "revert_sync_batchnorm"]


class BatchNormXd(nn.BatchNorm2d):
    """Batch norm over inputs of shape (N, C) or (N, C, ...), with any number of dimensions.

    It is a BatchNorm2d for those who look for batch norms by their type.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"the input must be of shape (N, C, ...), but got {input.shape}")


def convert_sync_batchnorm(module: nn.Module, implementation: str = "torch") -> nn.Module:
    """Replace each batch norm by a :class:`torch.nn.SyncBatchNorm`, in place.

    Parameters, buffers and mode stay, and a layer that stands at several places is still one.
    (:meth:`torch.nn.SyncBatchNorm.convert_sync_batchnorm` makes several of it.) It runs on
    accelerators only; convert before the model is wrapped in DistributedDataParallel.

    Args:
        module: the model.
        implementation: ``"torch"``; there is no other here.

    Returns:
        The module, or what took its place if it was a batch norm itself.

    Raises:
        ValueError: for another implementation.
    """
    if implementation != "torch":
        raise ValueError(f"implementation must be 'torch', but got {implementation!r}")
    return _replace(
        module,
        lambda m: isinstance(m, _BatchNorm) and not isinstance(m, nn.SyncBatchNorm),
        nn.SyncBatchNorm,
    )


def revert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Replace each :class:`torch.nn.SyncBatchNorm` by a :class:`BatchNormXd`, in place.

    So a model that was trained on several accelerators runs on the CPU too. Parameters, buffers
    and mode stay, and a layer that stands at several places is still one.

    Returns:
        The module, or what took its place if it was a SyncBatchNorm itself.
    """
    return _replace(module, lambda m: isinstance(m, nn.SyncBatchNorm), BatchNormXd)


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
