"""What is done to a model between its configuration and its first step."""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hooktrain.config import instantiate
from hooktrain.utils import comm
from hooktrain.utils.registry import MODELS, did_you_mean

__all__ = ["ModelSource", "broadcast_buffers", "broadcast_weights", "build_model", "compile_model"]

logger = logging.getLogger(__name__)

ModelSource: TypeAlias = nn.Module | Mapping[str, Any] | Callable[[], nn.Module]
"""A model, its configuration, or a function that makes it."""

# As in DistributedDataParallel: so much memory a broadcast may take beside the weights.
_BUCKET_BYTES = 250 * 1024 * 1024


def build_model(model: Any) -> nn.Module:
    """See :meth:`BaseStrategy.build_model`."""
    built = instantiate(model)
    if isinstance(built, Mapping):
        built = MODELS.build(built)
    elif callable(built) and not isinstance(built, nn.Module):
        built = built()
    if not isinstance(built, nn.Module):
        raise TypeError(f"model should be a nn.Module object, dict or function, but got {model!r}")
    return built


def compile_model(model: nn.Module, compile: bool | Mapping[str, Any] = False) -> nn.Module:
    """See :meth:`BaseStrategy.compile_model`."""
    if not isinstance(compile, bool | Mapping):
        raise TypeError(f"compile must be a bool or a dict of options, but got {compile!r}")
    options = {} if isinstance(compile, bool) else dict(compile)
    if compile is False or options.get("disable", False):
        return model
    target = options.pop("target", "forward")
    method = getattr(model, target, None)
    if not callable(method):
        methods = [name for name in dir(type(model)) if callable(getattr(type(model), name))]
        raise ValueError(
            f"compile: {type(model).__name__} has no method {target!r}"
            f"{did_you_mean(str(target), methods)}"
        )
    if target == "forward":
        # The method of nn.Module knows of hooks, and copies of the model do without.
        model.compile(**options)
    else:
        setattr(model, target, torch.compile(method, **options))
    logger.info("%s.%s is compiled: the first iterations take long", type(model).__name__, target)
    return model


def broadcast_weights(model: nn.Module) -> None:
    """Give all ranks the first one's parameters and buffers, in one coalesced broadcast.

    A collective. The tensors are on a device that the backend of the process group serves.
    """
    _broadcast((*model.parameters(), *model.buffers()))


def broadcast_buffers(model: nn.Module) -> None:
    """Give all ranks the first one's buffers, those that a checkpoint holds. A collective.

    Ranks that do not exchange them while training have statistics of their own batches in them.
    """
    _broadcast(model.buffers())


def _broadcast(given: Iterable[Tensor]) -> None:
    tensors = [tensor.detach() for tensor in given]
    if not tensors or comm.get_world_size() == 1:
        return
    # What DistributedDataParallel uses for the same purpose; torch has no public name for it.
    group = dist.distributed_c10d._get_default_group()
    dist._broadcast_coalesced(group, tensors, _BUCKET_BYTES, 0)  # type: ignore[attr-defined]
