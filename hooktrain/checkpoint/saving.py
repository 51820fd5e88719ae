"""Savers: how a state becomes a checkpoint, at once or in the background, and what follows then."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

from hooktrain.checkpoint.agreement import on_all_ranks, on_main_process
from hooktrain.checkpoint.background_saver import BackgroundSaver
from hooktrain.checkpoint.discovery import write_pointer
from hooktrain.checkpoint.folder import sweep_temporary_folders
from hooktrain.checkpoint.sharded import ShardedSaver, save_sharded
from hooktrain.checkpoint.shards import AgreedPlans
from hooktrain.checkpoint.sources import digest_in_name
from hooktrain.checkpoint.storage import save_file
from hooktrain.utils import comm
from hooktrain.utils.background import BackgroundWorker
from hooktrain.utils.file_io import sweep_temporary_files

__all__ = ["FileSaver", "FolderSaver", "OnError", "OnSaved", "Saver", "check_name"]

State = dict[str, Any]

OnSaved = Callable[[str], object]
"""Takes the path of a checkpoint that is there for good; for any thread, and raises nothing."""

OnError = Callable[[Exception], object]
"""Takes what a save failed with, in place of it being raised; it may raise it."""


def check_name(name: str) -> None:
    """Refuse what is no name of a checkpoint.

    Raises:
        ValueError: if it has a folder, or seems to end with a digest.
    """
    if not name or name in (".", "..") or name != os.path.basename(name):
        raise ValueError(f"name must be a file name without a folder, got {name!r}")
    if digest_in_name(name + ".pth"):  # which would be checked on loading
        raise ValueError(f"name must not end with what looks like a digest, got {name!r}")


class Saver(ABC):
    """Writes one checkpoint at a time.

    Args:
        background: whether :meth:`save` copies the state and returns, and a thread writes.
    """

    def __init__(self, background: bool = False) -> None:
        self.background = background
        self._prepared = False
        self._on_error: OnError | None = None

    def save(
        self,
        state: State,
        path: str,
        tag: bool,
        on_saved: OnSaved | None = None,
        on_error: OnError | None = None,
    ) -> None:
        """Write a checkpoint, or begin to, when the one before has ended.

        Args:
            state: in the background it may change as soon as this returns.
            path: the final path. What is there stays until the new one is on the disk.
            tag: whether to make it the one to resume from, once it is there.
            on_saved: called at last, in the one process that gives the checkpoint its name.
            on_error: takes what this save fails with, now or in a later call.

        Raises:
            TypeError: if something in the state could not be loaded back.
            OSError: if the disk is full or fails; or what failed in the background in the save
                before, in which case this one is not begun.
        """
        self.wait()
        self._on_error = on_error
        self._run(lambda: self._save(state, path, tag, on_saved))

    def poll(self) -> None:
        """Do what :meth:`wait` does, unless that would take time."""
        self._run(self._poll)

    def wait(self) -> None:
        """Wait until nothing is under way; raise what failed in the background."""
        self._run(self._wait)

    def give_up(self) -> None:
        """End what is under way after a failure, as far as this process can do it alone."""
        self._run(self._give_up)

    def wait_on_all_ranks(self) -> None:
        """As :meth:`wait`, but what failed on one rank is raised on all. Always collective."""
        on_all_ranks(self.wait)  # where that is collective, it fails on all ranks or on none

    def _run(self, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception as error:
            on_error, self._on_error = self._on_error, None
            if on_error is None:
                raise
            on_error(error)

    @abstractmethod
    def _save(self, state: State, path: str, tag: bool, on_saved: OnSaved | None) -> None: ...

    @abstractmethod
    def _poll(self) -> None: ...

    @abstractmethod
    def _wait(self) -> None: ...

    @abstractmethod
    def _give_up(self) -> None: ...

    def _prepare(self, path: str) -> None:
        """Make the folder of the first checkpoint, and sweep what a killed run has left there."""
        if not self._prepared:
            folder = os.path.dirname(path)
            os.makedirs(folder, exist_ok=True)
            sweep_temporary_files(folder)
            sweep_temporary_folders(folder)
            self._prepared = True


class FileSaver(Saver):
    """Writes files, in the process that it is called in, which needs no other one."""

    def __init__(self, background: bool = False) -> None:
        super().__init__(background)
        self._saver = BackgroundSaver()

    def _save(self, state: State, path: str, tag: bool, on_saved: OnSaved | None) -> None:
        write = partial(_write_file, path=path, tag=tag, on_saved=on_saved)
        self._prepare(path)
        if self.background:
            self._saver.save(state, write)
        else:
            write(state)

    def _poll(self) -> None:
        if not self._saver.is_busy:
            self._saver.wait()

    def _wait(self) -> None:
        self._saver.wait()

    def _give_up(self) -> None:
        self._saver.wait()


def _write_file(state: State, path: str, tag: bool, on_saved: OnSaved | None) -> None:
    save_file(state, path)
    if tag:
        write_pointer(*os.path.split(path))
    if on_saved is not None:
        on_saved(path)


class FolderSaver(Saver):
    """Writes folders of shards, by all ranks together.

    All methods but :meth:`give_up` are collective if anything is under way, and raise what failed
    on any rank on every rank. What was written in the background gets its name, and the pointer
    moves, in the next of these calls, since ranks talk in the main thread only.
    """

    def __init__(self, background: bool = False) -> None:
        super().__init__(background)
        self._saver = ShardedSaver()
        self._plans = AgreedPlans()
        self._commit: Callable[[], None] | None = None
        # Old checkpoints are verified and deleted beside the training, too.
        self._follow_up = BackgroundWorker("after a checkpoint")

    def _save(self, state: State, path: str, tag: bool, on_saved: OnSaved | None) -> None:
        on_main_process(lambda: self._prepare(path))
        commit = partial(self._after_save, path, tag, on_saved)
        if self.background:
            self._saver.save(state, path)
            self._commit = commit
        else:
            save_sharded(state, path, self._plans)
            commit()

    def _poll(self) -> None:
        commit, self._commit = self._commit, None
        if commit is not None:
            if self._saver.poll():
                commit()
            else:
                self._commit = commit

    def _wait(self) -> None:
        try:
            self._saver.finish()
        except Exception:
            self._commit = None
            raise
        commit, self._commit = self._commit, None
        if commit is not None:
            commit()
        self._follow_up.wait()

    def _give_up(self) -> None:
        if comm.get_world_size() == 1:
            self._wait()
        else:  # the ranks would have to talk
            self._commit = None
            self._follow_up.wait()
            self._saver.give_up()

    def _after_save(self, path: str, tag: bool, on_saved: OnSaved | None) -> None:
        if tag:
            on_main_process(lambda: write_pointer(*os.path.split(path)))
        if on_saved is not None and comm.is_main_process():
            if self.background:
                self._follow_up.submit(partial(on_saved, path))
            else:
                on_saved(path)
