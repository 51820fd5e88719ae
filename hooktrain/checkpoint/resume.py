"""Which checkpoints of a folder to resume from, and which to delete.

A checkpoint is a file ``<name>.pth``, or a folder of shards ``<name>``. The file
``last_checkpoint`` names the one to resume from, as in detectron2. If it is missing, garbage, or
names one that is gone or broken, the folder itself is searched.
"""

import logging
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from hooktrain.checkpoint.files import CorruptCheckpointError, is_folder
from hooktrain.checkpoint.loading import read_checkpoint
from hooktrain.utils.file_io import (
    AnyPath,
    atomic_write,
    first_free,
    lock_folder,
    unlock_folder,
)

logger = logging.getLogger(__name__)

POINTER = "last_checkpoint"

# Other names may be anybody's. A folder that was moved aside ends with ".old-".
_OF_A_RUN = re.compile(r"(.+)_([0-9]{7,}|final)(\.pth|\.old-.+)?")


def write_pointer(save_dir: str, name: str) -> None:
    """Make a checkpoint of the folder the one to resume from.

    Only its name is written, so that the folder may be moved.
    """
    with atomic_write(os.path.join(save_dir, POINTER)) as file:
        file.write(name.encode())


def read_pointer(save_dir: str) -> str:
    """The name in ``last_checkpoint``; "" if it names none there."""
    path = Path(save_dir, POINTER)
    try:
        name = path.read_text("utf-8", "replace").strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        logger.warning("Cannot read %s: %s", path, error)
        return ""
    if name in checkpoint_names(save_dir):
        return name
    logger.warning("%s names %r, which is no checkpoint there", path, name)
    return ""


def checkpoint_names(save_dir: AnyPath) -> list[str]:
    """The names of all checkpoints of the folder, sorted; none if it is not there."""
    if not os.path.isdir(save_dir):
        return []
    return sorted(
        path.name for path in Path(save_dir).iterdir() if _is_checkpoint(path)
    )


def _is_checkpoint(path: Path) -> bool:
    return is_folder(path) or (path.suffix == ".pth" and path.is_file())


def names_to_resume(save_dir: str, pointed: str) -> Iterator[str]:
    """The names of the checkpoints to try, best first; the folder is searched only if need be.

    First comes that of the pointer, then the others by their iteration, newest first. Those that
    are newer than the pointer's come last, since they are of another run. Names that end neither
    with a number nor with ``_final`` are left out, and so are plain weights without an iteration.

    Args:
        save_dir: the folder.
        pointed: what :func:`read_pointer` says about it.
    """
    if pointed:
        yield pointed
    limit = iteration_in_name(pointed)
    older: list[tuple[int, str]] = []
    newer: list[tuple[int, str]] = []
    for name in checkpoint_names(save_dir):
        if name == pointed or not _OF_A_RUN.fullmatch(name):
            continue
        iteration = iteration_in_name(name)
        if iteration is None:
            iteration = _stored_iteration(os.path.join(save_dir, name))
        if iteration is None:
            continue
        is_newer = limit is not None and iteration > limit
        (newer if is_newer else older).append((iteration, name))
    for _, name in [*sorted(older, reverse=True), *sorted(newer, reverse=True)]:
        yield name


def iteration_in_name(name: str, prefix: str | None = None) -> int | None:
    """The number in ``{prefix}_{7 or more digits}`` with or without ``.pth``, or None.

    >>> iteration_in_name("model_0000099.pth")
    99
    >>> iteration_in_name("model_final.pth") is None
    True
    """
    match = _OF_A_RUN.fullmatch(name)
    if match is None or match[2] == "final" or prefix not in (None, match[1]):
        return None
    return int(match[2])


def _stored_iteration(path: str) -> int | None:
    """The last iteration in a checkpoint; -1 if it is broken, so that it is tried last."""
    try:
        state = read_checkpoint(path, "meta")
    except (OSError, CorruptCheckpointError) as error:
        logger.warning("Cannot tell the iteration of %s: %s", path, error)
        return -1
    trainer = state.get("trainer")
    holder = trainer if isinstance(trainer, dict) else {}
    iteration = state.get("iteration", holder.get("iteration"))
    return iteration if isinstance(iteration, int) else None


def files_to_delete(
    names: Iterable[str], prefix: str, max_to_keep: int, newest: int, pointed: str = ""
) -> list[str]:
    """The numbered checkpoints beyond the newest ``max_to_keep``, oldest first.

    The numbers give the order, so clocks do not matter, and a resumed run goes on counting.

    Args:
        names: of all checkpoints in the folder. Those that are not of the form
            ``{prefix}_0000099.pth`` or ``{prefix}_0000099`` stay.
        prefix: of those that are looked at.
        max_to_keep: how many to keep, at least 1.
        newest: the iteration just saved. Higher numbers are of another run: they are neither
            counted nor deleted.
        pointed: the one to resume from, which stays.
    """
    ours = []
    for name in names:
        iteration = iteration_in_name(name, prefix)
        if iteration is not None and iteration <= newest:
            ours.append((iteration, name))
    return [name for _, name in sorted(ours)[:-max_to_keep] if name != pointed]


def set_folder_aside(folder: AnyPath) -> Path | None:
    """Rename the folder of an earlier run to the first free ``<name>.1``, and make it anew.

    What that run has left stays complete: renamed back, it can be resumed. A folder with nothing
    to resume from stays as it is. Call it on the main process, before a new run writes anything.

    Returns:
        Where the folder is now; None if it stays.

    Raises:
        RuntimeError: if another run is using the folder.
        ValueError: if it is the current folder, or one above that.
        OSError: if it cannot be renamed.
    """
    path = Path(folder).resolve()
    names = names_to_resume(str(path), read_pointer(str(path)))
    if next(names, None) is None:
        return None
    if Path.cwd().is_relative_to(path):
        raise ValueError(
            f"a new run would rename the current folder {str(path)!r}, which has "
            "checkpoints: give another output folder, or resume"
        )
    lock_folder(path)
    aside = first_free(path)
    path.rename(aside)
    path.mkdir()
    unlock_folder(path)
    return aside
