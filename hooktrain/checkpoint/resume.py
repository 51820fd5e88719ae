"""Which checkpoints of a folder to go on from, and which to delete.

A checkpoint is a file ``<name>.pth``, or a folder of shards ``<name>``. The file
``last_checkpoint`` names the one to go on from, as in detectron2. If it is missing, garbage, or
names one that is gone or broken, the folder itself is searched.

All that stands in the folder under the names that a run gives belongs to one run: a new one moves
what it finds into a subfolder ``earlier-<number>``.
"""

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path

from hooktrain.checkpoint.files import CorruptCheckpointError, is_folder
from hooktrain.checkpoint.loading import read_checkpoint
from hooktrain.utils.file_io import atomic_write

logger = logging.getLogger(__name__)

POINTER = "last_checkpoint"

_NUMBERED = re.compile(r"(?P<prefix>.+)_(?P<iteration>[0-9]{7,})(\.pth)?")
OF_A_RUN = re.compile(r".+_([0-9]{7,}|final)(\.pth|\.old-.+)?")
# MMEngine's epoch_12.pth too is looked into; all other names may be anybody's.
_RESUMABLE = re.compile(r".+_([0-9]+|final)(\.pth|\.old-.+)?")
# "model_best.pth" and the like hold a good state, not the last one.
BEST = re.compile(r"(^|[_.-])best([_.-]|$)")


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
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            logger.warning("Cannot read %s: %s", path, error)
        return ""
    if name in checkpoint_names(save_dir):
        return name
    logger.warning("%s names %r, which is no checkpoint there", path, name)
    return ""


def checkpoint_names(save_dir: str) -> list[str]:
    """The names of all checkpoints of the folder, sorted; none if it is not there."""
    entries = Path(save_dir).iterdir() if os.path.isdir(save_dir) else []
    return sorted(
        e.name for e in entries if (e.suffix == ".pth" and e.is_file()) or is_folder(e)
    )


def names_to_resume(save_dir: str, pointed: str) -> Iterator[str]:
    """The names of the checkpoints to try, best first; the folder is searched only if need be.

    First comes that of the pointer, then the others by their iteration, newest first. Those that
    are newer than the pointer's come last, since the run has gone back behind them.
    Left out are those named ``best``, those without an iteration (plain weights), and those whose
    name does not end with a number or ``_final``: anybody may have put them there.

    Args:
        save_dir: the folder.
        pointed: what :func:`read_pointer` says about it.
    """
    if pointed:
        yield pointed
    limit = iteration_in_name(pointed)
    found = []
    for name in checkpoint_names(save_dir):
        if name == pointed or BEST.search(name) or not _RESUMABLE.fullmatch(name):
            continue
        iteration = iteration_in_name(name)
        if iteration is None:
            iteration = _stored_iteration(os.path.join(save_dir, name))
        if iteration is not None:
            found.append((limit is None or iteration <= limit, iteration, name))
    yield from (name for _, _, name in sorted(found, reverse=True))


def iteration_in_name(name: str, prefix: str | None = None) -> int | None:
    """The number in ``{prefix}_{7 or more digits}`` with or without ``.pth``, or None.

    >>> iteration_in_name("model_0000099.pth")
    99
    >>> iteration_in_name("model_final.pth") is None
    True
    """
    match = _NUMBERED.fullmatch(name)
    if match is None or prefix not in (None, match["prefix"]):
        return None
    return int(match["iteration"])


def _stored_iteration(path: str) -> int | None:
    """The last iteration in the checkpoint of a trainer or a strategy, if it is one of them."""
    try:
        state = read_checkpoint(path, "meta")
    except (OSError, CorruptCheckpointError) as error:
        logger.warning("Cannot tell the iteration of %s: %s", path, error)
        # A run's own is to be tried last, and then counted among the broken ones.
        return -2 if OF_A_RUN.fullmatch(os.path.basename(path)) else None
    trainer, meta = state.get("trainer"), state.get("meta")
    holder = (
        trainer if "iteration" not in state and isinstance(trainer, dict) else state
    )
    iteration = holder.get("iteration")
    if iteration is None and isinstance(meta, dict) and "optimizer" in state:
        iteration = meta.get("iter", 0) - 1  # MMEngine's number of finished iterations
    return iteration if isinstance(iteration, int) else None


def files_to_delete(
    names: Iterable[str], prefix: str, max_to_keep: int, newest: int, pointed: str = ""
) -> list[str]:
    """The numbered checkpoints beyond the newest ``max_to_keep``, oldest first.

    The numbers give the order, so clocks do not matter. Since it looks at the folder alone, it goes
    on where it was after a resume.

    Args:
        names: of all checkpoints in the folder. Those that are not of the form
            ``{prefix}_0000099.pth`` or ``{prefix}_0000099`` stay.
        prefix: of those that are looked at.
        max_to_keep: how many to keep, at least 1.
        newest: the iteration just saved. Higher numbers, behind which the run has gone back, are
            neither counted nor deleted.
        pointed: the one to resume from, which stays.
    """
    ours = sorted(
        (number, name)
        for name in names
        if (number := iteration_in_name(name, prefix)) is not None and number <= newest
    )
    return [name for _, name in ours[:-max_to_keep] if name != pointed]


def begin_anew(save_dir: str, kept: str = "") -> None:
    """Move what an earlier run has left, the pointer last, into a subfolder ``earlier-<number>``.

    Args:
        save_dir: the folder; it need not be there.
        kept: the name of a checkpoint that stays.
    """
    pointed = read_pointer(save_dir)
    names = [
        name
        for name in checkpoint_names(save_dir)
        if name != kept
        and (name == pointed or OF_A_RUN.fullmatch(name) or BEST.search(name))
    ]
    if names:
        if pointed and pointed != kept:
            names.append(POINTER)
        aside = _set_aside(save_dir, *names)
        message = "A new run begins: moved %s of an earlier one to %s. To resume it, move them back"
        logger.warning(message, names, aside)


def make_room(path: str, is_wanted: Callable[[str], bool] = os.path.isfile) -> None:
    """Set aside, loudly, what has the name of a file or folder to be written and is none."""
    if os.path.lexists(path) and not is_wanted(path):
        aside = _set_aside(*os.path.split(path))
        logger.error(
            "Something else has the name of %s: it is moved to %s", path, aside
        )


def _set_aside(save_dir: str, *names: str) -> Path:
    aside = next(
        p for n in count(1) if not (p := Path(save_dir, f"earlier-{n}")).exists()
    )
    aside.mkdir()
    for name in names:
        os.rename(os.path.join(save_dir, name), aside / name)
    return aside
