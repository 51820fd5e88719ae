"""Batches on their way to the device of a model."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hooktrain.utils.registry import unwrap_model


def mover_to(model: nn.Module) -> Callable[[Any], Any]:
    """The function that brings a batch to the device of a model.

    It moves tensors in dicts, lists, tuples and dataclasses, and other objects with ``to``, such as
    the encodings of Hugging Face's tokenizers. From pinned memory nothing waits: while CUDA
    computes on a batch, it copies the next one.

    On the CPU batches stay as they are. So they do for a model with a ``train_step``, which brings
    them to its device by itself.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type == "cpu" or hasattr(unwrap_model(model), "train_step"):
        return lambda data: data
    is_cuda = device.type == "cuda"
    copying = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]

    def move(data: Any) -> Any:
        if isinstance(data, Tensor):
            return _copy(data, device, copying)
        return data.to(device) if can_move(data) else map_items(lambda _, item: move(item), data)

    return move


def _copy(tensor: Tensor, device: torch.device, copying: torch.cuda.Stream | None) -> Tensor:
    """Copy a tensor, on CUDA in a stream of its own, which does not wait for the computation."""
    if copying is None:
        return tensor.to(device, non_blocking=True)
    computing = torch.cuda.current_stream(device)
    with torch.cuda.stream(copying):
        moved = tensor.to(device, non_blocking=True)
    computing.wait_stream(copying)
    moved.record_stream(computing)  # its memory is lent again when that has used it
    return moved


def can_move(data: Any) -> bool:
    """Whether it is an object with a method ``to``, as a tensor is."""
    return callable(getattr(data, "to", None)) and not isinstance(data, type)


def map_items(function: Callable[[Any, Any], Any], data: Any) -> Any:
    """A dict, list, tuple or dataclass of the same type with ``function(key, item)`` for its items.

    A key is that of a dict, an index or the name of a field. Attributes of a dict, such as the
    ``_metadata`` of a state dict, stay. Everything else, such as strings and None, is returned as
    it is.
    """
    if isinstance(data, Mapping | list):
        # Not every kind of dict can be made from pairs: defaultdict for one.
        changed: Any = copy.copy(data)
        for key, value in data.items() if isinstance(data, Mapping) else enumerate(data):
            changed[key] = function(key, value)
        return changed
    if isinstance(data, tuple):
        make = getattr(type(data), "_make", type(data))  # namedtuple or tuple
        return make([function(i, item) for i, item in enumerate(data)])
    if is_dataclass(data) and not isinstance(data, type):
        names = [field.name for field in fields(data)]
        return replace(data, **{name: function(name, getattr(data, name)) for name in names})
    return data
