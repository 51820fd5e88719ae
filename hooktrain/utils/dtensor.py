"""Tensors of which each rank holds a shard: put together to a full one, and split again."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hooktrain.utils import comm
from hooktrain.utils.to_device import map_items


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor. Importing that class takes half a second, so it is not done here."""
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
        A copy of the containers. On the main process full tensors on the CPU replace the sharded
        ones; on the others None does, so that only one process holds the whole in memory. All else
        is the same object.
    """
    return map_leaves(lambda _, leaf: _on_main(leaf) if is_sharded(leaf) else leaf, state)


def _on_main(sharded: Tensor) -> Tensor | None:
    full = full_tensor(sharded)
    return full.cpu() if comm.is_main_process() else None  # host-device synchronisation


def map_leaves(
    function: Callable[[tuple[Any, ...], Any], Any], state: Any, path: tuple[Any, ...] = ()
) -> Any:
    """A copy of nested dicts, lists and tuples with ``function(path, leaf)`` for each leaf.

    Args:
        function: takes the keys and indices that lead to a leaf, and the leaf.
        state: it is not changed.
        path: of the state itself.
    """
    if isinstance(state, dict | list | tuple):
        return map_items(lambda key, item: map_leaves(function, item, (*path, key)), state)
    return function(path, state)


@torch.no_grad()
def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """Split a full tensor as another one of its shape is. Collective if that one is sharded.

    Args:
        value: the full tensor. The first rank's value counts.
        like: gives sharding and device. If it is not sharded, or ``value`` is already, or the
            shapes differ, ``value`` itself is returned.
    """
    if not is_sharded(like) or is_sharded(value) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor  # there are shards: it is loaded

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return distribute_tensor(value.detach(), mesh, placements).to(like.device)


def load_full_state_dict(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a state of full tensors into a model, sharded or not. Collective.

    Args:
        model: changed in place.
        state: on every rank. It is not changed.

    Raises:
        RuntimeError: if names or shapes differ, as :meth:`torch.nn.Module.load_state_dict` does.
    """
    ours = model.state_dict()
    # In the model's order, not that of the state, so that all ranks communicate in one order.
    sharded = {name: shard_like(state[name], ours[name]) for name in ours if name in state}
    model.load_state_dict({**state, **sharded})
