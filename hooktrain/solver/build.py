"""Optimizers in their wrappers."""

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch.optim import Optimizer

from hooktrain.solver.optim_wrapper import OptimWrapper
from hooktrain.solver.optim_wrapper_dict import OptimWrapperDict, wrappers_by_name
from hooktrain.solver.param_groups import (
    get_default_optimizer_params as get_default_optimizer_params,
    reduce_param_groups as reduce_param_groups,
)
from hooktrain.utils.names import check_count

logger = logging.getLogger(__name__)

# Of one optimizer, or of several by name.
Wrappers: TypeAlias = OptimWrapper | OptimWrapperDict


def as_optim_wrapper(
    optimizer: Any, wrap: Callable[[Optimizer], OptimWrapper] = OptimWrapper
) -> Wrappers:
    """An optimizer in its wrapper, as trainers take it.

    Args:
        optimizer: a wrapper, which is returned; a torch optimizer, which is wrapped; or a
            dict of these by name, which becomes an :class:`OptimWrapperDict`.
        wrap: makes the wrapper of a torch optimizer.

    Raises:
        TypeError: for anything else.
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
        "expected a torch optimizer, an OptimWrapper, or a dict of these by name, but got "
        f"{optimizer!r} of {type(optimizer)}"
    )


def scale_lr(optim_wrapper: Wrappers, batch: int, base_batch: Any) -> None:
    """Multiply the learning rates of one or several optimizers by a ratio of batch sizes.

    This is the linear rule of `Goyal et al. <https://arxiv.org/abs/1706.02677>`_. Call it
    before schedulers are built, since these note the rates that they find.

    Args:
        optim_wrapper: the optimizer, or several.
        batch: the samples of all ranks in one backward pass.
        base_batch: those for which the rates were chosen.

    Raises:
        ValueError: if one of the two is not a whole number above 0.
        RuntimeError: if a scheduler has noted a rate already.
    """
    check_count("the batch size of the loader", batch)
    check_count("base_batch_size of auto_scale_lr", base_batch)
    ratio = batch / base_batch
    logger.info("The batch is %g times as large: so are learning rates", ratio)
    for wrapper in wrappers_by_name(optim_wrapper).values():
        for group in wrapper.param_groups:
            if "initial_lr" in group:
                raise RuntimeError(
                    "a scheduler has noted the learning rates before they were scaled: build "
                    "schedulers afterwards"
                )
            group["lr"] = group["lr"] * ratio
