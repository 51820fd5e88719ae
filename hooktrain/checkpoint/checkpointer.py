"""The Checkpointer: saves and loads the model and everything that resumes beside it."""

import logging
import os
from collections.abc import Iterable
from typing import Any

from torch import nn

from hooktrain.checkpoint.discovery import (
    NOTHING_YET,
    POINTER,
    Found,
    checkpoint_names,
    newest_good,
    read_pointer,
    resumable_names,
    write_pointer,
)
from hooktrain.checkpoint.loading import restore
from hooktrain.checkpoint.reading import read_on_all_ranks
from hooktrain.checkpoint.saving import FileSaver, FolderSaver, OnError, OnSaved, Saver, check_name
from hooktrain.checkpoint.sources import local_path
from hooktrain.utils import comm
from hooktrain.utils.dtensor import full_tensors
from hooktrain.utils.registry import unwrap_model

__all__ = ["Checkpointer"]

State = dict[str, Any]


class Checkpointer:
    """Saves and loads a model and what else has a state, such as a trainer or an optimizer.

    A checkpoint ``<save_dir>/<name>.pth`` holds ``{"model": ..., <name of checkpointable>: ...,
    "iteration": ...}``, as detectron2's do, which load too. The file ``<save_dir>/last_checkpoint``
    holds the name of the one to resume from.

    Every rank may call :meth:`save` (a state may need collectives to be gathered), and so may one
    rank alone, unless the model is sharded; there is no barrier in it. :meth:`load` and
    :meth:`resume_or_load` must be called by all ranks, which agree on one checkpoint.

    With ``sharded``, a checkpoint is a folder ``<save_dir>/<name>`` that all ranks write together,
    each its shards, and :meth:`save` is a collective. Files and folders are both loaded in either
    case, by any number of ranks; of a folder each reads its shards of what the model has sharded.

    With ``background``, :meth:`save` copies the state into memory that is kept for it, and a thread
    writes while training goes on. One save is under way at a time: all other methods wait for it
    first (a collective if it is sharded, as it gets its name then), and raise what failed. So call
    :meth:`wait` at the end, as :class:`PeriodicCheckpointer` does after the last iteration.

    Attributes:
        model: the model, without the wrapper of DDP or DataParallel if it had one.
        save_dir: the folder; "" if nothing is to be saved.
        sharded: whether checkpoints are saved as folders of shards.
        checkpointables: what is saved beside the model, by name.
        logger: for the messages.

    Args:
        model: the model; a wrapper of DDP or DataParallel is taken off.
        save_dir: the folder, made at the first save; "" turns saving off.
        save_to_disk: whether this process writes files; by default, whether it is the main process.
        background: write in a thread.
        sharded: save folders, on a disk that all ranks see.
        checkpointables: objects with ``state_dict`` and ``load_state_dict``, by name.

    Raises:
        ValueError: if ``save_to_disk`` is given for ``sharded``, where all ranks write.
    """

    def __init__(
        self,
        model: nn.Module,
        save_dir: str | os.PathLike[str] = "",
        *,
        save_to_disk: bool | None = None,
        background: bool = False,
        sharded: bool = False,
        **checkpointables: Any,
    ) -> None:
        if sharded and save_to_disk is not None:
            raise ValueError(f"with sharded all ranks write: save_to_disk is {save_to_disk!r}")
        self.model = unwrap_model(model)
        self.save_dir = os.fspath(save_dir)
        self.sharded = sharded
        self.logger = logging.getLogger(__name__)
        self.checkpointables: dict[str, Any] = {}
        for name, checkpointable in checkpointables.items():
            self.add_checkpointable(name, checkpointable)
        self._save_to_disk = save_to_disk
        self._saver: Saver = FolderSaver(background) if sharded else FileSaver(background)
        self._has_warned = False

    @property
    def save_to_disk(self) -> bool:
        """Whether this process writes files."""
        return comm.is_main_process() if self._save_to_disk is None else self._save_to_disk

    def add_checkpointable(self, key: str, checkpointable: Any) -> None:
        """Save and load one more object, under the name ``key``.

        Raises:
            KeyError: if the name is taken.
            TypeError: if the object has no ``state_dict`` or no ``load_state_dict``.
            ValueError: if the name has a dot, which selects a component in :meth:`load`.
        """
        if key == "model" or key in self.checkpointables:
            raise KeyError(f"a checkpointable named {key!r} is there already")
        if "." in key:
            raise ValueError(f"the name of a checkpointable must have no dot, got {key!r}")
        for method in ("state_dict", "load_state_dict"):
            if not hasattr(checkpointable, method):
                raise TypeError(
                    f"the checkpointable {key!r} of type {type(checkpointable).__name__} "
                    f"has no {method}()"
                )
        self.checkpointables[key] = checkpointable

    def save(
        self,
        name: str,
        *,
        tag: bool = True,
        on_saved: OnSaved | None = None,
        on_error: OnError | None = None,
        **extra: Any,
    ) -> None:
        """Write a checkpoint, then make it the one to resume from.

        One of that name is replaced in one go. On ranks that do not write, the states are gathered
        all the same. Without a ``save_dir`` nothing happens.

        Args:
            name: of the checkpoint, without folder and ``.pth``.
            tag: False leaves the resume point where it is, as for the best model.
            on_saved: called with the path when the checkpoint is there for good, on the rank that
                gives it its name; in the background in a thread. It must raise nothing and must
                not call this checkpointer.
            on_error: called with the error if the checkpoint cannot be written, in place of raising
                it; of what fails in the background, by the next call.
            extra: more entries, of tensors and plain types, such as ``iteration=99``.

        Raises:
            ValueError: if ``name`` has a folder or seems to end with a digest (``-`` and eight or
                more hexadecimal digits), or an extra entry has the name of a state.
            TypeError: if a state holds what could not be loaded back; it names the key.
            OSError: if the disk is full or fails; the files are as they were. Also what failed in
                the background in the save before; this one is not begun then.
        """
        check_name(name)
        if taken := sorted(extra.keys() & {"model", *self.checkpointables}):
            raise ValueError(f"extra entries must not replace the states of the same name: {taken}")
        if not self.save_dir:
            if not self._has_warned:
                self.logger.warning("Nothing is saved, since save_dir is empty")
            self._has_warned = True
            return
        self.wait()
        items = {"model": self.model, **self.checkpointables}
        state: State = {key: item.state_dict() for key, item in items.items()} | extra
        self.write(name, state, tag=tag, on_saved=on_saved, on_error=on_error)

    def write(
        self,
        name: str,
        state: State,
        *,
        tag: bool = True,
        on_saved: OnSaved | None = None,
        on_error: OnError | None = None,
    ) -> None:
        """What :meth:`save` does with the state that it has put together.

        Args:
            name: of the checkpoint, without folder and ``.pth``.
            state: with the model's under ``"model"``.
            tag: as for :meth:`save`.
            on_saved: as for :meth:`save`.
            on_error: as for :meth:`save`.
        """
        if not self.sharded:
            state = full_tensors(state)
            if not self.save_to_disk:
                return
        path = os.path.join(self.save_dir, name if self.sharded else name + ".pth")
        self.logger.info("Saving checkpoint to %s", path)
        self._saver.save(state, os.path.abspath(path), tag, on_saved, on_error)

    def poll(self) -> None:
        """Do what :meth:`wait` does, unless that would take time. Collective, as that is."""
        self._saver.poll()

    def wait(self, *, together: bool = False) -> None:
        """Wait until nothing is being saved. Collective, if a sharded checkpoint is.

        Args:
            together: always collective: no rank goes on before what all of them save is on the
                disk, and what failed on one is raised on all.

        Raises:
            Exception: what failed in the background, unless there is an ``on_error`` for it.
        """
        if together:
            self._saver.wait_on_all_ranks()
        else:
            self._saver.wait()

    def give_up(self) -> None:
        """After a failure: as :meth:`wait`, but never collective.

        A file is completed. What several ranks write together is not, and swept by a later save.
        """
        self._saver.give_up()

    def load(
        self, path: str | os.PathLike[str], checkpointables: Iterable[str] | None = None
    ) -> State:
        """Load the model, and the checkpointables that the file has. For all ranks to call.

        Nothing is changed unless the file is intact and all that was asked for is in it.

        Args:
            path: the file or folder, or its address (:func:`~hooktrain.checkpoint.local_path`); ""
                loads nothing.
            checkpointables: names of those to load beside the model; by default all. A dotted name
                such as ``"trainer.optimizer"`` selects a component of a checkpointable whose
                ``load_state_dict`` takes ``only={"optimizer"}``.

        Returns:
            The entries that were not loaded, such as ``{"iteration": 99}``.

        Raises:
            FileNotFoundError: or another OSError, if the main process cannot read it.
            CorruptCheckpointError: if it is broken or unsafe.
            ValueError: if a name in ``checkpointables`` is unknown, or not in the file.
        """
        path = local_path(path)
        if not path:
            self.logger.info("Nothing to load: the model has its initial weights")
            return {}
        return restore(path, self.read(path), self.model, self.checkpointables, checkpointables)

    def read(self, path: str | os.PathLike[str]) -> State:
        """The content of a file or folder, verified, with the model's state under ``"model"``.

        Nothing is loaded. Of a folder, each rank reads its shards of what the model has sharded.
        For all ranks to call.

        Args:
            path: as in :meth:`load`, which says what is raised.
        """
        self.wait(together=True)
        return read_on_all_ranks(local_path(path), self.model)

    def read_newest(self) -> Found | None:
        """The path and the content of the newest intact checkpoint of ``save_dir``, if any.

        Broken ones are passed over with a warning each. For all ranks to call.

        Raises:
            CorruptCheckpointError: if there are checkpoints and none is intact.
        """
        self.wait(together=True)
        return newest_good(self.save_dir, self.model)

    def resume_or_load(
        self,
        path: str | os.PathLike[str],
        *,
        resume: bool = True,
        checkpointables: Iterable[str] | None = None,
    ) -> State:
        """Go on from the newest intact checkpoint of ``save_dir``, or load ``path``.

        Broken ones are passed over with a warning each. For all ranks to call.

        Args:
            path: the model to start from where there is no checkpoint, as in :meth:`load`, or ""
                for none. Of it only the model is loaded.
            resume: whether to look into ``save_dir``.
            checkpointables: what to resume beside the model, as in :meth:`load`; by default all,
                and it is an error if the checkpoint lacks one.

        Returns:
            The entries that were not loaded, such as ``{"iteration": 99}``.

        Raises:
            CorruptCheckpointError: if there are checkpoints and none is intact, or ``path`` is not.
            FileNotFoundError: if there is no ``path``.
            ValueError: if the checkpoint lacks a checkpointable.
        """
        if resume and self.save_dir:
            found = self.read_newest()
            if found is not None:
                return restore(
                    *found, self.model, self.checkpointables, checkpointables, must_have_all=True
                )
        return self.load(path, checkpointables=[])

    def begin_anew(self) -> None:
        """Let no checkpoint that is there now be resumed from; nothing is deleted.

        Killed before its first checkpoint, a run would otherwise go on with that of an earlier one.
        """
        if self.save_to_disk and (found := self.get_checkpoint_file()):
            message = "%s is of an earlier run: not resumed from unless you write its name to %s"
            self.logger.warning(message, found, POINTER)
            write_pointer(self.save_dir, NOTHING_YET)

    def has_checkpoint(self) -> bool:
        """Whether there is something to resume from, be it intact or not."""
        return bool(self.get_checkpoint_file())

    def get_checkpoint_file(self) -> str:
        """The path of the checkpoint to resume from, or ""; it is not verified."""
        self.wait()
        if not self.save_dir:
            return ""
        name = next(resumable_names(self.save_dir, read_pointer(self.save_dir)), "")
        return os.path.join(self.save_dir, name) if name else ""

    def get_all_checkpoint_files(self) -> list[str]:
        """The paths of all checkpoints in ``save_dir``, files and folders, sorted by name."""
        self.wait()
        return [os.path.join(self.save_dir, name) for name in checkpoint_names(self.save_dir)]

    def tag_last_checkpoint(self, basename: str) -> None:
        """Make a file or folder of ``save_dir`` the one to resume from.

        Raises:
            FileNotFoundError: if it is not there.
        """
        self.wait()
        if basename != os.path.basename(basename) or not os.path.exists(
            os.path.join(self.save_dir, basename)
        ):
            raise FileNotFoundError(f"no {basename!r} in {self.save_dir!r} to resume from")
        write_pointer(self.save_dir, basename)
