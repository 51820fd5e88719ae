"""Where the shards of a saved state are read to, so that each rank reads its own and no more."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hooktrain.checkpoint.tree import ItemPath, split_state
from hooktrain.utils.dtensor import is_sharded

__all__ = ["shard_targets"]


def shard_targets(model: nn.Module, saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """Room for this rank's shards of all that is saved of a sharded model.

    That is what has the name and shape of one of its tensors, wherever in the state: the weights,
    and averages of them. And what has the shape of one inside the state of an optimizer (a dict
    with ``param_groups``, as torch's), unless tensors of that shape are sharded in several ways.

    Args:
        model: it is not changed.
        saved: with tensors on the device "meta".

    Returns:
        New tensors, sharded as the model's, by their dotted names in ``saved``; none if the model
        is not sharded.
    """
    sharded = {name: value for name, value in model.state_dict().items() if is_sharded(value)}
    if not sharded:
        return {}
    by_shape = _of_one_layout(sharded.values())
    optimizers = tuple(_optimizers(saved, ()))
    _, paths, tensors = split_state(saved)
    targets = {}
    for name, path in paths.items():
        shape = tensors[name].shape
        like = sharded.get(path[-1])
        if any(path[: len(optimizer)] == optimizer for optimizer in optimizers):
            like = by_shape.get(shape)
        if like is not None and like.shape == shape:
            dtype = tensors[name].dtype
            targets[name] = torch.empty_like(like, dtype=dtype, requires_grad=False)
    return targets


def _of_one_layout(tensors: Any) -> dict[torch.Size, Tensor]:
    """A sharded tensor of each shape, where all of the shape are sharded in the same way."""
    found: dict[torch.Size, Tensor] = {}
    layouts: dict[torch.Size, list[Any]] = {}
    for tensor in tensors:
        found.setdefault(tensor.shape, tensor)
        layouts.setdefault(tensor.shape, []).append((tensor.device_mesh, tensor.placements))
    return {
        shape: tensor
        for shape, tensor in found.items()
        if all(layout == layouts[shape][0] for layout in layouts[shape])
    }


def _optimizers(value: Any, path: ItemPath) -> Iterator[ItemPath]:
    """The paths of the states of optimizers in a nested state."""
    if isinstance(value, Mapping):
        if "param_groups" in value:
            yield path
        for key, item in value.items():
            yield from _optimizers(item, (*path, key))
