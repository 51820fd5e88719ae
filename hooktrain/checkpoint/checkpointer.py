"""The Checkpointer: one file for the model and everything that resumes beside it."""

import difflib
import inspect
import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from hooktrain.checkpoint.discovery import (
    POINTER,
    checkpoint_files,
    newest_good,
    read_pointer,
    resumable_names,
)
from hooktrain.checkpoint.reading import read_checkpoint, read_on_all_ranks
from hooktrain.checkpoint.sources import digest_in_name, local_path
from hooktrain.checkpoint.storage import save_file
from hooktrain.checkpoint.surgery import load_model_state
from hooktrain.utils import comm
from hooktrain.utils.dtensor import full_tensors
from hooktrain.utils.file_io import atomic_write, sweep_temporary_files
from hooktrain.utils.unwrap import unwrap_model

__all__ = ["Checkpointer"]

State = dict[str, Any]


class Checkpointer:
    """Saves and loads a model and what else has a state, such as a trainer or an optimizer.

    A checkpoint ``<save_dir>/<name>.pth`` holds ``{"model": ..., <name of checkpointable>: ...,
    "iteration": ...}``, as detectron2's do, which load too. The file ``<save_dir>/last_checkpoint``
    holds the name of the one to resume from.

    Every rank may call :meth:`save` (a state may need collectives to be gathered), and so may one
    rank alone, unless the model is sharded; there is no barrier in it. :meth:`load` and
    :meth:`resume_or_load` must be called by all ranks, which agree on one file.

    Attributes:
        model: the model, without the wrapper of DDP or DataParallel if it had one.
        save_dir: the folder; "" if nothing is to be saved.
        checkpointables: what is saved beside the model, by name.
        logger: for the messages.

    Args:
        model: the model; a wrapper of DDP or DataParallel is taken off.
        save_dir: the folder, made at the first save; "" turns saving off.
        save_to_disk: whether this process writes; by default, whether it is the main process.
        checkpointables: objects with ``state_dict`` and ``load_state_dict``, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        save_dir: str | os.PathLike[str] = "",
        *,
        save_to_disk: bool | None = None,
        **checkpointables: Any,
    ) -> None:
        self.model = unwrap_model(model)
        self.save_dir = os.fspath(save_dir)
        self.logger = logging.getLogger(__name__)
        self.checkpointables: dict[str, Any] = {}
        for name, checkpointable in checkpointables.items():
            self.add_checkpointable(name, checkpointable)
        self._save_to_disk = save_to_disk
        self._is_first_save = True

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

    def save(self, name: str, *, tag: bool = True, **extra: Any) -> None:
        """Write ``<save_dir>/<name>.pth``, then make it the one to resume from.

        A file of that name is replaced in one go. On ranks that do not write, the states are
        gathered all the same. Without a ``save_dir`` nothing happens.

        Args:
            name: of the file, without folder and ``.pth``.
            tag: False leaves the resume point where it is, as for the best model.
            extra: more entries, of tensors and plain types, such as ``iteration=99``.

        Raises:
            ValueError: if ``name`` has a folder or seems to end with a digest (``-`` and eight or
                more hexadecimal digits), or an extra entry has the name of a state.
            TypeError: if a state holds what could not be loaded back; it names the key.
            OSError: if the disk is full or fails; the files are as they were.
        """
        if not name or name in (".", "..") or name != os.path.basename(name):
            raise ValueError(f"name must be a file name without a folder, got {name!r}")
        if digest_in_name(name + ".pth"):  # which would be checked on loading
            raise ValueError(f"name must not end with what looks like a digest, got {name!r}")
        taken = sorted(extra.keys() & {"model", *self.checkpointables})
        if taken:
            raise ValueError(f"extra entries must not replace the states of the same name: {taken}")
        if not self.save_dir:
            if self._is_first_save:
                self.logger.warning("Nothing is saved, since save_dir is empty")
            self._is_first_save = False
            return
        items = {"model": self.model, **self.checkpointables}
        state = full_tensors({key: item.state_dict() for key, item in items.items()} | extra)
        if self.save_to_disk:
            self._write(name + ".pth", state, tag)

    def _write(self, basename: str, state: State, tag: bool) -> None:
        path = os.path.join(self.save_dir, basename)
        if self._is_first_save:
            os.makedirs(self.save_dir, exist_ok=True)
            sweep_temporary_files(self.save_dir)  # of a run that was killed
            self._is_first_save = False
        self.logger.info("Saving checkpoint to %s", path)
        save_file(state, path)
        if tag:
            self.tag_last_checkpoint(basename)

    def load(
        self, path: str | os.PathLike[str], checkpointables: Iterable[str] | None = None
    ) -> State:
        """Load the model, and the checkpointables that the file has. For all ranks to call.

        Nothing is changed unless the file is intact and all that was asked for is in it.

        Args:
            path: the file, or its address (:func:`~hooktrain.checkpoint.local_path`); "" loads
                nothing.
            checkpointables: names of those to load beside the model; by default all. A dotted name
                such as ``"trainer.optimizer"`` selects a component of a checkpointable whose
                ``load_state_dict`` takes ``only={"optimizer"}``.

        Returns:
            The entries that were not loaded, such as ``{"iteration": 99}``.

        Raises:
            FileNotFoundError: or another OSError, if the main process cannot read the file.
            CorruptCheckpointError: if the file is broken or unsafe.
            ValueError: if a name in ``checkpointables`` is unknown, or not in the file.
        """
        path = local_path(path)
        if not path:
            self.logger.info("No checkpoint found. Initializing model from scratch")
            return {}
        found = read_on_all_ranks(lambda: (path, read_checkpoint(path)))
        assert found is not None
        return self._restore(*found, checkpointables, must_have_all=False)

    def resume_or_load(
        self,
        path: str | os.PathLike[str],
        *,
        resume: bool = True,
        checkpointables: Iterable[str] | None = None,
    ) -> State:
        """Go on from the newest intact checkpoint of ``save_dir``, or load ``path``.

        Broken files are passed over with a warning each. For all ranks to call.

        Args:
            path: the model to start from where there is no checkpoint, a file or an address as in
                :meth:`load`, or "" for none. Of it only the model is loaded.
            resume: whether to look into ``save_dir``.
            checkpointables: what to resume beside the model, as in :meth:`load`; by default all,
                and it is an error if the checkpoint lacks one.

        Returns:
            The entries that were not loaded, such as ``{"iteration": 99}``.

        Raises:
            CorruptCheckpointError: if there are checkpoints and none is intact, or ``path`` is not.
            FileNotFoundError: if there is no file ``path``.
            ValueError: if the checkpoint lacks a checkpointable.
        """
        if resume and self.save_dir:
            found = read_on_all_ranks(lambda: newest_good(self.save_dir))
            if found is not None:
                return self._restore(*found, checkpointables, must_have_all=True)
        return self.load(path, checkpointables=[])

    def has_checkpoint(self) -> bool:
        """Whether there is something to resume from, be it intact or not."""
        return bool(self.get_checkpoint_file())

    def get_checkpoint_file(self) -> str:
        """The path of the checkpoint to resume from, or ""; it is not verified."""
        if not self.save_dir:
            return ""
        name = next(resumable_names(self.save_dir, read_pointer(self.save_dir)), "")
        return os.path.join(self.save_dir, name) if name else ""

    def get_all_checkpoint_files(self) -> list[str]:
        """The paths of all ``.pth`` files in ``save_dir``, sorted by name."""
        return checkpoint_files(self.save_dir) if self.save_dir else []

    def tag_last_checkpoint(self, basename: str) -> None:
        """Make a file of ``save_dir`` the one to resume from.

        Raises:
            FileNotFoundError: if it is not there.
        """
        if basename != os.path.basename(basename) or not os.path.exists(
            os.path.join(self.save_dir, basename)
        ):
            raise FileNotFoundError(f"no file {basename!r} in {self.save_dir!r} to resume from")
        with atomic_write(os.path.join(self.save_dir, POINTER), "w") as file:
            file.write(basename)

    def _restore(
        self, path: str, state: State, names: Iterable[str] | None, *, must_have_all: bool
    ) -> State:
        chosen = self._choose(path, state, names, must_have_all=must_have_all)
        self._check_only(chosen)
        self.logger.info("Loading %s from %s", ", ".join(["model", *chosen]), path)
        load_model_state(self.model, state["model"])
        for key, components in chosen.items():
            only = {} if components is None else {"only": components}
            self.checkpointables[key].load_state_dict(state[key], **only)
        left = {key: item for key, item in state.items() if key not in {"model", *chosen}}
        unused = [key for key in left if key != "iteration"]
        if unused:
            self.logger.info("Entries of %s that were not loaded: %s", path, ", ".join(unused))
        return left

    def _choose(
        self, path: str, state: State, names: Iterable[str] | None, *, must_have_all: bool
    ) -> dict[str, set[str] | None]:
        """What to load beside the model: the components of each, or None for the whole."""
        if names is None:
            lacking = [key for key in self.checkpointables if key not in state]
            if lacking and must_have_all:
                raise ValueError(
                    f"{path} holds no {lacking}, only {sorted(state)}: it cannot be resumed in "
                    "full. Name what is to be loaded, with checkpointables=[...], to go on without"
                )
            if lacking:
                self.logger.warning("%s holds no %s: they keep their state", path, lacking)
            return {key: None for key in self.checkpointables if key in state}
        chosen: dict[str, set[str] | None] = {}
        for name in names:
            key, _, component = name.partition(".")
            if name == "model":  # always loaded
                continue
            _check_known(
                name, key, self.checkpointables, "is not among what this checkpointer loads"
            )
            _check_known(name, key, state, f"is not in {path}")
            components = chosen.setdefault(key, set() if component else None)
            if not component:
                chosen[key] = None
            elif components is not None:
                _check_known(name, component, state[key], f"is not in {path}")
                components.add(component)
        return chosen

    def _check_only(self, chosen: Mapping[str, set[str] | None]) -> None:
        for key, components in chosen.items():
            load = self.checkpointables[key].load_state_dict
            if components is not None and "only" not in inspect.signature(load).parameters:
                raise TypeError(
                    f"cannot load {sorted(components)} of {key!r} alone: "
                    f"its load_state_dict takes no argument 'only'"
                )


def _check_known(name: str, part: str, known: Iterable[str], problem: str) -> None:
    if part not in known:
        near = difflib.get_close_matches(part, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; there are {sorted(known)}"
        raise ValueError(f"checkpointables: {name!r} {problem}{hint}")
