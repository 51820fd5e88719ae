"""Folders that are there as a whole or not at all, whatever happens while they are written."""

import os
import re
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hooktrain.checkpoint.manifest import MANIFEST, METADATA
from hooktrain.utils.file_io import disk_full_error, is_another_living_process, sync_folder

__all__ = [
    "abandon_temporary_folder",
    "commit_folder",
    "delete_folder",
    "disk_full_as_oserror",
    "is_sharded",
    "make_temporary_folder",
    "remove_temporary_folder",
    "sweep_temporary_folders",
]

_LEFT_OVER = re.compile(r"(?P<name>.+)\.(?P<kind>tmp|old)-(?P<pid>\d+)-[0-9a-f]{8}")

# What this process is writing. A pid alone does not tell: in a container the run that died and the
# one that takes over often have the same.
_in_progress: set[Path] = set()


def is_sharded(path: str | os.PathLike[str]) -> bool:
    """Whether there is a sharded checkpoint at ``path``, be it intact or not.

    One that has lost its manifest is one, too; a folder that is being written or deleted is none.
    One that was moved aside is one as long as nothing has taken its place.
    """
    parent, name = os.path.split(path)
    if left_over := _LEFT_OVER.fullmatch(name):
        replaced = os.path.exists(os.path.join(parent, left_over["name"]))
        if left_over["kind"] == "tmp" or replaced:
            return False
    return any(os.path.isfile(os.path.join(path, file)) for file in (MANIFEST, METADATA))


def make_temporary_folder(folder: Path) -> Path:
    """Make the folder to write to, beside ``folder``, and sweep what killed runs left there.

    Raises:
        FileExistsError: if there is something at ``folder`` that is no sharded checkpoint, and so
            will not be replaced by one.
    """
    if folder.exists() and not is_sharded(folder):
        raise FileExistsError(
            f"{folder} is there and no sharded checkpoint (it has no {MANIFEST}): it is not "
            "replaced. Remove it, or choose another name"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    sweep_temporary_folders(folder.parent)
    temporary = _beside(folder, "tmp")
    temporary.mkdir()
    _in_progress.add(temporary)
    return temporary


def remove_temporary_folder(temporary: Path) -> None:
    """Give up what was written; what cannot be removed now is swept later."""
    shutil.rmtree(temporary, ignore_errors=True)
    _in_progress.discard(temporary)


def abandon_temporary_folder(temporary: Path) -> None:
    """Leave it to the next sweep, since other processes may still be writing to it."""
    _in_progress.discard(temporary)


def delete_folder(folder: Path) -> None:
    """Delete a sharded checkpoint: at once as far as its name goes, so never by halves.

    Raises:
        OSError: if it cannot be deleted; what has lost its name already is swept later.
    """
    temporary = _beside(folder.absolute(), "tmp")
    _in_progress.add(temporary)
    try:
        os.rename(folder, temporary)
        shutil.rmtree(temporary)
    finally:
        _in_progress.discard(temporary)


def commit_folder(temporary: Path, folder: Path) -> None:
    """Let a temporary folder, whose files are on the disk, take its final name, durably.

    An older folder of that name is moved aside first and removed at last. Killed between, the older
    one is put back by the next sweep.
    """
    old = _beside(folder, "old") if folder.exists() else None
    if old is not None:
        os.rename(folder, old)
    try:
        os.rename(temporary, folder)
    except OSError:
        if old is not None:
            os.rename(old, folder)
        raise
    _in_progress.discard(temporary)
    sync_folder(folder.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def sweep_temporary_folders(parent: str | os.PathLike[str]) -> list[Path]:
    """Remove what killed processes left of folders, or put back what they had moved aside.

    Those of living processes stay. Whether a process lives can be seen on this machine only, so
    call it while no other machine writes there.

    Returns:
        The left over folders, sorted; none of them is there any more.
    """
    left_over = []
    for entry in sorted(Path(parent).absolute().iterdir()):
        match = _LEFT_OVER.fullmatch(entry.name)
        if match is None or entry in _in_progress or not entry.is_dir():
            continue
        if is_another_living_process(int(match["pid"])):
            continue
        left_over.append(entry)
        final = entry.with_name(match["name"])
        if match["kind"] == "old" and not final.exists():
            os.rename(entry, final)
        else:
            shutil.rmtree(entry)
    return left_over


def disk_full_as_oserror(write: Callable[[], Any], folder: Path) -> Any:
    """Call ``write``; what torch made of a full disk becomes an OSError again.

    Raises:
        OSError: with the folder and the free space, if the disk or a quota is full.
    """
    try:
        return write()
    except Exception as error:
        full = disk_full_error(error)
        if full is None:
            raise
        free = -1
        with suppress(OSError):
            free = shutil.disk_usage(folder.parent).free
        message = f"no space to write {folder}: {os.strerror(full)}, {free:,} bytes free"
        raise OSError(full, message) from error


def _beside(folder: Path, kind: str) -> Path:
    return folder.with_name(f"{folder.name}.{kind}-{os.getpid()}-{secrets.token_hex(4)}")
