"""Sharded checkpoints: a folder that all ranks write, each its part of the tensors.

Such a folder can be loaded by another number of ranks; see ``sharded_loading.py``. It holds the
files of torch.distributed.checkpoint for the tensors, ``state.pth`` for all the rest, and
``manifest.json`` with the size and digest of each. The ranks must see the same disk.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hooktrain.checkpoint.agreement import on_all_ranks, on_main_process
from hooktrain.checkpoint.folder import (
    abandon_temporary_folder,
    commit_folder,
    disk_full_as_oserror,
    make_temporary_folder,
    remove_temporary_folder,
)
from hooktrain.checkpoint.manifest import (
    METADATA,
    REST,
    FileRecord,
    check_sizes,
    record_of,
    write_manifest,
)
from hooktrain.checkpoint.shards import AgreedPlans, ShardWriter
from hooktrain.checkpoint.staging import StagingBuffers
from hooktrain.checkpoint.storage import CorruptCheckpointError, check_storable, save_file
from hooktrain.checkpoint.tree import ItemPath, split_state
from hooktrain.utils import comm
from hooktrain.utils.background import BackgroundWorker

__all__ = ["ShardedSaver", "save_sharded"]

State = dict[str, Any]


def save_sharded(
    state: State, folder: str | os.PathLike[str], agreed: AgreedPlans | None = None
) -> None:
    """Write ``state`` to a folder that is there as a whole, or not at all. Collective.

    A sharded checkpoint of that name is replaced.

    Args:
        state: tensors and plain types, nested in dicts, lists, tuples and sets. Of a DTensor each
            rank writes its shard. Of all else the main process's is written, so what differs
            between ranks must have been gathered, as the trainer does with random states.
        folder: its final name.
        agreed: keeps for the next save what the ranks have agreed on.

    Raises:
        TypeError: on every rank, if something could not be loaded back; nothing is written.
        FileExistsError: if something else than a sharded checkpoint has that name.
        OSError: on every rank, if the disk of one is full or fails; the old folder is as it was.
    """
    save = _Save(state, Path(folder), agreed)
    save.commit(save.write)


class ShardedSaver:
    """Saves sharded checkpoints in the background, from memory that is kept for it.

    The ranks agree on who writes what, and each copies its part; then a thread of each writes while
    training goes on. What was written gets its name in a later call, since ranks talk in the main
    thread only: by :meth:`finish`, by :meth:`poll` if all are ready, or by the next :meth:`save`.
    A run that ends without one of these leaves the checkpoint before. All methods are collective,
    and raise what failed on any rank on every rank, once.
    """

    def __init__(self) -> None:
        self._worker = BackgroundWorker("sharded checkpoint")
        self._buffers = StagingBuffers()
        self._pending: _Save | None = None
        self._plans = AgreedPlans()

    def save(self, state: State, folder: str | os.PathLike[str]) -> None:
        """Begin to save, as :func:`save_sharded` does; ``state`` may change afterwards.

        Raises:
            OSError: of the save before, as :meth:`finish`; this one is not begun then.
            TypeError: and what else :func:`save_sharded` raises before it writes.
        """
        self.finish()
        save = _Save(state, Path(folder), self._plans)
        save.stage(self._buffers)
        self._worker.submit(save.write)
        self._pending = save

    def poll(self) -> bool:
        """Finish if all ranks have written; return whether nothing is under way any more.

        Raises:
            OSError: as :meth:`finish`.
        """
        if self._pending is not None and not comm.any_rank(self._worker.is_busy):
            self.finish()
        return self._pending is None

    def finish(self) -> None:
        """Wait until all ranks have written, and give the folder its name.

        Raises:
            OSError: if the disk of a rank was full or failed; the folder is as it was before.
        """
        if self._pending is None:
            return
        try:
            self._pending.commit(self._worker.wait)
        except Exception:
            self._pending = None
            raise
        self._pending = None  # after a KeyboardInterrupt it can still be finished

    def give_up(self) -> None:
        """Let go of what is under way, after a failure. The one method that is not collective.

        Waits until this rank's part is written. The checkpoint does not get its name; what is left
        of it is swept by a later save.

        Raises:
            OSError: if this rank's disk was full or failed.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            abandon_temporary_folder(pending.temporary)
            self._worker.wait()


class _Save:
    """One save under way. The constructor and :meth:`commit` are collective."""

    def __init__(self, state: State, folder: Path, agreed: AgreedPlans | None = None) -> None:
        self.folder = folder.absolute()
        tree, paths, tensors = on_all_ranks(lambda: _split(state))
        # The main process's is written.
        self.rest = {"tree": tree, "paths": paths} if comm.is_main_process() else {}
        self.temporary = on_main_process(lambda: make_temporary_folder(self.folder))
        try:
            self.writer = ShardWriter(tensors, self.temporary, agreed)
        except Exception:
            self._give_up()
            raise
        self.results: list[Any] = []
        self.files: dict[str, FileRecord] = {}

    def stage(self, buffers: StagingBuffers) -> None:
        """Replace what is to be written by a copy."""
        self.rest, self.writer.local = buffers.stage((self.rest, self.writer.local))

    def write(self) -> None:
        """Write this rank's files, and take their digests. For any thread."""
        names, self.results = disk_full_as_oserror(self.writer.write, self.temporary)
        if comm.is_main_process():
            save_file(self.rest, self.temporary / REST)
            names.append(REST)
        self.files = {name: record_of(self.temporary / name) for name in names}

    def commit(self, write: Callable[[], None]) -> None:
        """Let ``write`` end on every rank, then give the folder its name."""
        try:
            on_all_ranks(write)
            gathered = comm.gather((self.results, self.files))
            on_main_process(lambda: self._finish(gathered))
        except Exception:
            self._give_up()
            raise

    def _finish(self, gathered: list[tuple[list[Any], dict[str, FileRecord]]]) -> None:
        files = {name: record for _, own in gathered for name, record in own.items()}
        try:
            check_sizes(self.temporary, files)
        except CorruptCheckpointError as error:
            raise OSError(
                f"{error}, as the main process sees it: all ranks must share the disk"
            ) from error
        results = [own for own, _ in gathered]
        disk_full_as_oserror(lambda: self.writer.finish(results), self.temporary)
        files[METADATA] = record_of(self.temporary / METADATA)
        write_manifest(
            self.temporary, files, world_size=comm.get_world_size(), torch=torch.__version__
        )
        commit_folder(self.temporary, self.folder)

    def _give_up(self) -> None:
        if comm.is_main_process():
            remove_temporary_folder(self.temporary)


def _split(state: State) -> tuple[State, dict[str, ItemPath], dict[str, Tensor]]:
    tree, paths, tensors = split_state(state)
    if comm.is_main_process():
        check_storable(tree)
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise TypeError(f"cannot save {name}: a tensor on the device 'meta' has no data")
    return tree, paths, tensors
