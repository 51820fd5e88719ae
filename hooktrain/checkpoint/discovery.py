"""Which checkpoint of a folder to go on from: the newest one that is intact.

The file ``last_checkpoint`` names it, as in detectron2. That is a hint: where it is missing,
garbage, or names a file that is gone or broken, the folder itself is searched.
"""

import logging
import os
import re
from collections.abc import Iterator

from hooktrain.checkpoint.reading import Found, read_checkpoint
from hooktrain.checkpoint.retention import iteration_in_name
from hooktrain.checkpoint.storage import CorruptCheckpointError

__all__ = [
    "POINTER",
    "checkpoint_files",
    "newest_good",
    "read_pointer",
    "resumable_names",
]

logger = logging.getLogger(__name__)

POINTER = "last_checkpoint"
# "model_best.pth" and the like hold a good state, not the last one.
_BEST = re.compile(r"(^|[_.-])best([_.-]|$)")
_BROKEN = -1


def read_pointer(save_dir: str) -> str:
    """The file name in ``last_checkpoint``, or "" if it names no file of the folder."""
    try:
        with open(os.path.join(save_dir, POINTER), "rb") as file:
            text = file.read(4096).decode("utf-8", errors="replace").strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        logger.warning("Cannot read %s: %s", os.path.join(save_dir, POINTER), error)
        return ""
    if text and text == os.path.basename(text) and os.path.isfile(os.path.join(save_dir, text)):
        return text
    logger.warning("%s names %r, which is no file there", os.path.join(save_dir, POINTER), text)
    return ""


def resumable_names(save_dir: str, pointed: str) -> Iterator[str]:
    """The names of the files to try, best first; the folder is searched only if asked to go on.

    After the file of the pointer come the others by their iteration, newest first, but those that
    are newer than the pointer's at the very end: they belong to another run in the same folder.
    Files named ``best``, and files without an iteration (plain weights), do not occur.

    Args:
        save_dir: the folder.
        pointed: what :func:`read_pointer` says about it.
    """
    if pointed:
        yield pointed
    limit = iteration_in_name(pointed)
    found = []
    for path in checkpoint_files(save_dir):
        name = os.path.basename(path)
        if name == pointed or _BEST.search(name):
            continue
        iteration = iteration_in_name(name)
        if iteration is None:
            iteration = _stored_iteration(path)
        if iteration is not None:
            found.append((limit is None or iteration <= limit, iteration, name))
    for _, _, name in sorted(found, reverse=True):
        yield name


def checkpoint_files(save_dir: str) -> list[str]:
    """The paths of all ``.pth`` files of the folder, sorted by name; none if it is not there."""
    if not os.path.isdir(save_dir):
        return []
    names = sorted(name for name in os.listdir(save_dir) if name.endswith(".pth"))
    return [path for name in names if os.path.isfile(path := os.path.join(save_dir, name))]


def newest_good(save_dir: str) -> Found | None:
    """The path and content of the checkpoint to resume from; None if the folder has none.

    Every file that is passed over is told in a warning, with the reason.

    Raises:
        CorruptCheckpointError: if there are checkpoints, and none of them is intact.
    """
    pointed, problems = read_pointer(save_dir), {}
    for name in resumable_names(save_dir, pointed):
        path = os.path.join(save_dir, name)
        try:
            state = read_checkpoint(path)
        except (OSError, CorruptCheckpointError) as error:
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
    ignored = [os.path.basename(path) for path in checkpoint_files(save_dir)]
    if ignored:
        logger.warning("Not resuming from %s in %r: no last iteration", ignored, save_dir)
    return None


def _stored_iteration(path: str) -> int | None:
    try:
        state = read_checkpoint(path)
    except (OSError, CorruptCheckpointError) as error:
        logger.warning("Cannot tell the iteration of %s: %s", path, error)
        return _BROKEN  # to be tried last, and then counted among the broken ones
    trainer = state.get("trainer")
    holder = trainer if "iteration" not in state and isinstance(trainer, dict) else state
    iteration = holder.get("iteration")
    return iteration if isinstance(iteration, int) else None
