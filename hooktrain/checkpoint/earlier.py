"""What stands in the folder of a run and is not this run's: it is set aside, never deleted."""

import logging
import os
from collections.abc import Callable
from itertools import count
from pathlib import Path

from hooktrain.checkpoint.resume import BEST, OF_A_RUN, POINTER, checkpoint_names, read_pointer

logger = logging.getLogger(__name__)


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
        if name != kept and (name == pointed or OF_A_RUN.fullmatch(name) or BEST.search(name))
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
        logger.error("Something else has the name of %s: it is moved to %s", path, aside)


def _set_aside(save_dir: str, *names: str) -> Path:
    aside = next(p for n in count(1) if not (p := Path(save_dir, f"earlier-{n}")).exists())
    aside.mkdir()
    for name in names:
        os.rename(os.path.join(save_dir, name), aside / name)
    return aside
