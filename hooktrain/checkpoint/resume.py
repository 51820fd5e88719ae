"""Which checkpoints of a folder to resume from, and which to delete.

A checkpoint is a file ``<name>.pth``, or a folder of shards ``<name>``. The file
``last_checkpoint`` names the one to resume from, as in detectron2. If that is missing or broken,
the other checkpoints of the folder are tried.
"""

import logging
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from hooktrain.checkpoint.files import CorruptCheckpointError, is_folder
from hooktrain.checkpoint.loading import open_checkpoint, read_checkpoint
from hooktrain.utils.file_io import (
    MOVED_ASIDE,
    AnyPath,
    atomic_write,
    delete,
    first_free,
    lock_folder,
    unlock_folder,
)

logger = logging.getLogger(__name__)

POINTER = "last_checkpoint"
# A file with the iteration of the checkpoint that the pointer names, if its name has none.
_ITERATION = ".last_iteration"

# Files with other names may not belong to a run. MMEngine's are iter_70.pth and epoch_3.pth.
_OF_A_RUN = re.compile(
    rf"(iter|epoch|.+(?=_[0-9]{{7}}|_final))_([0-9]+|final)(\.pth|{MOVED_ASIDE})?"
)


def write_pointer(save_dir: AnyPath, name: str) -> None:
    """Make a checkpoint the one to resume from, by its name only, so the folder may be moved."""
    with atomic_write(os.path.join(save_dir, POINTER)) as file:
        file.write(name.encode())


def write_iteration(save_dir: AnyPath, iteration: int | None) -> None:
    """Store the iteration of a checkpoint without a number in its name, in case it breaks.

    This comes before the pointer moves, which until then names a checkpoint with a number.
    """
    with atomic_write(os.path.join(save_dir, _ITERATION)) as file:
        file.write(str(iteration).encode())


def pointed_iteration(save_dir: AnyPath, pointed: str) -> int | None:
    """The iteration of the checkpoint that the pointer names, or None if unknown."""
    iteration = iteration_in_name(pointed)
    if pointed and iteration is None:
        with suppress(OSError, ValueError):
            iteration = int(Path(save_dir, _ITERATION).read_bytes())
    return iteration


def pointed_name(save_dir: AnyPath) -> str:
    """The name in ``last_checkpoint``, even of a missing checkpoint; "" without such a file.

    If it holds a full path, as other libraries write it, only the name counts, since the folder may
    have been moved.
    """
    path = Path(save_dir, POINTER)
    if not path.exists():
        return ""
    return os.path.basename(path.read_text("utf-8", "replace").strip())


def read_pointer(save_dir: AnyPath) -> str:
    """The name of the checkpoint in ``last_checkpoint``, or "" if it does not exist."""
    name = pointed_name(save_dir)
    if name in checkpoint_names(save_dir):
        return name
    if name:
        logger.warning("%s names %r, which is not in %s", POINTER, name, save_dir)
    return ""


def checkpoint_names(save_dir: AnyPath) -> list[str]:
    """The sorted names of all checkpoints in a folder, which need not exist."""
    if not os.path.isdir(save_dir):
        return []
    names = []
    for path in Path(save_dir).iterdir():
        is_file = path.suffix == ".pth" and path.is_file()
        if is_file or is_folder(path):
            names.append(path.name)
    return sorted(names)


def names_to_resume(save_dir: AnyPath) -> list[str]:
    """The names of the checkpoints to try, in this order.

    The one that ``last_checkpoint`` names comes first, then the others, newest first. Those with a
    higher iteration belong to another run, and come last. Files that are not named like a run's
    checkpoints, or hold no iteration, are left out.
    """
    pointed = read_pointer(save_dir)
    limit = pointed_iteration(save_dir, pointed)
    others = []
    for name in checkpoint_names(save_dir):
        if name == pointed or not _OF_A_RUN.fullmatch(name):
            continue
        iteration = iteration_in_name(name)
        if iteration is None:
            iteration = _stored_iteration(os.path.join(save_dir, name))
        if iteration is not None:
            is_of_this_run = limit is None or iteration <= limit
            others.append((is_of_this_run, iteration, name))
    names = [name for _, _, name in sorted(others, reverse=True)]
    return [pointed, *names] if pointed else names


def iteration_in_name(name: str) -> int | None:
    """The number in ``{prefix}_{7 or more digits}`` with or without ``.pth``, or None.

    >>> iteration_in_name("model_0000099.pth")
    99
    >>> iteration_in_name("model_final.pth") is None
    True
    """
    match = _OF_A_RUN.fullmatch(name)
    if match is None or match[2] == "final":
        return None
    return int(match[2])


def _stored_iteration(path: str) -> int | None:
    """The iteration in a checkpoint, or None; -1 for a broken one, which is tried last.

    The checkpoint is verified later, when it is tried.
    """
    try:
        state = open_checkpoint(path).read(None, "meta")
    except (OSError, CorruptCheckpointError) as error:
        logger.warning("Cannot read the iteration of %s: %s", path, error)
        return -1
    iteration = state.get("iteration")
    return iteration if isinstance(iteration, int) else None


def files_to_delete(
    save_dir: AnyPath, prefix: str, max_to_keep: int, newest: int
) -> list[str]:
    """The names of the numbered checkpoints that are too old, oldest first.

    The one to resume from is never among them.

    Args:
        save_dir: the folder.
        prefix: the prefix of the names.
        max_to_keep: how many to keep, at least 1.
        newest: the iteration just saved. Checkpoints with a higher one belong to another run, and
            do not count.
    """
    ours = []
    for name in checkpoint_names(save_dir):
        iteration = iteration_in_name(name)
        if iteration is None or name.rpartition("_")[0] != prefix:
            continue
        if iteration <= newest:
            ours.append((iteration, name))
    old = sorted(ours)[:-max_to_keep]
    pointed = read_pointer(save_dir)
    return [name for _, name in old if name != pointed]


def delete_after_verifying(newest: str, names: list[str]) -> None:
    """Delete older checkpoints, if the one just saved is intact.

    A failure to delete one is logged.

    Args:
        newest: the path of the checkpoint just saved, a file or a folder.
        names: the names of the older ones, in the same folder; see :func:`files_to_delete`.
    """
    if not names:
        return
    try:
        read_checkpoint(newest, "meta")
    except (OSError, CorruptCheckpointError) as error:
        logger.error(
            "Keeping all older checkpoints, since the newest is broken: %s", error
        )
        return
    for name in names:
        try:
            delete(Path(newest).with_name(name))
        except OSError as error:
            logger.warning("Cannot delete the old checkpoint: %s", error)


def put_aside(save_dir: AnyPath, names: Iterable[str]) -> None:
    """Rename the best models of an earlier run, if any, to ``<name>.1``, or the next free number.

    The process that saves calls it before a new run saves anything.

    Raises:
        RuntimeError: if another run is using the folder.
    """
    for name in set(names).intersection(checkpoint_names(save_dir)):
        lock_folder(save_dir)
        path = Path(save_dir, name)
        aside = path.rename(first_free(path))
        logger.warning("An earlier best model was renamed to %s", aside)


def archive_folder(folder: AnyPath, initial: AnyPath = "") -> Path | None:
    """Rename the folder of an earlier run to ``<name>.1``, or the next free number.

    An empty folder takes its place. To resume the earlier run, rename its folder back. The main
    process calls this before a new run writes anything.

    Args:
        folder: the folder, which need not exist.
        initial: the path or address of the checkpoint that the new run starts from.

    Returns:
        The new path of the old folder, or None if it has nothing to resume from, and so stays.

    Raises:
        RuntimeError: if another run is using it.
        ValueError: if ``initial`` lies in it, or if it is or contains the current folder.
        OSError: if it cannot be renamed.
    """
    path = Path(folder).resolve()
    if not names_to_resume(path):
        return None
    if Path.cwd().is_relative_to(path):
        raise ValueError(
            f"a new run would rename the current folder {str(path)!r}, which has "
            "checkpoints: use another output folder, or resume"
        )
    if Path(initial).expanduser().resolve().is_relative_to(path):
        raise ValueError(
            f"train.init_checkpoint={initial!r} lies in train.output_dir, which a new run would "
            "rename, since it has checkpoints: use another output folder"
        )
    lock_folder(path)
    aside = path.rename(first_free(path))
    path.mkdir()
    unlock_folder(path)
    return aside
