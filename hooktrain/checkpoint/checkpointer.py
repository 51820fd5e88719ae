"""Saves and loads the model and the objects that resume with it."""

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from math import isclose
from typing import Any

import torch.distributed as dist
from torch import nn

from hooktrain.checkpoint.files import CorruptCheckpointError, storable, write_file
from hooktrain.checkpoint.loading import load_model_state, read_on_all_ranks
from hooktrain.checkpoint.resume import (
    checkpoint_names,
    iteration_in_name,
    names_to_resume,
    write_iteration,
    write_pointer,
)
from hooktrain.checkpoint.sources import local_path
from hooktrain.checkpoint.store import RunFiles, Store
from hooktrain.model.wrappers import unwrap_model
from hooktrain.utils import comm
from hooktrain.utils.background import BackgroundWorker
from hooktrain.utils.comm import Group, on_all_ranks, on_main_process
from hooktrain.utils.file_io import (
    AnyPath,
    is_disk_full,
    keep_lock,
    lock_folder,
    on_disk,
    sweep,
    sync,
    unlock_folder,
)
from hooktrain.utils.names import State, as_list, did_you_mean, states_of
from hooktrain.utils.tensors import full_tensors, norm_of

# A launcher ends the other ranks 10 s after one has failed.
_GIVE_UP_SECONDS = 5.0
# How long a failed run waits for an upload, which may be slow. The checkpoint is on the disk.
_UPLOAD_SECONDS = 60.0

Names = Iterable[str] | None
OnSaved = Callable[[str], object] | None
OnFull = Callable[[OSError], object] | None


class Checkpointer:
    """Saves and loads a model, and other objects that have a state, such as a trainer.

    A checkpoint ``<save_dir>/<name>.pth`` holds ``{"model": ..., <name of checkpointable>: ...,
    "iteration": ...}``, as in detectron2, whose files load too. The file ``last_checkpoint`` names
    the one to resume from. All ranks or one may save; if the model is sharded, all must.

    Args:
        model: the model, saved without its DDP or DataParallel wrapper.
        save_dir: the folder, created at the first save; "" turns saving off.
        save_to_disk: whether this process writes files; by default only the main process does.
        background: whether a thread writes a copy of the state while training goes on. The memory
            of the copy is reused, unless it puts a sharded model together for a file. The next save
            or :meth:`wait` raises the thread's error.
        sharded: whether each rank writes its shards to a folder ``<save_dir>/<name>``, on a disk
            that all ranks see. Both files and folders load on any number of ranks.
        store: an address such as ``s3://bucket/run``, to which each checkpoint to resume from is
            uploaded; a resume fetches it from there if it is newer. "" for none.
        checkpointables: objects with ``state_dict`` and ``load_state_dict``, by name. A method
            ``check_state_dict`` may refuse a state before anything is loaded.

    Attributes:
        saved_iteration: the iteration of the last complete checkpoint to resume from, or None. Only
            the process that writes the pointer knows it.
        run_files: a function that returns the paths of the files in ``save_dir`` to upload to the
            store with each checkpoint. :class:`hooktrain.engine.hooks.PeriodicCheckpointer` sets
            it to the ``run_files`` of all hooks of its trainer.

    Raises:
        ValueError: if ``save_dir`` is an address such as ``s3://...``.
    """

    def __init__(
        self,
        model: nn.Module,
        save_dir: AnyPath = "",
        *,
        save_to_disk: bool | None = None,
        background: bool = False,
        sharded: bool = False,
        store: AnyPath = "",
        **checkpointables: Any,
    ) -> None:
        if save_to_disk is None:
            save_to_disk = comm.is_main_process()
        self.model = unwrap_model(model)
        # A script or a notebook may change the current folder later.
        self.save_dir = os.path.abspath(on_disk(save_dir)) if save_dir else ""
        self.sharded = sharded
        self.background = background
        self.save_to_disk = save_to_disk
        self.logger = logging.getLogger(__name__)
        self.checkpointables: dict[str, Any] = {}
        for name, checkpointable in checkpointables.items():
            self.add_checkpointable(name, checkpointable)
        self.saved_iteration: int | None = None
        # From a resume until the run begins: the weights to train, and their norm.
        self._trained: list[nn.Parameter] = []
        self._norm = 0.0
        self.run_files: RunFiles = tuple
        self._store = Store(store, self.save_dir) if store and self.save_dir else None
        self._worker = BackgroundWorker("checkpoint")
        self._memory: Any = {}  # of the copy that the background writes
        self._group: Group = None  # of the background's threads

    def add_checkpointable(self, key: str, checkpointable: Any) -> None:
        """Register one more object to save and load.

        Args:
            key: its name in the checkpoint.
            checkpointable: an object with ``state_dict`` and ``load_state_dict``.

        Raises:
            KeyError: if the name is taken.
        """
        if key == "model" or key in self.checkpointables:
            raise KeyError(f"a checkpointable named {key!r} already exists")
        self.checkpointables[key] = checkpointable

    @staticmethod
    def check_name(name: str) -> None:
        """Raise a ValueError if this is not a possible name of a checkpoint."""
        if not re.fullmatch(r"[^./][^/]*(?<!\.pth)", name):
            raise ValueError(
                f"name must be a visible file name without folder or .pth, got {name!r}"
            )

    def begin_run(self, *, is_new: bool = False) -> None:
        """Create and lock the folder, check that states can be saved, and warn about lost weights.

        The weights of a resumed run are lost if others were loaded afterwards.

        :class:`hooktrain.engine.hooks.PeriodicCheckpointer` calls it before the first step.

        Args:
            is_new: whether the run is new, and so may overwrite checkpoints, which is warned about.

        Raises:
            TypeError: if :meth:`save` would refuse a state.
            RuntimeError: if another run is using the folder.
            ValueError: if the run is new, but the store already holds one.
            OSError: if the folder cannot be created, or the store fails.
        """
        self.check_states()
        if not isclose(self._norm, norm_of(self._trained), rel_tol=1e-5):
            self.logger.warning(
                "The weights have changed since the run was resumed: initialise the model, or load "
                "pretrained weights, before resume_or_load()"
            )
        self._trained, self._norm = [], 0.0
        if not (self.save_to_disk and self.save_dir):
            return
        os.makedirs(self.save_dir, exist_ok=True)
        lock_folder(self.save_dir)
        names = checkpoint_names(self.save_dir)
        if is_new and names:
            self.logger.warning(
                "A new run begins in %r, and may overwrite its checkpoints: %s. To continue the "
                "old run, call resume_or_load() before train()",
                self.save_dir,
                names,
            )
        if self._store:
            self._store.begin(is_new=is_new)

    def check_states(self) -> None:
        """Raise a TypeError if :meth:`save` would refuse a state."""
        storable(states_of({"model": self.model, **self.checkpointables}))

    def content(self, extra: State) -> State:
        """The content of a checkpoint, which a subclass may change.

        Args:
            extra: the further entries given to :meth:`save`.
        """
        weights = self.model.state_dict()
        # Unlike a display in braces, dict() refuses two entries of one name.
        return dict(model=weights, **states_of(self.checkpointables), **extra)

    def save(
        self,
        name: str,
        *,
        tag: bool = True,
        on_saved: OnSaved = None,
        on_full: OnFull = None,
        **extra: Any,
    ) -> None:
        """Write or replace a checkpoint; then make it the one to resume from.

        Args:
            name: the name of the file or folder, without parent folder and ``.pth``.
            tag: whether to resume from it. The best model is saved with False.
            on_saved: called with the path when the checkpoint is complete, in one process, and in
                a thread if it is saved in the background.
            on_full: called with the error if the disk is full or the folder has vanished; the
                error is then not raised.
            extra: further entries, of tensors and plain types, such as ``iteration=99``.

        Raises:
            ValueError: if ``name`` includes a folder.
            TypeError: if a value could not be loaded back; the message names its key.
            OSError: if the disk is full or fails. Existing files are unchanged.
            Exception: the error of an earlier save in the background. Nothing is saved then.
        """
        self.check_name(name)
        if not self.save_dir:
            self.logger.warning("Nothing is saved, since save_dir is empty")
            return
        # First, since the on_full of the previous save may change a state.
        self._worker.wait()
        state = storable(self.content(extra))
        if not self.sharded:
            name += ".pth"
            state = full_tensors(state)
            if not self.save_to_disk:
                return
        path = os.path.join(self.save_dir, name)
        self.logger.info("Saving checkpoint to %s", path)

        def finish() -> bool:
            is_uploading = False
            if tag:
                iteration = extra.get("iteration")
                if iteration_in_name(name) is None:
                    write_iteration(self.save_dir, iteration)
                self.tag_last_checkpoint(name)
                self.saved_iteration = iteration
                if self._store:
                    is_uploading = self._store.start_upload(name, self.run_files)
            if on_saved is not None:
                on_saved(path)
            return is_uploading

        if not self.background:
            self._write(state, path, finish, on_full)
            return
        copied = self._copy_to_host(state)
        write = partial(self._write, copied, path, finish, on_full)
        # A daemon does not keep this rank alive while it waits for ranks that have failed.
        self._worker.submit(write, daemon=self._group is not None)

    def _copy_to_host(self, state: State) -> Any:
        """Copy a state into host memory, from which a thread can write it."""
        from hooktrain.checkpoint.folders import copy_to_host

        if self.sharded and comm.get_world_size() > 1 and self._group is None:
            # Collectives of the thread must not mix with those of the training.
            self._group = dist.new_group(backend="gloo")  # type: ignore[assignment, unused-ignore]
        # Host-device synchronisation.
        copied, self._memory = copy_to_host(state, self._memory)
        return copied

    def _write(
        self, state: State, path: str, finish: Callable[[], bool], on_full: OnFull
    ) -> None:
        """Write a file in this process, or a folder together with all ranks."""

        def prepare() -> None:
            if self.save_to_disk:
                os.makedirs(self.save_dir, exist_ok=True)
                keep_lock(self.save_dir)
                # The state records how much of these files is written.
                for file in filter(os.path.isfile, self.run_files()):
                    sync(file)

        try:
            if self.sharded:
                from hooktrain.checkpoint.folders import save_folder

                on_all_ranks(prepare, self._group)
                save_folder(state, path, self._group)
                is_uploading = on_main_process(finish, self._group)
                if is_uploading and self._store and not comm.is_main_process():
                    self._store.start_upload(os.path.basename(path), self.run_files)
            else:
                prepare()
                write_file(state, path)
                finish()
        except OSError as error:
            # The next save creates a vanished folder again.
            is_gone = isinstance(error, FileNotFoundError)
            if on_full is None or not (is_gone or is_disk_full(error)):
                raise
            on_full(error)

    def wait(self) -> None:
        """Wait for the save in the background, and raise its error."""
        self._worker.wait()

    def finish(self) -> None:
        """Wait as :meth:`wait` does, at the end of a run, and until everything is in the store.

        Temporary files of processes that were still ending when the run began are removed. After
        that, the folder is free for another run.

        Raises:
            StoreTakenError: if another process has taken over the run in the store.
            Exception: the error of the save in the background, or of the store.
        """
        self.wait()
        if self.save_to_disk and self.save_dir:
            sweep(self.save_dir)
        if self._store and (self.sharded or self.save_to_disk):
            self._store.finish(self.run_files)
        unlock_folder(self.save_dir)

    def give_up(self) -> None:
        """Wait as :meth:`wait` does, but only a few seconds if other ranks may have failed.

        An upload gets a minute.
        """
        is_done = self._worker.wait(_GIVE_UP_SECONDS if self._group else None)
        if is_done and self._store:
            is_done = self._store.worker.wait(_UPLOAD_SECONDS)
        if is_done:
            unlock_folder(self.save_dir)
        else:
            self.logger.error("Giving up the checkpoint that is still being saved")

    def load(self, path: AnyPath | None, checkpointables: Names = None) -> State:
        """Load the model, and the checkpointables that the file has. Collective.

        Nothing is changed unless the file is intact and has everything that was asked for, and all
        ranks accept it.

        Args:
            path: a file or folder, or an address (:func:`hooktrain.checkpoint.local_path`). "" and
                None load nothing.
            checkpointables: the names of the objects to load besides the model; None loads all.
                For ``"trainer.optimizer"`` the trainer gets a state with that entry only.

        Returns:
            The entries that were not loaded, such as ``{"iteration": 99}``.

        Raises:
            OSError: on every rank, if one cannot read the checkpoint.
            CorruptCheckpointError: if it is broken or unsafe.
            ValueError: if one of ``checkpointables`` is unknown or not in the file.
        """
        if not path:
            self.logger.info("Nothing to load: the model keeps its weights")
            return {}
        path = local_path(path)
        return self._restore(path, self.read(path), checkpointables)

    def read(self, path: AnyPath) -> State:
        """The verified content of a checkpoint, with this rank's shards. Collective."""
        on_all_ranks(self.wait)
        return read_on_all_ranks(local_path(path), self.model)

    def read_newest(self) -> tuple[str, State] | None:
        """The path and the content of the newest intact checkpoint of ``save_dir``. Collective.

        Returns:
            None if there is no checkpoint to resume from.

        Raises:
            CorruptCheckpointError: if there are checkpoints, but none is intact.
        """
        problems = []
        for name in self._names_to_resume():
            path = os.path.join(self.save_dir, name)
            try:
                return path, read_on_all_ranks(path, self.model)
            except (OSError, CorruptCheckpointError) as error:  # alike on every rank
                self.logger.warning("Passing over the checkpoint %s: %s", path, error)
                problems.append(f"  {name}: {error}")
        if problems:
            raise CorruptCheckpointError(
                f"no checkpoint in {self.save_dir!r} is intact. Repair them, or start from scratch "
                "without them or in another folder:\n" + "\n".join(problems)
            )
        ignored = checkpoint_names(self.save_dir)
        if ignored:
            self.logger.warning(
                "Not resuming from %s in %r: not of this run, or without an iteration",
                ignored,
                self.save_dir,
            )
        return None

    def _names_to_resume(self) -> Iterator[str]:
        """The names of the checkpoints to try, newest first. Collective."""
        on_all_ranks(self.wait)
        names = on_main_process(partial(names_to_resume, self.save_dir))
        return self._store.names_to_resume(names) if self._store else iter(names)

    def resume_or_load(
        self,
        path: AnyPath | None = None,
        *,
        resume: bool = True,
        checkpointables: Names = None,
        strict: bool = True,
    ) -> State:
        """Resume from the newest intact checkpoint, or load the model from ``path``. Collective.

        It loads and raises as :meth:`load` and :meth:`read_newest` do. A run is resumed only if
        the checkpoint has the names and shapes of the model's tensors.

        Args:
            path: the model to start from if there is no checkpoint in ``save_dir``; "" and None
                load nothing.
            resume: whether to look for checkpoints in ``save_dir``.
            checkpointables: see :meth:`load`. If this is None, a checkpoint to resume from must
                have all of them.
            strict: False also resumes from a checkpoint that has only a part of the model on
                purpose, such as adapters. A model whose ``state_dict`` returns only that part does
                not need it.

        Returns:
            The entries that were not loaded, such as ``{"iteration": 99}``.
        """
        found = self.read_newest() if resume and self.save_dir else None
        if found is None:
            return self.load(path, checkpointables=[])
        if path:
            self.logger.info(
                "%s is not loaded, since the folder has a run to resume: to load it anyway, write "
                "its name into last_checkpoint, or use another folder",
                path,
            )
        if checkpointables is None:
            checkpointables = self.checkpointables
        others = self._restore(*found, checkpointables, strict)
        self._trained = [p for p in self.model.parameters() if p.requires_grad]
        self._norm = norm_of(self._trained)
        return others

    def _restore(
        self, path: str, state: State, names: Names, strict: bool = False
    ) -> State:
        chosen: dict[str, State] = {}
        # The ranks exchange only errors, no states.
        on_all_ranks(lambda: chosen.update(self._choose_parts(path, state, names)))
        self.logger.info("Loading %s from %s", ", ".join(["model", *chosen]), path)
        self._load_into_model(state, strict)
        for key, part in chosen.items():
            self.checkpointables[key].load_state_dict(part)
        return {key: state[key] for key in state if key not in {"model", *chosen}}

    def _choose_parts(self, path: str, state: State, names: Names) -> dict[str, State]:
        """Choose the objects to load besides the model, and let them check their states.

        Args:
            path: the path of the checkpoint, for the messages.
            state: the content of the checkpoint.
            names: the ``checkpointables`` of :meth:`load`.

        Returns:
            The states to load, by the names of the objects.
        """
        known = self.checkpointables.keys() & state
        if names is None:
            names = known
            missing = sorted(self.checkpointables.keys() - known)
            if missing:
                self.logger.warning(
                    "%s has no %s: they keep their state", path, missing
                )
        chosen: dict[str, State] = {}
        # An object comes after its parts: if both are asked for, the whole object is loaded.
        for name in sorted(as_list(names, str, "checkpointables"), reverse=True):
            key, _, part = name.partition(".")
            if key == "model":  # always loaded
                continue
            _refuse_unknown(key, known, path)
            if part:
                _refuse_unknown(part, state[key], path)
                chosen.setdefault(key, {})[part] = state[key][part]
            else:
                chosen[key] = state[key]
        for key, part_of_state in chosen.items():
            item = self.checkpointables[key]
            if hasattr(item, "check_state_dict"):
                item.check_state_dict(part_of_state)
        return chosen

    def _load_into_model(self, state: State, strict: bool) -> None:
        load_model_state(self.model, state["model"], strict)

    def has_checkpoint(self) -> bool:
        """Whether there is something to resume from, intact or not."""
        return bool(self.get_checkpoint_file())

    def get_checkpoint_file(self) -> str:
        """The path of the checkpoint to resume from, not verified, or ""."""
        self.wait()
        names = names_to_resume(self.save_dir)
        return os.path.join(self.save_dir, names[0]) if names else ""

    def tag_last_checkpoint(self, basename: str) -> None:
        """Make a checkpoint of ``save_dir`` the one to resume from."""
        write_pointer(self.save_dir, basename)


def _refuse_unknown(name: str, known: Iterable[str], where: str) -> None:
    if name not in known:
        hint = did_you_mean(name, known)
        raise ValueError(
            f"checkpointables: the Checkpointer or {where} has no {name!r}{hint}"
        )
