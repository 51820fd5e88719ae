"""Helpers for sharded tensors, non-finite tensors and tensors in nested containers."""

import copy
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import combinations
from operator import setitem
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hooktrain.utils import comm
from hooktrain.utils.names import Keys, dotted

# The extra memory of a broadcast, as in DistributedDataParallel.
_BUCKET_BYTES = 250 * 1024 * 1024

# A device, or its name.
Device = str | torch.device

# Tensors by name, such as the weights of a model, its gradients or its losses.
Tensors = dict[str, Tensor]


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor. Importing that class would take half a second."""
    return isinstance(tensor, Tensor) and hasattr(tensor, "device_mesh")


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard of a sharded tensor, with shared memory; other tensors unchanged."""
    if not is_sharded(tensor):
        return tensor
    local: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return local.detach()


def broadcast_tensors(tensors: Iterable[Tensor], group: comm.Group = None) -> None:
    """Send the first rank's tensors to the other ranks of a group. Collective.

    Args:
        tensors: the tensors, which are changed in place; of sharded ones the local shards.
        group: the ranks that take part; None means all ranks.
    """
    local = [local_tensor(tensor.detach()) for tensor in tensors]
    if local and comm.get_world_size() > 1:
        # DistributedDataParallel uses this function too; it has no public name.
        dist._broadcast_coalesced(group or dist.group.WORLD, local, _BUCKET_BYTES, 0)  # type: ignore[arg-type, attr-defined]


def broadcast_model(model: nn.Module, group: comm.Group = None) -> None:
    """Send the first rank's parameters and buffers; see :func:`broadcast_tensors`. Collective."""
    broadcast_tensors((*model.parameters(), *model.buffers()), group)


def local_box(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The offsets and the shape of this rank's shard within a sharded tensor.

    For other tensors, those of the whole tensor.
    """
    if not is_sharded(tensor):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    # torch.distributed.checkpoint calls this method too.
    (shard,) = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
    return tuple(shard.offsets), tuple(shard.sizes)


def narrow(tensor: Tensor, offsets: Iterable[int], sizes: Iterable[int]) -> Tensor:
    """A view of a tensor at these offsets, of these sizes."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def device_of(tensor: Tensor) -> torch.device:
    """The device on which a tensor is used in computations.

    An offloaded shard is in CPU memory; its mesh has the device.
    """
    if is_sharded(tensor):
        return torch.device(tensor.device_mesh.device_type)  # type: ignore[attr-defined]
    return tensor.device


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a dense tensor as a vector, which shares its memory if it is contiguous."""
    # flatten() leaves a single number the stride that it has in another tensor.
    flat = tensor.contiguous().resolve_conj().resolve_neg()
    return flat.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def checksum(tensor: Tensor) -> int:
    """A checksum of the bytes of a tensor; 0 if it is sharded, sparse or nested."""
    if is_sharded(tensor) or tensor.is_nested or tensor.layout is not torch.strided:
        return 0
    # Host-device synchronisation.
    numbers: Any = as_bytes(tensor.detach().cpu()).numpy()
    return crc32(numbers)


def norm_of(tensors: Iterable[Tensor]) -> float:
    """The norm of all tensors together; of this rank's shards if they are sharded."""
    local = map(local_tensor, tensors)
    return float(nn.utils.get_total_norm(local))  # host-device synchronisation


def full_tensor(tensor: Tensor) -> Tensor:
    """A sharded tensor as a whole, on every rank; other tensors unchanged. Collective."""
    if not is_sharded(tensor):
        return tensor
    # An offloaded tensor first goes to the device where the ranks can exchange it.
    moved: Any = tensor.detach().to(device_of(tensor))
    full: Tensor = moved.full_tensor()
    return full


def full_tensors(state: Any) -> Any:
    """Gather the sharded tensors of a nested state, one after the other. Collective.

    Args:
        state: nested dicts, lists and tuples; it is not changed.

    Returns:
        A copy of the containers. In place of the sharded tensors it has full tensors on the CPU on
        the main process, and None on the other ranks, so that only one process holds all of them
        in memory. All other leaves are the same objects.
    """

    def gather(_: Keys, leaf: Any) -> Any:
        if not is_sharded(leaf):
            return leaf
        full = full_tensor(leaf)
        # A host-device synchronisation.
        return full.cpu() if comm.is_main_process() else None

    return map_leaves(gather, state)


def map_leaves(function: Callable[[Keys, Any], Any], data: Any, path: Keys = ()) -> Any:
    """Copy nested containers, with ``function(path, leaf)`` in place of each leaf.

    Containers are mutable mappings, lists, deques, tuples and dataclasses without a method ``to``.
    They keep their types and attributes, such as the ``_metadata`` of a state; tuples keep their
    type.

    Args:
        function: a function of the path to a leaf, which consists of keys, indices and field
            names, and of the leaf.
        data: the containers, or a leaf; they are not changed.
        path: the path to ``data`` itself.
    """
    items = _items(data)
    if items is None:
        return function(path, data)
    changed = {key: map_leaves(function, item, (*path, key)) for key, item in items}
    return with_items(data, changed)


def _items(data: Any) -> Iterable[tuple[Any, Any]] | None:
    """The items of a container with their keys, indices or names; None for a leaf."""
    if callable(getattr(data, "to", None)):
        return None
    if isinstance(data, MutableMapping):
        return data.items()
    if isinstance(data, list | tuple | deque):
        return enumerate(data)
    if is_dataclass(data):
        return [(field.name, getattr(data, field.name)) for field in fields(data)]
    return None


def with_items(data: Any, items: dict[Any, Any]) -> Any:
    """A copy of a container with these items."""
    kind: Any = type(data)
    if isinstance(data, tuple):
        make = getattr(kind, "_make", partial(kind.__new__, kind))  # of a namedtuple
        return make([*items.values()])
    # The container is copied, since not every class can be called with its items.
    changed = copy.copy(data)
    # The attributes of a dataclass may be frozen.
    put = setitem if hasattr(data, "__setitem__") else object.__setattr__
    for key, item in items.items():
        put(changed, key, item)
    return changed


def shards_of(model: nn.Module | None) -> Tensors:
    """The sharded tensors of a model's state by name."""
    state = {} if model is None else model.state_dict()
    return {name: value for name, value in state.items() if is_sharded(value)}


def shard_for(tensor: Tensor, key: str, shards: Tensors) -> Tensor | None:
    """The sharded tensor of the same shape whose name is part of the dotted key.

    Weights, their averages and the state of an optimizer have such keys.
    """
    parts = key.split(".")
    for begin, end in combinations(range(len(parts) + 1), 2):
        shard = shards.get(".".join(parts[begin:end]))
        if shard is not None and shard.shape == tensor.shape:
            return shard
    return None


@torch.no_grad()
def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """Take this rank's shard of a full tensor, such as a memory-mapped one, which is not loaded.

    Args:
        value: the full tensor, with equal values on all ranks.
        like: the tensor whose sharding and device the result gets.

    Returns:
        The sharded tensor. It is ``value`` itself if ``like`` is not sharded, if ``value`` is
        sharded already, or if the shapes differ.
    """
    if not is_sharded(like) or is_sharded(value) or value.shape != like.shape:
        return value
    sharded = torch.empty_like(like, dtype=value.dtype)
    # A host-device synchronisation, if the shard is on an accelerator.
    local_tensor(sharded).copy_(narrow(value, *local_box(like)))
    return sharded


def non_finite(tensors: Mapping[str, Any]) -> set[str]:
    """Name the tensors that hold infinity or NaN, such as ``{"mask is inf", "weight is nan"}``.

    Only the local shard of a sharded tensor is checked. Tensors without data, tensors with one byte
    per number, and values that are not tensors are skipped.

    Args:
        tensors: the tensors by name, possibly in the containers of :func:`map_leaves`. Their
            names are joined by dots.
    """
    found: Tensors = {}

    def keep(path: Keys, leaf: Any) -> None:
        numbers = _numbers(leaf)
        if numbers is not None:
            found[dotted(path)] = numbers

    map_leaves(keep, tensors)
    # The maximum norm, since a sum of squares may overflow.
    largest = nn.utils.get_total_norm(found.values(), math.inf)
    if largest.isfinite():  # host-device synchronisation
        return set()
    norms = {name: each.abs().max().item() for name, each in found.items()}
    return {
        f"{name} is {norm}" for name, norm in norms.items() if not math.isfinite(norm)
    }


def _numbers(tensor: Any) -> Tensor | None:
    """The numbers of the local shard that may be infinite or NaN; None if there are none."""
    if not isinstance(tensor, Tensor) or is_lazy(tensor) or tensor.is_meta:
        return None
    has_inf = tensor.is_floating_point() or tensor.is_complex()
    if not has_inf or tensor.itemsize == 1:
        return None
    local = local_tensor(tensor)
    if local.is_sparse:
        local = local.coalesce().values()
    return local if local.numel() > 0 else None


def types_of(data: Any) -> Any:
    """The data types and shapes of a batch, for messages."""
    return map_leaves(
        lambda _, leaf: (
            getattr(leaf, "dtype", type(leaf)),
            getattr(leaf, "shape", ()),
        ),
        data,
    )


def compute_device(model: nn.Module) -> torch.device:
    """The device on which a model computes; the CPU if it has no parameters."""
    return device_of(next(model.parameters(), torch.empty(0)))


def mover_to(model: nn.Module) -> Callable[[Any], Any]:
    """The function that moves a batch to the device of a model; see :func:`to_device`.

    On the CPU it returns batches unchanged, and also for a model with a ``train_step``, which moves
    its batches itself.
    """
    device = compute_device(model)
    if device.type == "cpu" or hasattr(model, "train_step"):
        return lambda data: data
    return partial(to_device, device=device)


def to_device(data: Any, device: torch.device) -> Any:
    """Move the tensors in nested containers to a device; see :func:`map_leaves`.

    Other objects with a method ``to`` are moved too, such as the encodings of Hugging Face's
    tokenizers. The host does not wait for a copy from pinned memory.
    """

    def move(_: Keys, leaf: Any) -> Any:
        if not callable(getattr(leaf, "to", None)):
            return leaf
        try:
            return leaf.to(device, non_blocking=device.type != "cpu")
        except TypeError:  # not every method `to` takes non_blocking
            return leaf.to(device)

    return map_leaves(move, data)
