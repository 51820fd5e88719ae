"""A nested state taken apart into its tensors by name and all the rest, and put together again."""

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["ItemPath", "join_state", "split_state"]

ItemPath = tuple[Any, ...]
"""The keys and indices that lead to an item of a nested state."""

_TENSORS = (Tensor, torch.nn.Parameter, DTensor)


def split_state(state: Any) -> tuple[Any, dict[str, ItemPath], dict[str, Tensor]]:
    """Take the tensors out of a nested state; it is not changed.

    Tensors that are sparse or quantized stay where they are, and so do those that stand elsewhere
    than in dicts, lists and tuples.

    Returns:
        A copy of the containers with None in place of the tensors; the path of each tensor by its
        dotted name; the tensors by name.

    Raises:
        ValueError: if two paths have one dotted name, as ``{"a.b": x, "a": {"b": y}}`` does.
    """
    paths: dict[str, ItemPath] = {}
    tensors: dict[str, Tensor] = {}

    def take(path: ItemPath, leaf: Any) -> Any:
        if type(leaf) not in _TENSORS or not _is_plain(leaf):
            return leaf
        name = ".".join(map(str, path))
        if name in paths:
            raise ValueError(f"the keys {paths[name]!r} and {path!r} are both named {name!r}")
        paths[name], tensors[name] = path, leaf
        return None

    return _map_leaves(take, (), state), paths, tensors


def join_state(tree: Any, paths: Mapping[str, ItemPath], tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of :func:`split_state`."""
    at = {path: tensors[name] for name, path in paths.items()}
    return _map_leaves(lambda path, leaf: at.get(path, leaf), (), tree)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized


def _map_leaves(function: Callable[[ItemPath, Any], Any], path: ItemPath, value: Any) -> Any:
    kind = type(value)
    if kind in (dict, OrderedDict, Counter):
        mapped = copy.copy(value)  # with its attributes, such as the _metadata of a state dict
        for key, item in value.items():
            mapped[key] = _map_leaves(function, (*path, key), item)
        return mapped
    if kind in (list, tuple):
        return kind(_map_leaves(function, (*path, i), item) for i, item in enumerate(value))
    return function(path, value)
