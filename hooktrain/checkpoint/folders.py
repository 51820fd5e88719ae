"""Folders of shards: each rank writes its part of the tensors, on a disk that all ranks see.

Each rank has a file of its own, ``shards_0.pth`` and so on, written and verified as any checkpoint
file. ``state.pth`` holds everything else, and says in which file and where in the tensor each part
of it is. The folder gets its name when it is complete.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from hooktrain.checkpoint.files import (
    SHARDS,
    STATE,
    CorruptCheckpointError,
    is_folder,
    load_file,
    load_verified,
    reading,
    verify_file,
    write_file,
)
from hooktrain.utils import comm
from hooktrain.utils.comm import on_all_ranks, on_main_process
from hooktrain.utils.file_io import AnyPath, replacing
from hooktrain.utils.names import dotted
from hooktrain.utils.tensors import (
    full_tensor,
    is_sharded,
    local_tensor,
    map_leaves,
    shard_for,
    shards_of,
)

Keys = tuple[Any, ...]
"""The keys and indices that lead to a tensor in a nested state."""

Part = tuple[tuple[int, ...], tuple[int, ...], str]
"""A part of a tensor: its offsets and sizes in the tensor, and the name of its file."""

# A copy from CUDA into pinned memory is faster. Pinning itself takes long, so small tensors are not
# worth it.
_PINNED_BYTES = 1 << 20


def save_folder(
    state: dict[str, Any], folder: AnyPath, group: ProcessGroup | None = None
) -> None:
    """Write a state to a folder that is there as a whole, or not at all. Collective.

    A sharded checkpoint of that name is replaced.

    Args:
        state: tensors and plain types, nested in dicts, lists, tuples and sets. Each rank writes
            its shards of DTensors; the main process writes everything else.
        folder: the path of the folder.
        group: of all ranks. A thread needs one that nobody else uses.

    Raises:
        ValueError: on every rank, if two tensors have one dotted name, or the ranks do not hold
            the shards of the same tensors.
        FileExistsError: if something else than a sharded checkpoint has that name.
        OSError: on every rank, if the disk of one is full or fails. The old folder is as it was.
        CorruptCheckpointError: likewise, if the disk does not give back what was written.
    """
    target = Path(folder)
    skeleton, tensors = _split(state)
    with ExitStack() as stack:

        def begin() -> Path:
            if target.exists() and not is_folder(target):
                raise FileExistsError(
                    f"{target} is no sharded checkpoint: it is not replaced"
                )
            return stack.enter_context(replacing(target))

        temporary = on_main_process(begin, group)
        of_ranks = on_all_ranks(lambda: _write_shards(tensors, temporary), group)

        def complete() -> None:
            parts: dict[str, list[Part]] = {}
            for of_rank in of_ranks:
                for name, part in of_rank.items():
                    parts.setdefault(name, []).append(part)
            _check_parts(parts, tensors, temporary)
            write_file({"state": skeleton, "parts": parts}, temporary / STATE)
            stack.close()  # the rename

        on_main_process(complete, group)


def verify_folder(folder: AnyPath, rank: int = 0, world_size: int = 1) -> None:
    """Compare the files of a sharded checkpoint with their checksums.

    Args:
        folder: of :func:`save_folder`.
        rank: which part of the files to read, if the ranks divide them among themselves.
        world_size: the number of such parts.

    Raises:
        CorruptCheckpointError: naming the first file that is missing, truncated or altered, or
            outside of the folder.
    """
    folder = Path(folder)
    with reading(folder):
        parts = load_file(folder / STATE, "meta")["parts"].values()
        files = {file for of_tensor in parts for _, _, file in of_tensor}
        for name in sorted(files)[rank::world_size]:
            if Path(name).name != name:
                raise CorruptCheckpointError(f"{folder} has no file {name!r} in it")
            verify_file(folder / name)


def read_folder(
    folder: AnyPath,
    model: nn.Module | None = None,
    map_location: str | torch.device = "cpu",
) -> dict[str, Any]:
    """Read a folder that was verified. Not collective. Runs no code that a file may hold.

    Args:
        folder: of :func:`save_folder`.
        model: of a tensor only this rank's shard is read if a sharded tensor of this model has its
            shape, and a name that is part of its dotted key. These are weights, their averages,
            and the state of an optimizer. All other tensors are read in full.
        map_location: the device of tensors that are read in full. On ``"meta"`` they have no data.

    Raises:
        CorruptCheckpointError: if it asks to run code, or was not written by :func:`save_folder`.
    """
    shards = shards_of(model)

    @cache
    def tensors_in(file: str) -> Any:
        return load_verified(Path(folder) / file, mapped=True)

    def read(keys: Keys, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_meta:
            return leaf
        name = dotted(keys)
        tensor = _empty_tensor(leaf, name, shards, map_location)
        _fill(tensor, name, content["parts"].get(name, []), tensors_in)
        return tensor

    with reading(folder):
        content = load_file(Path(folder) / STATE, map_location)
        state: dict[str, Any] = content["state"]
        if torch.device(map_location).type != "meta":
            state = map_leaves(read, state)
    return state


@torch.no_grad()
def copy_to_host(state: Any, memory: Any, whole: bool) -> Any:
    """Copy a nested state into the host memory that the copy before it has used.

    That is as much memory as the state needs. For large tensors on CUDA it is pinned, and torch
    rounds their sizes up to a power of two. A tensor that the state holds under two names is one
    tensor in the copy too.

    Args:
        state: it is not changed.
        memory: what the call before has returned beside its copy; at first an empty dict.
        whole: put sharded tensors together, one by one. That is collective.

    Returns:
        The copy, and the memory to give to the next call.
    """
    used: Any = {}
    devices = set()

    def take(_: Keys, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.layout is not torch.strided:  # a sparse tensor has no address
            return leaf.to("cpu", copy=True)  # host-device synchronisation
        own = data = local_tensor(leaf)
        if whole:
            data = full_tensor(leaf)
        devices.add(data.device)
        # A tensor of the training keeps its address, so its copy finds its memory again.
        # An empty tensor has no address.
        address = own.data_ptr() or id(leaf)
        flags = (data.is_conj(), data.is_neg())  # views of the same numbers
        key = (address, own.stride(), data.shape, data.dtype, *flags)
        if key not in memory:
            memory[key] = torch.empty_like(
                data,
                device="cpu",
                pin_memory=data.is_cuda and data.nbytes >= _PINNED_BYTES,
            )
        copied = used[key] = memory[key].copy_(data, non_blocking=True)
        if whole or not is_sharded(leaf):
            return copied
        return DTensor(copied, leaf._spec, requires_grad=False)  # type: ignore[attr-defined]

    copied = map_leaves(take, state)
    for device in devices - {torch.device("cpu")}:
        # Host-device synchronisation: one for all tensors of a device.
        torch.accelerator.synchronize(device)
    return copied, used


def _split(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Take the tensors out of a state.

    Returns:
        A copy of the state, with tensors on ``"meta"``, which have no data, in their places; and
        the tensors by their dotted keys. Sparse tensors are left in the copy.
    """
    tensors: dict[str, Tensor] = {}

    def take(keys: Keys, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
            return leaf
        name = dotted(keys)
        if name in tensors:
            raise ValueError(f"two tensors of the state are both named {name!r}")
        tensors[name] = leaf.detach()
        return torch.empty_strided(
            leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta"
        )

    return map_leaves(take, state), tensors


def _write_shards(tensors: dict[str, Tensor], folder: Path) -> dict[str, Part]:
    """Write this rank's parts of tensors to its file, and read that again.

    Returns:
        The parts by the names of their tensors.
    """
    file = SHARDS.format(comm.get_rank())
    own: dict[str, Tensor] = {}
    parts: dict[str, Part] = {}
    for name, tensor in tensors.items():
        if not _is_written_here(tensor):
            continue
        local = local_tensor(tensor)
        if local.nbytes < local.untyped_storage().nbytes():
            local = local.clone()  # torch would save all memory that a view is of
        own[name] = local
        parts[name] = (_offsets(tensor), tuple(local.shape), file)
    folder.mkdir(parents=True, exist_ok=True)
    write_file(own, folder / file)
    verify_file(folder / file)
    return parts


def _is_written_here(tensor: Any) -> bool:
    """Whether this rank writes its part: of ranks with the same part only the first one does."""
    if not is_sharded(tensor):
        return comm.is_main_process()
    if local_tensor(tensor).numel() == 0:
        return False
    places = zip(tensor.device_mesh.get_coordinate(), tensor.placements, strict=True)
    return all(place == 0 for place, kind in places if kind.is_replicate())


def _offsets(tensor: Tensor) -> tuple[int, ...]:
    """Where in a tensor this rank's shard begins."""
    if not is_sharded(tensor):
        return (0,) * tensor.ndim
    (shard,) = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
    return tuple(shard.offsets)


def _check_parts(
    parts: Mapping[str, list[Part]], tensors: Mapping[str, Tensor], folder: Path
) -> None:
    """Refuse a save in which the ranks hold other tensors, or do not see one disk."""
    for name in parts.keys() | tensors.keys():
        saved = sum(math.prod(sizes) for _, sizes, _ in parts.get(name, ()))
        if name not in tensors or saved != tensors[name].numel():
            raise ValueError(f"the ranks do not hold the shards of the same {name!r}")
    for rank in range(comm.get_world_size()):
        if not (folder / SHARDS.format(rank)).exists():
            raise OSError(
                f"the file of rank {rank} is missing in {folder}: the ranks do not share the disk"
            )


def _empty_tensor(
    tensor: Tensor, key: str, shards: Mapping[str, Tensor], device: Any
) -> Tensor:
    """Memory for a tensor, sharded as the one of its shape whose name is part of its key."""
    shard = shard_for(tensor, key, shards)
    if shard is not None:
        return torch.empty_like(shard, dtype=tensor.dtype)
    return torch.empty_like(tensor, device=device)


def _fill(
    tensor: Tensor, name: str, parts: list[Part], tensors_in: Callable[[str], Any]
) -> None:
    """Copy the parts that overlap a tensor, or this rank's shard of it, from their files."""
    local = local_tensor(tensor)
    begin = _offsets(tensor)
    is_filled = torch.zeros(local.shape, dtype=torch.bool)
    for offsets, sizes, file in parts:
        here, there = [], []
        for start, length, offset, size in zip(
            begin, local.shape, offsets, sizes, strict=True
        ):
            low = max(start, offset)
            high = max(low, min(start + length, offset + size))
            here.append(slice(low - start, high - start))
            there.append(slice(low - offset, high - offset))
        place = tuple(here)
        if is_filled[place].numel() > 0:
            # Host-device synchronisation, if the tensor is on a device.
            local[place].copy_(tensors_in(file)[name][tuple(there)])
            is_filled[place] = True
    if not is_filled.all():  # the rest would be uninitialised memory
        raise ValueError(f"parts of {name!r} are missing")
