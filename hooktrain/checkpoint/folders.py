"""Folders of shards: each rank writes its part of the tensors, on a disk that all ranks see.

``state.pth`` holds the state, with tensors without data in place of the sharded ones. Of these
``shards_00000.pth``, ... hold a rank's parts each, with their offsets in the full tensors. All are
checkpoint files, with checksums. The folder gets its name when it is complete.
"""

from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hooktrain.checkpoint.files import (
    CorruptCheckpointError,
    load_file,
    load_verified,
    verify_file,
    write_file,
)
from hooktrain.utils import comm
from hooktrain.utils.comm import on_all_ranks, on_main_process
from hooktrain.utils.file_io import AnyPath, replacing
from hooktrain.utils.tensors import is_sharded, local_tensor, map_leaves

STATE = "state.pth"

Keys = tuple[Any, ...]
"""The keys and indices that lead to a tensor in a nested state."""


def shards_of(rank: int) -> str:
    """The name of the file with the shards of a rank."""
    return f"shards_{rank:05d}.pth"


def is_folder(path: AnyPath) -> bool:
    """Whether there is a folder of shards, intact or not.

    One that is being written or deleted has a hidden name, and is none. One that was moved aside,
    so that another may take its place, is one until it is removed.
    """
    path = Path(path)
    if path.name.startswith("."):
        return False
    return (path / STATE).is_file() or (path / shards_of(0)).is_file()


def save_folder(
    state: dict[str, Any], folder: AnyPath, group: ProcessGroup | None = None
) -> None:
    """Write a state to a folder that is there as a whole, or not at all. Collective.

    A sharded checkpoint of that name is replaced.

    Args:
        state: tensors and plain types, nested in dicts, lists, tuples and sets. Of a DTensor each
            rank writes its shard. Of all else the main process's is written.
        folder: its final name.
        group: of all ranks. In a thread, one that nobody else uses.

    Raises:
        ValueError: on every rank, if they do not hold the shards of the same tensors.
        FileExistsError: if something else than a sharded checkpoint has that name.
        OSError: on every rank, if the disk of one is full or fails. The old folder is as it was.
    """
    target = Path(folder)
    skeleton, sharded = _split(state)
    with ExitStack() as stack:

        def begin() -> Path:
            if target.exists() and not is_folder(target):
                raise FileExistsError(
                    f"{target} is no sharded checkpoint: it is not replaced"
                )
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = stack.enter_context(replacing(target))
            temporary.mkdir()
            return temporary

        temporary = on_main_process(begin, group)

        def write() -> int:
            parts = [
                (keys, _offsets(tensor), local_tensor(tensor))
                for keys, tensor in sharded.items()
                if _is_first_copy(tensor)
            ]
            write_file({"parts": parts}, temporary / shards_of(comm.get_rank()))
            return sum(part.numel() for _, _, part in parts)

        sizes = on_all_ranks(write, group)

        def complete() -> None:
            expected = sum(tensor.numel() for tensor in sharded.values())
            if sum(sizes) != expected:
                raise ValueError(
                    f"the ranks hold {sum(sizes)} numbers of {expected} in shards: "
                    "their states have other tensors"
                )
            write_file({"state": skeleton, "ranks": len(sizes)}, temporary / STATE)
            stack.close()  # the rename

        on_main_process(complete, group)


def verify_folder(folder: AnyPath, part: slice = slice(None)) -> None:
    """Compare the files of a sharded checkpoint with their checksums.

    Args:
        folder: of :func:`save_folder`.
        part: of the files of shards. ``state.pth`` is always verified.

    Raises:
        CorruptCheckpointError: naming the first file that is missing, truncated or altered.
        OSError: if one cannot be read.
    """
    folder = Path(folder)
    try:
        ranks = _read_state(folder, "meta")["ranks"]
        for rank in range(ranks)[part]:
            verify_file(folder / shards_of(rank))
    except FileNotFoundError as error:
        raise CorruptCheckpointError(f"{error.filename} is missing") from error


def read_folder(
    folder: AnyPath,
    model: nn.Module | None = None,
    map_location: str | torch.device = "cpu",
) -> dict[str, Any]:
    """Read a folder that was verified. Not collective. Runs no code that a file may hold.

    Args:
        folder: of :func:`save_folder`.
        model: a tensor is read as this rank's shard if its keys have the name of a sharded tensor
            of this model, of the same shape: the weights, their averages, the state of an
            optimizer by names. All others are read in full.
        map_location: where these go. On ``"meta"`` they have no data.

    Raises:
        CorruptCheckpointError: if the folder holds something else than a checkpoint.
    """
    folder = Path(folder)
    content = _read_state(folder, map_location)
    if torch.device(map_location).type == "meta":
        return dict(content["state"])
    parts = defaultdict(list)
    for rank in range(content["ranks"]):
        read = load_verified(folder / shards_of(rank), mmap=True)
        for keys, offsets, part in read["parts"]:
            parts[keys].append((part, offsets))
    in_model = {} if model is None else model.state_dict()
    sharded = {name: t for name, t in in_model.items() if is_sharded(t)}

    def fill(keys: Keys, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_meta:
            return leaf
        like = _namesake(keys, leaf.shape, sharded)
        if like is not None:
            tensor = torch.empty_like(like, dtype=leaf.dtype, requires_grad=False)
            start = _offsets(tensor)
        else:
            tensor = torch.empty_like(leaf, device=map_location)
            start = [0] * tensor.dim()
        own = local_tensor(tensor)
        copied = sum(_copy_overlap(*part, own, start) for part in parts[keys])
        if copied != own.numel():
            raise CorruptCheckpointError(f"{folder} lacks parts of the tensor {keys}")
        return tensor

    return dict(map_leaves(fill, content["state"]))


def new_stager() -> Any:
    """What copies a state into host memory, and keeps that for the next copy."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    return DefaultStager(
        StagingOptions(
            use_pinned_memory=torch.cuda.is_available(),
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=torch.accelerator.is_available(),
        )
    )


def _read_state(folder: Path, map_location: str | torch.device) -> dict[str, Any]:
    content: Any = load_file(folder / STATE, map_location)
    if not isinstance(content, dict) or content.keys() != {"state", "ranks"}:
        raise CorruptCheckpointError(f"{folder} is no sharded checkpoint")
    return dict(content)


def _split(state: dict[str, Any]) -> tuple[dict[str, Any], dict[Keys, Any]]:
    """A copy of a state with tensors without data in place of DTensors, and these by keys."""
    sharded: dict[Keys, Any] = {}

    def take(keys: Keys, leaf: Any) -> Any:
        if not is_sharded(leaf):
            return leaf
        sharded[keys] = leaf
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")

    return map_leaves(take, state), sharded


def _is_first_copy(tensor: Any) -> bool:
    """Whether this rank writes its shard: of those that are replicated one rank does."""
    axes = zip(tensor.placements, tensor.device_mesh.get_coordinate(), strict=True)
    return all(index == 0 for placement, index in axes if placement.is_replicate())


def _offsets(tensor: Any) -> list[int]:
    """Where the shard of this rank begins in the full tensor."""
    (chunk,) = tensor.__create_chunk_list__()
    return list(chunk.offsets)


def _copy_overlap(
    part: Tensor, offsets: list[int], target: Tensor, start: list[int]
) -> int:
    """Copy where two parts of a tensor overlap; return how many numbers that are.

    Args:
        part: is copied.
        offsets: where it begins in the full tensor.
        target: is changed in place.
        start: where it begins in the full tensor.
    """
    here, there = [], []
    for dim, size in enumerate(target.shape):
        low = max(start[dim], offsets[dim])
        high = max(low, min(start[dim] + size, offsets[dim] + part.shape[dim]))
        here.append(slice(low - start[dim], high - start[dim]))
        there.append(slice(low - offsets[dim], high - offsets[dim]))
    overlap = part[tuple(there)]
    target[tuple(here)].copy_(overlap)
    return overlap.numel()


def _namesake(keys: Keys, shape: torch.Size, tensors: Mapping[str, Tensor]) -> Any:
    """The tensor whose name is in the dotted keys, if it has the shape; the longest counts."""
    dotted = ".".join(map(str, ("", *keys, "")))
    names = [name for name in tensors if f".{name}." in dotted]
    found = tensors[max(names, key=len)] if names else None
    return found if found is not None and found.shape == shape else None
