"""Sharded checkpoints as they are read: by the ranks together, or by one process alone."""

import difflib
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hooktrain.checkpoint.agreement import on_all_ranks
from hooktrain.checkpoint.manifest import (
    REST,
    FileRecord,
    check_digests,
    check_sizes,
    read_manifest,
    verify_folder,
)
from hooktrain.checkpoint.shards import ShardReader
from hooktrain.checkpoint.storage import load_file
from hooktrain.checkpoint.tree import join_state, split_state
from hooktrain.utils import comm

__all__ = ["Targets", "load_sharded", "read_sharded"]

State = dict[str, Any]

Targets = Callable[[State], State]
"""Takes a saved state with tensors on the device "meta", and returns what to read into."""


def load_sharded(folder: str | os.PathLike[str], into: State | Targets | None = None) -> State:
    """Verify a folder, then load it, on any number of ranks. Collective.

    Every byte is read and compared with the manifest first, each rank a part of the files. No code
    that a file may hold is run.

    Args:
        folder: of :func:`save_sharded`.
        into: a part of a state like the saved one, such as that of model and optimizer; or a
            function that makes it when it is known what was saved. Its tensors, on whatever device,
            are read into; so every rank reads its shard of a DTensor. All other tensors are read in
            full, to the CPU, by each rank. If a rank fails while it reads, ``into`` is half read.

    Returns:
        The saved state; the tensors of ``into`` are in it.

    Raises:
        CorruptCheckpointError: on every rank, if a file is missing, truncated or altered.
        ValueError: on every rank, if ``into`` has a tensor that the checkpoint lacks or that has
            another shape there; nothing is read.
        FileNotFoundError: if there is no such folder; other ``OSError`` if it cannot be read.
    """
    folder = Path(folder)
    files = on_all_ranks(lambda: _verify_part(folder))
    find_targets: Targets = into if callable(into) else lambda _: into or {}
    rest, reader, tensors = on_all_ranks(lambda: _open(folder, files, find_targets))
    on_all_ranks(lambda: reader.read(tensors))
    return _join(rest, tensors)


def read_sharded(folder: str | os.PathLike[str], map_location: str | torch.device = "cpu") -> State:
    """Verify a folder, and read the whole of it in this process alone. Not collective.

    Args:
        folder: of :func:`save_sharded`.
        map_location: the device on which the tensors arrive; on ``"meta"`` they have no data.

    Raises:
        CorruptCheckpointError: if a file is missing, truncated or altered.
        FileNotFoundError: if there is no such folder; other ``OSError`` if it cannot be read.
    """
    folder = Path(folder)
    files = verify_folder(folder)["files"]
    rest, reader, tensors = _open(folder, files, lambda _: {}, map_location)
    if torch.device(map_location).type != "meta":
        reader.read(tensors)
    return _join(rest, tensors)


def _verify_part(folder: Path) -> dict[str, FileRecord]:
    """Compare all sizes, and the digests of this rank's part of the files."""
    files: dict[str, FileRecord] = read_manifest(folder)["files"]
    check_sizes(folder, files)
    own = sorted(files)[comm.get_rank() :: comm.get_world_size()]
    check_digests(folder, {name: files[name] for name in own})
    return files


def _open(
    folder: Path, files: Collection[str], find_targets: Targets, device: str | torch.device = "cpu"
) -> tuple[State, ShardReader, dict[str, Tensor]]:
    """What is no tensor, the reader of the tensors, and where they are to be read to."""
    rest = load_file(folder / REST)
    reader = ShardReader(folder, files)
    targets = split_state(find_targets(_join(rest, _empty(reader, "meta"))))[2]
    lacking = sorted(targets.keys() - reader.tensors.keys())
    if lacking:
        near = difflib.get_close_matches(lacking[0], reader.tensors, n=1, cutoff=0)
        raise ValueError(
            f"{folder} lacks {len(lacking)} tensors of 'into', such as {lacking[0]!r}; "
            f"the nearest that it has is {near[0] if near else None!r}"
        )
    for name, target in targets.items():
        if target.shape != (size := reader.tensors[name].size):
            raise ValueError(
                f"{name} has the shape {tuple(size)} in {folder}, "
                f"but {tuple(target.shape)} in 'into'"
            )
    return rest, reader, {**_empty(reader, device, without=targets), **targets}


def _empty(
    reader: ShardReader, device: str | torch.device, without: Collection[str] = ()
) -> dict[str, Tensor]:
    return {
        name: torch.empty(saved.size, dtype=saved.properties.dtype, device=device)
        for name, saved in reader.tensors.items()
        if name not in without
    }


def _join(rest: State, tensors: dict[str, Tensor]) -> State:
    state: State = join_state(rest["tree"], rest["paths"], tensors)
    return state
