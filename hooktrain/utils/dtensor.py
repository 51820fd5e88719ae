"""Tensors of which each rank holds a shard: put together to a full one, and split again."""

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hooktrain.utils import comm

__all__ = [
    "full_tensor",
    "full_tensors",
    "is_sharded",
    "load_full_state_dict",
    "local_tensor",
    "shard_like",
]


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor. To import that class takes half a second, also without shards."""
    return isinstance(tensor, Tensor) and hasattr(tensor, "device_mesh")


def local_tensor(tensor: Tensor) -> Tensor:
    """The shard that this rank holds, sharing its memory; another tensor itself."""
    if not is_sharded(tensor):
        return tensor
    local: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return local.detach()


def full_tensor(tensor: Tensor) -> Tensor:
    """A sharded tensor as a whole, on every rank; another tensor itself. Collective."""
    if not is_sharded(tensor):
        return tensor
    home = tensor.device_mesh.device_type  # type: ignore[attr-defined]
    # What is offloaded goes where the ranks can exchange it.
    moved: Any = tensor if tensor.device.type == home else tensor.to(home)
    full: Tensor = moved.full_tensor()
    return full.detach()


def full_tensors(state: Any) -> Any:
    """Put the sharded tensors of a nested state together, one after the other. Collective.

    Args:
        state: of dicts, lists and tuples; it is not changed.

    Returns:
        A copy of the containers. On the main process full tensors on the CPU stand in place of the
        sharded ones; on the others None does, so that the whole is in the memory of one process
        only. All else is the same object.
    """
    if is_sharded(state):
        full = full_tensor(state)
        return full.cpu() if comm.is_main_process() else None
    if type(state) in (dict, OrderedDict):
        copied = copy.copy(state)  # with its attributes, such as the _metadata of a state dict
        for key, item in state.items():
            copied[key] = full_tensors(item)
        return copied
    if type(state) in (list, tuple):
        return type(state)([full_tensors(item) for item in state])
    return state


@torch.no_grad()
def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """Split a full tensor as another one of its shape is. Collective, where that one is sharded.

    Args:
        value: the full tensor; of the ranks' values the first rank's counts.
        like: gives sharding and device. If it is not sharded, or ``value`` is already, or the
            shapes differ, ``value`` itself is returned.
    """
    if not is_sharded(like) or is_sharded(value) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor  # there are shards: it is loaded

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return distribute_tensor(value.detach(), mesh, placements).to(like.device)


def load_full_state_dict(model: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
    """Load a state of full tensors into a model, sharded or not. Collective.

    Args:
        model: changed in place.
        state: on every rank. It is not changed.
        strict: whether the names must be the same.

    Raises:
        RuntimeError: if names or shapes differ, as :meth:`torch.nn.Module.load_state_dict` does.
    """
    ours = model.state_dict()
    # In the model's order, not that of the state, so that all ranks communicate in one order.
    sharded = {name: shard_like(state[name], ours[name]) for name in ours if name in state}
    rest = {name: item for name, item in state.items() if name not in ours}
    model.load_state_dict({**sharded, **rest}, strict=strict)
