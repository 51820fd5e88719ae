"""Locks on files and folders, which end with the process that holds them.

They are filelock's, which comes with torch. Before version 3.30 the children of a killed process
would keep its locks.
"""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

logger = logging.getLogger(__name__)

_folders: dict[Path, FileLock] = {}


def _file_lock(path: Path) -> FileLock:
    """A lock to take at once or not at all.

    Where the file system has no locks, filelock would make a file instead, which outlives a kill.
    """
    return FileLock(path, timeout=0, fallback_to_soft=False)


@contextmanager
def locked_file(path: Path) -> Iterator[None]:
    """Make a file, hold a lock on it, and remove it at the end; without locks, only the file."""
    path.touch()
    lock = _file_lock(path)
    try:
        with suppress(OSError):  # without locks nobody sweeps
            lock.acquire()
        yield
    finally:
        lock.release()
        with suppress(OSError):  # what is left can be swept
            path.unlink()


def is_locked(path: Path) -> bool:
    """Whether there is such a file and somebody, in whichever process, holds a lock on it.

    Raises:
        OSError: if that cannot be known.
    """
    if not path.exists():
        return False
    try:
        with _file_lock(path):
            return False
    except Timeout:
        return True


def lock_folder(folder: str | os.PathLike[str]) -> None:
    """Claim a folder for this process until it ends, however it ends.

    The lock is one of the operating system's on the file ``.lock`` in the folder. It belongs to
    the process alone: its children do not inherit it, and a kill leaves nothing stale. Where the
    file system has no locks, a warning says so.

    Args:
        folder: an existing folder. Locking it again in the same process does nothing.

    Raises:
        RuntimeError: if another process holds the lock.
        OSError: if the folder is not there or cannot be written to.
    """
    path = Path(folder).resolve(strict=True) / ".lock"
    if path in _folders and _folders[path].is_locked:  # a child's copy is not
        return
    path.touch()
    lock = _file_lock(path)
    try:
        lock.acquire()
    except Timeout:
        owner = path.read_text(errors="replace")[:300] or "unknown"
        raise RuntimeError(
            f"the folder {str(folder)!r} is in use by another run (process {owner}); wait for its "
            "end, or choose another output folder"
        ) from None
    except OSError as error:
        message = "%s cannot be locked (%s): see to it that no other run writes there"
        logger.warning(message, folder, error)
        return
    path.write_text(f"{os.getpid()} on {socket.gethostname()}")
    _folders[path] = lock
