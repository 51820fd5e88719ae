"""Wraps optimizers."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch.optim import Optimizer

from hooktrain.solver.optim_wrapper import OptimWrapper
from hooktrain.solver.optim_wrapper_dict import OptimWrapperDict
from hooktrain.solver.param_groups import (
    get_default_optimizer_params as get_default_optimizer_params,
    reduce_param_groups as reduce_param_groups,
)

# The wrapper of one optimizer, or the wrappers of several by name.
Wrappers: TypeAlias = OptimWrapper | OptimWrapperDict


def as_optim_wrapper(
    optimizer: Any, wrap: Callable[[Optimizer], OptimWrapper] = OptimWrapper
) -> Wrappers:
    """Wrap an optimizer, unless it is wrapped already.

    Args:
        optimizer: a wrapper, which is returned; a torch optimizer, which is wrapped; or a
            dict of these by name, which becomes an :class:`OptimWrapperDict`.
        wrap: the function that wraps a torch optimizer.

    Raises:
        TypeError: for any other object.
    """
    if isinstance(optimizer, Wrappers):
        return optimizer
    if isinstance(optimizer, Optimizer):
        return wrap(optimizer)
    if isinstance(optimizer, Mapping) and optimizer:
        wrappers: Any = {
            name: as_optim_wrapper(each, wrap) for name, each in optimizer.items()
        }
        return OptimWrapperDict(**wrappers)
    raise TypeError(
        "expected a torch optimizer, an OptimWrapper, or a dict of these by name, such as "
        f"{{'generator': ..., 'discriminator': ...}}, but got {optimizer!r:.40}"
    )
