"""The state of what a strategy has prepared: by parts, and as a checkpoint."""

import os
from abc import ABC
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from hooktrain.checkpoint import load_model_state
from hooktrain.checkpoint.discovery import Found
from hooktrain.solver.optim_wrapper import OptimWrapper
from hooktrain.solver.optim_wrapper_dict import OptimWrapperDict
from hooktrain.strategy.checkpoint_files import (
    Callback,
    add_meta,
    check_has,
    find_newest,
    read_state,
    write_state,
)
from hooktrain.strategy.environment import resume_randomness
from hooktrain.strategy.optim_parts import (
    initialize_counts,
    load_scheduler_states,
    scheduler_states,
)
from hooktrain.strategy.session import Session
from hooktrain.utils.registry import unwrap_model

__all__ = ["PreparedStates"]

State = dict[str, Any]
Path = str | os.PathLike[str]
Patterns = Sequence[tuple[str, str]]


class PreparedStates(Session, ABC):
    """The part of a strategy that saves and loads; see :class:`BaseStrategy`.

    A checkpoint holds ``state_dict``, ``optimizer``, ``param_schedulers`` and ``meta``, as
    MMEngine's do. It is written and read as those of :class:`~hooktrain.checkpoint.Checkpointer`:
    in one go, verified, and without running code.

    A subclass that gathers states in another way overrides the methods for the parts; one that
    writes folders overrides :meth:`write_checkpoint`. Files and folders of shards are read by all.
    What is loaded when is decided here, in methods that all share.
    """

    model: nn.Module
    optim_wrapper: OptimWrapper | OptimWrapperDict
    param_schedulers: list[Any] | dict[str, list[Any]]
    dispatch_kwargs: dict[str, Any]

    def model_state_dict(self) -> State:
        """The tensors of the model on the CPU, by the names of the model without its wrapper."""
        state = unwrap_model(self._prepared("model")).state_dict()
        on_cpu = OrderedDict(
            # Host-device synchronisation, unless the model is on the CPU.
            (name, value.detach().cpu() if isinstance(value, Tensor) else value)
            for name, value in state.items()
        )
        on_cpu._metadata = getattr(state, "_metadata", OrderedDict())  # type: ignore[attr-defined]
        return on_cpu

    def optim_state_dict(self) -> State:
        """The state of the optimizer and its wrapper. Inside of a window a collective."""
        wrapper = self._prepared("optim_wrapper")
        wrapper.prepare_state()
        state: State = wrapper.state_dict()
        return state

    def scheduler_state_dict(self) -> list[Any] | dict[str, list[Any]]:
        """The states of the schedulers; by name, where there are several optimizers."""
        return scheduler_states(self._prepared("param_schedulers"))

    def load_model_state_dict(
        self, state_dict: Mapping[str, Any], *, strict: bool = False, revise_keys: Patterns = ()
    ) -> None:
        """Load what fits, and tell what does not.

        Args:
            state_dict: of a model, with or without its wrapper.
            strict: raise a RuntimeError if there is a difference.
            revise_keys: see :func:`~hooktrain.checkpoint.revise_names`.
        """
        model = unwrap_model(self._prepared("model"))
        load_model_state(model, state_dict, strict=strict, revise_keys=revise_keys)

    def load_optim_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what :meth:`optim_state_dict` gave."""
        self._prepared("optim_wrapper").load_state_dict(state_dict)

    def load_scheduler_state_dict(self, state_dict: list[Any] | dict[str, list[Any]]) -> None:
        """Take back what :meth:`scheduler_state_dict` gave.

        Raises:
            ValueError: if it is of more or fewer schedulers, or of others by name.
        """
        load_scheduler_states(self._prepared("param_schedulers"), state_dict)

    def _prepared(self, name: str) -> Any:
        if not hasattr(self, name):
            with_it = "" if name == "model" else f" with {name.removesuffix('s')}=..."
            raise RuntimeError(f"there is no {name} yet: call prepare(){with_it} first")
        return getattr(self, name)

    def read_checkpoint(self, filename: Path) -> Found:
        """The path and the content of a checkpoint, be it a file or a folder. A collective."""
        return read_state(filename, unwrap_model(self._prepared("model")))

    def find_newest(self) -> Found | None:
        """The path and the content of the newest one in ``work_dir``, if any. A collective."""
        return find_newest(self.work_dir, unwrap_model(self._prepared("model")))

    def write_checkpoint(self, state: State, filename: Path, tag: bool) -> None:
        """Write a checkpoint; with ``tag``, it is the one to resume from. A collective."""
        write_state(state, filename, tag)

    def load_or_resume(
        self, *, load_from: Path | None = None, resume: bool | Path = False
    ) -> State | None:
        """Load weights, go on with a run, or neither. A collective, after :meth:`prepare`.

        ======= ========= ============================================================
        resume  load_from what happens
        ======= ========= ============================================================
        False   None      nothing
        False   a path    :meth:`load_checkpoint` of it
        True    None      :meth:`resume` from the newest intact checkpoint in
                          ``work_dir``, or nothing if there is none
        True    a path    :meth:`resume` from it
        a path  any       :meth:`resume` from ``resume``
        ======= ========= ============================================================

        Returns:
            What the method that was called returned, or None.
        """
        self._prepared("model")
        if not isinstance(resume, bool):
            return self.resume(resume)
        if not resume:
            return None if load_from is None else self.load_checkpoint(load_from)
        if load_from is not None:
            return self.resume(load_from)
        found = self.find_newest()
        if found is None:
            self.logger.info("No checkpoint in %s to resume from: beginning anew", self.work_dir)
            return None
        return self._resume(*found)

    def load_checkpoint(
        self,
        filename: Path,
        *,
        strict: bool = False,
        revise_keys: Patterns = (),
        callback: Callback | None = None,
    ) -> State:
        """Load the model, and nothing else, from a file. A collective.

        Args:
            filename: a path, or an address; see :func:`~hooktrain.checkpoint.local_path`.
            strict: raise a RuntimeError if there is a difference.
            revise_keys: see :func:`~hooktrain.checkpoint.revise_names`.
            callback: called with the content before anything is loaded; it may change it.

        Returns:
            What was not loaded, on the CPU.

        Raises:
            CorruptCheckpointError: if the file is broken or unsafe.
            FileNotFoundError: if there is none; other ``OSError`` if it cannot be read.
        """
        path, state = self.read_checkpoint(filename)
        if callback is not None:
            callback(state)
        self.logger.info("Loading the model from %s", path)
        self.load_model_state_dict(state.pop("state_dict"), strict=strict, revise_keys=revise_keys)
        return state

    def resume(
        self,
        filename: Path,
        *,
        resume_optimizer: bool = True,
        resume_param_scheduler: bool = True,
        callback: Callback | None = None,
    ) -> State:
        """Go on with a run: model, optimizer, schedulers, random numbers. A collective.

        Each rank gets its random state back. With another number of ranks, and of a file without
        random states, the generators are seeded with the file's seed.

        Args:
            filename: see :meth:`load_checkpoint`.
            resume_optimizer: False begins with a new optimizer.
            resume_param_scheduler: False begins with new schedulers.
            callback: see :meth:`load_checkpoint`.

        Returns:
            What was not loaded, such as ``meta``.

        Raises:
            ValueError: if the file lacks a part; nothing was loaded then.
            CorruptCheckpointError: if the file is broken or unsafe.
            FileNotFoundError: if there is none; other ``OSError`` if it cannot be read.
        """
        path, state = self.read_checkpoint(filename)
        return self._resume(path, state, resume_optimizer, resume_param_scheduler, callback)

    def _resume(
        self,
        path: str,
        state: State,
        resume_optimizer: bool = True,
        resume_param_scheduler: bool = True,
        callback: Callback | None = None,
    ) -> State:
        if callback is not None:
            callback(state)
        with_optimizer = resume_optimizer and hasattr(self, "optim_wrapper")
        with_schedulers = resume_param_scheduler and hasattr(self, "param_schedulers")
        if with_optimizer:
            check_has("optimizer", state, path, "resume_optimizer")
        if with_schedulers:
            check_has("param_schedulers", state, path, "resume_param_scheduler")
        self.logger.info("Resuming from %s", path)
        self.load_model_state_dict(state.pop("state_dict"))
        meta = state.get("meta") or {}
        if with_optimizer:
            self.load_optim_state_dict(state.pop("optimizer"))
            max_iters = self.dispatch_kwargs.get("max_iters")
            initialize_counts(self.optim_wrapper, self.model, max_iters, meta.get("iter", 0))
        if with_schedulers:
            self.load_scheduler_state_dict(state.pop("param_schedulers"))
        self._seed = resume_randomness(self.environment, self.seed, meta)
        return state

    def save_checkpoint(
        self,
        filename: Path,
        *,
        save_optimizer: bool = True,
        save_param_scheduler: bool = True,
        extra_ckpt: Mapping[str, Any] | None = None,
        callback: Callback | None = None,
        tag: bool = True,
    ) -> None:
        """Write a checkpoint. For all ranks to call; when it returns, all can read the file.

        Args:
            filename: its path. A file there is replaced in one go.
            save_optimizer: with the optimizer's state, if there is one.
            save_param_scheduler: with the schedulers' states, if there are any.
            extra_ckpt: further entries, of tensors and plain types. To its ``meta`` are added
                ``seed``, ``time``, ``hooktrain`` (the version) and ``rng``, of each rank.
            callback: called with the content before it is written; it may change it.
            tag: make it the one to resume from, in its folder.

        Raises:
            ValueError: if an extra entry has the name of a part.
            TypeError: if something could not be loaded back.
            OSError: if the disk is full or fails; the files are as they were.
        """
        parts: State = {"state_dict": self.model_state_dict()}
        if save_optimizer and hasattr(self, "optim_wrapper"):
            parts["optimizer"] = self.optim_state_dict()
        if save_param_scheduler and hasattr(self, "param_schedulers"):
            parts["param_schedulers"] = self.scheduler_state_dict()
        state = add_meta(parts, extra_ckpt, self.seed)
        if callback is not None:
            callback(state)
        self.logger.info("Saving a checkpoint to %s", os.fspath(filename))
        self.write_checkpoint(state, filename, tag)
