"""Which checkpoint of a folder to go on from: the newest one that is intact.

A checkpoint is a file ``<name>.pth``, or a folder of shards ``<name>``. The file
``last_checkpoint`` names the one to take, as in detectron2. That is a hint: where it is missing,
garbage, or names one that is gone or broken, the folder itself is searched.
"""

import logging
import os
import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from hooktrain.checkpoint.agreement import on_main_process
from hooktrain.checkpoint.folder import is_sharded
from hooktrain.checkpoint.reading import read_checkpoint, read_on_all_ranks
from hooktrain.checkpoint.retention import iteration_in_name
from hooktrain.checkpoint.storage import CorruptCheckpointError
from hooktrain.utils.file_io import atomic_write

__all__ = [
    "NOTHING_YET",
    "POINTER",
    "Found",
    "checkpoint_names",
    "newest_good",
    "read_pointer",
    "resumable_names",
    "write_pointer",
]

logger = logging.getLogger(__name__)

POINTER = "last_checkpoint"
# In the pointer, when a run has begun anew among the checkpoints of an earlier one.
NOTHING_YET = "-"
# "model_best.pth" and the like hold a good state, not the last one.
_BEST = re.compile(r"(^|[_.-])best([_.-]|$)")
_BROKEN = -2

Found = tuple[str, dict[str, Any]]
"""The path of a checkpoint and its content."""


def write_pointer(save_dir: str, name: str) -> None:
    """Make a checkpoint of the folder the one to resume from.

    Its name alone is written, so that the folder may be moved.
    """
    with atomic_write(os.path.join(save_dir, POINTER), "w") as file:
        file.write(name)


def read_pointer(save_dir: str) -> str:
    """The name in ``last_checkpoint``, or :data:`NOTHING_YET`; "" if it names none there."""
    try:
        with open(os.path.join(save_dir, POINTER), "rb") as file:
            text = file.read(4096).decode("utf-8", errors="replace").strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        logger.warning("Cannot read %s: %s", os.path.join(save_dir, POINTER), error)
        return ""
    if text == NOTHING_YET:
        return text
    if text and text == os.path.basename(text) and _is_checkpoint(save_dir, text, suffix=""):
        return text
    path = os.path.join(save_dir, POINTER)
    logger.warning("%s names %r, which is no checkpoint there", path, text)
    return ""


def checkpoint_names(save_dir: str) -> list[str]:
    """The names of all checkpoints of the folder, sorted; none if it is not there."""
    if not os.path.isdir(save_dir):
        return []
    return [name for name in sorted(os.listdir(save_dir)) if _is_checkpoint(save_dir, name)]


def _is_checkpoint(save_dir: str, name: str, suffix: str = ".pth") -> bool:
    path = os.path.join(save_dir, name)
    return (os.path.isfile(path) and name.endswith(suffix)) or is_sharded(path)


def resumable_names(save_dir: str, pointed: str) -> Iterator[str]:
    """The names of the checkpoints to try, best first; the folder is searched only if asked to.

    After that of the pointer come the others by their iteration, newest first, but those that are
    newer than the pointer's at the very end: they belong to another run in the same folder. Those
    named ``best``, and those without an iteration (plain weights), do not occur. None does, if the
    pointer says that a run has begun anew.

    Args:
        save_dir: the folder.
        pointed: what :func:`read_pointer` says about it.
    """
    if pointed == NOTHING_YET:
        return
    if pointed:
        yield pointed
    limit = iteration_in_name(pointed)
    found = []
    for name in checkpoint_names(save_dir):
        if name == pointed or _BEST.search(name):
            continue
        iteration = iteration_in_name(name)
        if iteration is None:
            iteration = _stored_iteration(os.path.join(save_dir, name))
        if iteration is not None:
            found.append((limit is None or iteration <= limit, iteration, name))
    for _, _, name in sorted(found, reverse=True):
        yield name


def newest_good(save_dir: str, model: nn.Module) -> Found | None:
    """The path and content of the checkpoint to resume from; None if there is none. Collective.

    Every one that is passed over is told in a warning, with the reason.

    Args:
        save_dir: the folder; that of the main process counts.
        model: see :func:`read_on_all_ranks`.

    Raises:
        CorruptCheckpointError: if there are checkpoints, and none of them is intact.
    """
    in_turn, problems = _names_in_turn(save_dir), {}
    while names := on_main_process(lambda: next(in_turn, None)):
        name, pointed = names
        path = os.path.join(save_dir, name)
        try:
            state = read_on_all_ranks(path, model)
        except (OSError, CorruptCheckpointError) as error:  # the same one on every rank
            logger.warning("Passing over the checkpoint %s: %s", path, error)
            problems[name] = str(error)
            continue
        if name != pointed:
            logger.warning("Resuming from %s, which %s does not name", path, POINTER)
        return path, state
    if problems:
        listing = "\n".join(f"  {name}: {reason}" for name, reason in problems.items())
        raise CorruptCheckpointError(
            f"no checkpoint in {save_dir!r} is intact. Repair or remove them, or resume elsewhere, "
            f"to start anew:\n{listing}"
        )
    return None


def _names_in_turn(save_dir: str) -> Iterator[tuple[str, str]]:
    """Each name to try, and that of the pointer."""
    pointed, name = read_pointer(save_dir), ""
    for name in resumable_names(save_dir, pointed):
        yield name, pointed
    if not name and (ignored := checkpoint_names(save_dir)):
        reason = "they are of an earlier run" if pointed == NOTHING_YET else "no last iteration"
        logger.warning("Not resuming from %s in %r: %s", ignored, save_dir, reason)


def _stored_iteration(path: str) -> int | None:
    """The last iteration that a checkpoint tells, be it of a trainer or of a strategy."""
    try:
        state = read_checkpoint(path, "meta")
    except (OSError, CorruptCheckpointError) as error:
        logger.warning("Cannot tell the iteration of %s: %s", path, error)
        return _BROKEN  # to be tried last, and then counted among the broken ones
    trainer, meta = state.get("trainer"), state.get("meta")
    holder = trainer if "iteration" not in state and isinstance(trainer, dict) else state
    iteration = holder.get("iteration")
    if iteration is None and isinstance(meta, dict) and "optimizer" in state:
        iteration = meta.get("iter", 0) - 1  # the number of those that were finished
    return iteration if isinstance(iteration, int) else None
