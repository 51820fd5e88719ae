"""fvcore's and detectron2's checkpointers, with the methods that projects override."""

import os
from collections.abc import Callable, Iterable
from functools import wraps
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import nn

from hooktrain import checkpoint as core
from hooktrain.checkpoint.files import (
    CorruptCheckpointError,
    is_folder,
    load_file,
    with_model,
)
from hooktrain.checkpoint.loading import IncompatibleKeys, load_model_state
from hooktrain.checkpoint.resume import checkpoint_names
from hooktrain.compat.detectron2.functions import CONFIG
from hooktrain.compat.detectron2.paths import PathManager
from hooktrain.engine import TrainerBase, hooks
from hooktrain.utils.comm import on_all_ranks, on_main_process
from hooktrain.utils.file_io import AnyPath, publish
from hooktrain.utils.names import State
from hooktrain.utils.periods import in_iterations

_OPTIONS = {"tag", "on_saved", "on_full"}


def _keep_options(save: Callable[..., Any]) -> Callable[..., None]:
    """Hide the core's options of ``save`` from a subclass, which would save them as entries."""

    @wraps(save)
    def with_options(self: "Checkpointer", name: str, *args: Any, **extra: Any) -> None:
        for key in extra.keys() & _OPTIONS:
            self._options[key] = extra.pop(key)
        try:
            save(self, name, *args, **extra)
        finally:
            options = self._options
            self._options = {}
        path = os.path.join(self.save_dir, f"{name}.pth")
        # It is still set if the subclass has written the file itself, without super().save().
        if "on_saved" in options and os.path.isfile(path):
            options["on_saved"](path)

    return with_options


class Checkpointer(core.Checkpointer):
    """A :class:`hooktrain.checkpoint.Checkpointer` with the methods that fvcore's users override.

    ``load(path)``, also on a resume, calls ``_load_file(filename)``, ``_load_model(checkpoint)``,
    ``_convert_ndarray_to_tensor(state_dict)`` and ``_log_incompatible_keys(incompatible)``. A
    folder of shards is read without ``_load_file``. A resume calls ``has_checkpoint()`` and
    ``get_checkpoint_file()``. If the file lacks the state of an object, the object keeps its own,
    with a warning. A subclass may write files itself in ``save``.

    Attributes:
        path_manager: an object whose ``get_local_path`` finds the files to load. Files are always
            saved on a disk.

    Args:
        model: the model, or None.
        args: further arguments of the base class.
        kwargs: further arguments of the base class.
    """

    def __init_subclass__(cls) -> None:
        if "save" in vars(cls):
            cls.save = _keep_options(cls.save)  # type: ignore[method-assign]

    def __init__(self, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        self.path_manager: Any = PathManager
        self._options: State = {}
        self._reported: IncompatibleKeys | None = None
        if model is None:
            model = nn.Module()
        super().__init__(model, *args, **kwargs)

    def begin_run(self, *, is_new: bool = False) -> None:
        """Start saving, once a resume was not refused; see the base class."""
        super().begin_run(is_new=is_new)
        publish(self.save_dir, CONFIG)

    def get_all_checkpoint_files(self) -> list[str]:
        """The paths of all checkpoints in ``save_dir``, sorted."""
        self.wait()
        return [
            os.path.join(self.save_dir, name)
            for name in checkpoint_names(self.save_dir)
        ]

    def save(self, name: str, **extra: Any) -> None:
        """Write a checkpoint, and make it the one to resume from; see the base class."""
        options = self._options | extra
        self._options = {}
        super().save(name, **options)

    def tag_last_checkpoint(self, basename: str) -> None:
        """Make a checkpoint the one to resume from, unless it is being saved as the best one."""
        if self._options.get("tag", True):
            super().tag_last_checkpoint(basename)

    def load(
        self, path: AnyPath | None, checkpointables: Iterable[str] | None = None
    ) -> State:
        """Load the model, and the checkpointables that the file has; see the base class."""
        if path and self.path_manager is not PathManager:
            path = self.path_manager.get_local_path(path)
        return super().load(path, checkpointables)

    def read(self, path: AnyPath) -> State:
        """Read a file by ``_load_file`` on each rank, or a folder of shards. Collective."""
        name = os.fspath(path)
        if on_main_process(lambda: is_folder(name)):
            return super().read(name)
        on_all_ranks(self.wait)
        states: list[State] = []
        on_all_ranks(lambda: states.append(self._load_file(name)))
        return states[0]

    def resume_or_load(
        self, path: AnyPath | None = None, *, resume: bool = True, **chosen: Any
    ) -> State:
        """Load the newest intact checkpoint in ``save_dir``, or the model in ``path``."""

        def find_newest() -> str:
            if resume and self.has_checkpoint():
                return self.get_checkpoint_file()
            return ""

        if resume:
            # If the store has a newer checkpoint, it is fetched.
            next(self._names_to_resume(), None)
        newest = on_main_process(find_newest)
        if not newest:
            return self.load(path, checkpointables=[])
        try:
            return self.load(newest, **chosen)
        except (OSError, CorruptCheckpointError):
            found = self.read_newest()
            if found is None:
                raise
            return self.load(found[0], **chosen)

    def _load_file(self, filename: str) -> State:
        """Read a file; a bare state dict is put under ``"model"``."""
        content = load_file(filename)
        if isinstance(content, dict) and content.keys() & {"model", "state_dict"}:
            return content
        return with_model(content, filename)

    def _load_into_model(self, state: State, strict: bool) -> None:
        found = self._load_model(state)
        if found is not None:
            self._log_incompatible_keys(found)

    def _load_model(self, checkpoint: State) -> IncompatibleKeys:
        """Load the matching tensors of ``checkpoint["model"]``, and remove that entry."""
        state = with_model(checkpoint, "what was read")["model"]
        checkpoint.pop("model", None)
        self._convert_ndarray_to_tensor(state)
        self._reported = load_model_state(self.model, state)
        return self._reported

    def _convert_ndarray_to_tensor(self, state_dict: State) -> None:
        for name, value in state_dict.items():
            if isinstance(value, np.ndarray):
                state_dict[name] = torch.tensor(value)

    def _log_incompatible_keys(self, incompatible: Any) -> None:
        """Warn about mismatches that a subclass's ``_load_model`` returns.

        The method above has already warned.
        """
        if incompatible is not self._reported:
            self.logger.warning(
                "Not loaded, since the file and the model differ: %s", incompatible
            )


class DetectionCheckpointer(Checkpointer):
    """A :class:`Checkpointer` that lets detectron2 read the files of its model zoo.

    Reading these files (``.pkl`` and ``.pyth``), and matching their names with the model's,
    requires detectron2. ``?matching_heuristics=True`` after a path also matches names.

    Attributes:
        trusted: whether such files are unpickled. From other files only tensors and plain types
            are read.

    Args:
        args: arguments of the base class.
        trusted: set it to True if you trust the files: unpickling runs any code that they contain.
        kwargs: arguments of the base class.
    """

    _matches_names = False

    def __init__(self, *args: Any, trusted: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.trusted = trusted

    def load(self, path: AnyPath | None, *args: Any, **kwargs: Any) -> State:
        """Load the model, and the checkpointables that the file has; see the base class."""
        address = os.fspath(path or "")
        name = address.removesuffix("?matching_heuristics=True")
        self._matches_names = name != address
        return super().load(name, *args, **kwargs)

    def _load_file(self, filename: str) -> State:
        if filename.endswith((".pkl", ".pyth")):
            content = self._load_from_zoo(filename)
        else:
            content = self._torch_load(filename)
        if self._matches_names:
            content["matching_heuristics"] = True
        return content

    def _load_from_zoo(self, filename: str) -> State:
        if self.trusted:
            theirs: Any = import_module("detectron2.checkpoint").DetectionCheckpointer
            return theirs._load_file(self, filename)  # type: ignore[no-any-return]
        try:
            return self._torch_load(filename)
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(
                f"{error}. If you trust the file, which may run any code, use "
                "DetectionCheckpointer(..., trusted=True)"
            ) from error

    def _torch_load(self, f: Any) -> State:
        return super()._load_file(f)

    def _load_model(self, checkpoint: State) -> IncompatibleKeys:
        if checkpoint.get("matching_heuristics"):
            self._convert_ndarray_to_tensor(checkpoint["model"])
            matching = import_module("detectron2.checkpoint.c2_model_loading")
            checkpoint["model"] = matching.align_and_update_state_dicts(
                self.model.state_dict(),
                checkpoint["model"],
                c2_conversion=checkpoint.get("__author__") == "Caffe2",
            )
        return super()._load_model(checkpoint)


class PeriodicCheckpointer(hooks.PeriodicCheckpointer):
    """A :class:`hooktrain.engine.hooks.PeriodicCheckpointer` that also serves loops without hooks.

    Such a loop calls :meth:`step` after each iteration, on all ranks or on one. In a trainer that
    is not hooktrain's, such as a copy of detectron2's, the hook itself calls it.

    Args:
        checkpointer: the Checkpointer to save with.
        period: see the base class; without a trainer, in iterations.
        max_iter: the number of iterations of the run, for a loop without a trainer. None writes
            no final file.
        max_to_keep: see the base class.
        file_prefix: see the base class.
    """

    trainer: Any

    def __init__(
        self,
        checkpointer: Any,
        period: int | str,
        max_iter: int | None = None,
        max_to_keep: int | None = None,
        file_prefix: str = "model",
    ) -> None:
        super().__init__(
            checkpointer, period, max_to_keep=max_to_keep, file_prefix=file_prefix
        )
        self.max_iter = max_iter
        self._has_begun = False

    def _begin(self, *, is_new: bool) -> None:
        self._has_begun = True
        if not isinstance(self.trainer, TrainerBase):
            self.checkpointer.run_files = list  # the trainer's hooks name no files
        super()._begin(is_new=is_new)

    def after_step(self) -> None:
        """Call :meth:`step`, in any kind of trainer."""
        if isinstance(self.trainer, TrainerBase):
            super().after_step()
        else:
            self.max_iter = self.trainer.max_iter
            self.step(self.trainer.iter)

    def after_train(self) -> None:
        """Save the final checkpoint if the run was stopped early, and wait for the disk."""
        if isinstance(self.trainer, TrainerBase):
            super().after_train()

    def step(self, iteration: int, **extra: Any) -> None:
        """Save if the iteration ends a period or the run; see the base class."""
        if isinstance(self.trainer, TrainerBase):
            super().step(iteration, **extra)
            return
        self.on_every_rank = False  # nothing is exchanged before a save
        if not self._has_begun:
            self._begin(is_new=iteration == 0)
        is_due = (iteration + 1) % in_iterations(self.period.every, None) == 0
        is_last = self.max_iter is not None and iteration >= self.max_iter - 1
        if is_due or is_last:
            self._save(iteration, is_last, **extra)
        if is_last:
            self.checkpointer.finish()

    def save(self, name: str, **extra: Any) -> None:
        """Call ``checkpointer.save``: at any time, under any name."""
        self.checkpointer.save(name, **extra)
