"""What is done to optimizers and schedulers between their configuration and the first step."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from hooktrain.solver.group_scheduler import GroupParamScheduler
from hooktrain.solver.optim_wrapper import OptimWrapper
from hooktrain.solver.optim_wrapper_dict import OptimWrapperDict

__all__ = [
    "check_not_built",
    "initialize_counts",
    "load_scheduler_states",
    "scale_lr",
    "scaling_ratio",
    "scheduler_states",
    "wrappers_of",
]

logger = logging.getLogger(__name__)

Wrapper = OptimWrapper | OptimWrapperDict
Schedulers = list[Any] | dict[str, list[Any]]


def wrappers_of(optim_wrapper: Wrapper) -> list[OptimWrapper]:
    """The wrapper, or each of several."""
    if isinstance(optim_wrapper, OptimWrapperDict):
        return list(optim_wrapper.values())
    return [optim_wrapper]


def scaling_ratio(
    auto_scale_lr: Mapping[str, Any] | None, world_size: int, batch_size: int | None
) -> float:
    """By what to multiply learning rates: the batch of all ranks by the one they are meant for.

    Args:
        auto_scale_lr: ``enable``, without which the ratio is 1, and ``base_batch_size``.
        world_size: the number of ranks.
        batch_size: of one rank.

    Raises:
        ValueError: if one of the sizes is missing, or not positive.
    """
    if not auto_scale_lr or not auto_scale_lr.get("enable", False):
        return 1.0
    base = auto_scale_lr.get("base_batch_size")
    for name, size in (
        ("base_batch_size in auto_scale_lr", base),
        ("train_micro_batch_size_per_gpu in dispatch_kwargs", batch_size),
    ):
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"to scale learning rates, give {name}: it is {size!r}")
    assert isinstance(base, int)
    assert isinstance(batch_size, int)
    ratio = world_size * batch_size / base
    logger.info(
        "Learning rates are for batches of %d, and batches have %d: multiplied by %g",
        *(base, world_size * batch_size, ratio),
    )
    return ratio


def scale_lr(optim_wrapper: Wrapper, ratio: float) -> None:
    """Multiply the learning rate of every group, and the base rate where there is one."""
    for wrapper in wrappers_of(optim_wrapper):
        for group in wrapper.param_groups:  # with base_param_settings
            group["lr"] = group["lr"] * ratio


def check_not_built(scheduler: Any) -> None:
    """Refuse schedulers that have looked at learning rates already.

    Raises:
        RuntimeError: if there is one.
    """
    if isinstance(scheduler, GroupParamScheduler | LRScheduler):
        raise RuntimeError(
            f"learning rates are scaled before schedulers are built, and {scheduler!r} is built "
            "already: give its configuration, or turn auto_scale_lr off"
        )
    if isinstance(scheduler, Mapping):
        scheduler = list(scheduler.values())
    if isinstance(scheduler, Sequence) and not isinstance(scheduler, str):
        for item in scheduler:
            check_not_built(item)


def initialize_counts(
    optim_wrapper: Wrapper, model: nn.Module, max_iters: int | None, done: int = 0
) -> None:
    """Tell the wrappers that accumulate how long the run is, so that its last window is shorter.

    Args:
        optim_wrapper: one or several; those that do not accumulate need not know.
        model: the model.
        max_iters: the backward passes of the run; None changes nothing.
        done: the backward passes made so far, for wrappers that have not counted any.
    """
    for wrapper in wrappers_of(optim_wrapper):
        if wrapper.accumulative_counts > 1 and max_iters is not None:
            count = wrapper.inner_count or done
            wrapper.initialize_count_status(model, count, max(count, max_iters))


def scheduler_states(schedulers: Schedulers) -> list[Any] | dict[str, list[Any]]:
    """The state of each; a pure function of progress has none, which is an empty dict."""
    if isinstance(schedulers, dict):
        return {name: [_state(s) for s in each] for name, each in schedulers.items()}
    return [_state(scheduler) for scheduler in schedulers]


def load_scheduler_states(schedulers: Schedulers, states: Any) -> None:
    """Take back what :func:`scheduler_states` gave.

    Raises:
        ValueError: if the states are of more or fewer schedulers, or of others by name. Nothing
            was loaded then.
    """
    by_name = schedulers if isinstance(schedulers, dict) else {"": schedulers}
    of_states = states if isinstance(states, dict) else {"": states}
    counts = {name: len(each) for name, each in by_name.items()}
    saved = {name: len(each) for name, each in of_states.items()}
    if counts != saved:
        raise ValueError(
            f"the checkpoint has states of {_count(saved)}, and there are {_count(counts)}. Set up "
            "the same schedulers, or resume with resume_param_scheduler=False to begin new ones"
        )
    for name, each in by_name.items():
        for scheduler, state in zip(each, of_states[name], strict=True):
            if hasattr(scheduler, "load_state_dict"):
                scheduler.load_state_dict(state)


def _state(scheduler: Any) -> Any:
    return scheduler.state_dict() if hasattr(scheduler, "state_dict") else {}


def _count(schedulers: Mapping[str, int]) -> str:
    if "" in schedulers:
        return f"{schedulers['']} schedulers"
    return f"schedulers by name: {dict(schedulers)}"
