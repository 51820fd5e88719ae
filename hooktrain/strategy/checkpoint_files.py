"""Checkpoints of strategies: how their entries are laid out, written and read by all ranks."""

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from hooktrain import __version__
from hooktrain.checkpoint import local_path
from hooktrain.checkpoint.agreement import on_main_process
from hooktrain.checkpoint.discovery import Found, newest_good
from hooktrain.checkpoint.reading import read_on_all_ranks
from hooktrain.checkpoint.saving import FileSaver, FolderSaver
from hooktrain.utils import comm
from hooktrain.utils.env import get_rng_state

__all__ = ["Callback", "add_meta", "check_has", "find_newest", "read_state", "write_state"]

State = dict[str, Any]
Path = str | os.PathLike[str]
Callback = Callable[[State], Any]

_PARTS = ("state_dict", "optimizer", "param_schedulers")


def read_state(filename: Path, model: nn.Module) -> Found:
    """A checked checkpoint, with its model under ``state_dict``. A collective.

    Args:
        filename: a path or an address, of a file or folder of a strategy or a
            :class:`~hooktrain.checkpoint.Checkpointer`, or of a file of MMEngine, detectron2, or of
            weights alone.
        model: without its wrapper; of what it has sharded, each rank reads its shards of a folder.

    Returns:
        The path, and the content on the CPU, but for shards.
    """
    path = local_path(filename)
    return _with_mmengines_name((path, read_on_all_ranks(path, model)))


def find_newest(folder: str, model: nn.Module) -> Found | None:
    """The newest intact checkpoint of a folder, as of :func:`read_state`. A collective."""
    found = newest_good(folder, model)
    return None if found is None else _with_mmengines_name(found)


def _with_mmengines_name(found: Found) -> Found:
    path, state = found
    return path, {"state_dict" if key == "model" else key: item for key, item in state.items()}


def check_has(part: str, state: Mapping[str, Any], path: str, argument: str) -> None:
    """Refuse a checkpoint without a part.

    Raises:
        ValueError: which says how to go on without it.
    """
    if part not in state:
        raise ValueError(
            f"{path} cannot be resumed in full: it has no {part!r}, only {sorted(state)}. Give "
            f"{argument}=False to begin with a new one, or load the weights by load_checkpoint()"
        )


def add_meta(state: State, extra: Mapping[str, Any] | None, seed: int) -> State:
    """The parts, further entries, and what is to be known of the run. A collective.

    Args:
        state: the parts.
        extra: further entries. A ``meta`` among them is added to; it is not changed.
        seed: of the run.

    Raises:
        ValueError: if an extra entry has the name of a part.
    """
    extra = dict(extra or {})
    if taken := sorted(extra.keys() & {*_PARTS}):
        raise ValueError(f"extra_ckpt must not replace the parts of the same name: {taken}")
    meta = {
        **extra.pop("meta", {}),
        "seed": seed,
        "time": time.strftime("%Y%m%d_%H%M%S"),
        "hooktrain": __version__,
        "rng": dict(enumerate(comm.gather(get_rng_state()))),
    }
    return {**state, **extra, "meta": meta}


def write_state(state: State, filename: Path, tag: bool, *, sharded: bool = False) -> None:
    """Write a checkpoint. A collective.

    Args:
        state: of tensors and plain types.
        filename: its path; the folder is made if need be.
        tag: whether to make it the one to resume from, in its folder.
        sharded: let each rank write its part of a folder. Otherwise the main process writes a file,
            while the others wait.

    Raises:
        OSError: or a TypeError of what could not be loaded back, on every rank.
    """
    path = os.path.abspath(filename)
    if sharded:
        FolderSaver().save(state, path, tag)
    else:
        on_main_process(lambda: FileSaver().save(state, path, tag))
