"""Locks on files and folders, which end with the process that holds them.

They are flock's. filelock comes with torch in any version; those before 3.30 leave a lock to the
children of a killed process, and empty the file that names its owner.
"""

import atexit
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from weakref import WeakSet

logger = logging.getLogger(__name__)

_folders: list[FileIO] = []
_locked: WeakSet[FileIO] = WeakSet()


def _close_locked() -> None:
    for file in list(_locked):
        file.close()


# A child, such as a worker of a loader, would keep the locks of a process that was killed.
os.register_at_fork(after_in_child=_close_locked)


def try_lock(file: FileIO) -> bool:
    """Lock an open file for as long as it is open and this process lives.

    Children have no part in it. It holds against other openings of the file, also in this process,
    and on all machines where the file system passes locks on.

    Returns:
        Whether the file is locked by this call, and not by somebody else.

    Raises:
        OSError: if the file system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    _locked.add(file)
    return True


@contextmanager
def locked_file(path: Path) -> Iterator[None]:
    """Make a file, hold a lock on it, and remove it at the end; without locks, only the file."""
    with FileIO(path, "w") as file:
        try:
            with suppress(OSError):  # without locks nobody sweeps
                try_lock(file)
            yield
        finally:
            with suppress(OSError):  # what is left can be swept
                path.unlink()


def is_locked(path: Path) -> bool:
    """Whether there is such a file and somebody, in whichever process, holds a lock on it.

    Raises:
        OSError: if that cannot be known.
    """
    try:
        with FileIO(path, "r+") as file:
            return not try_lock(file)
    except FileNotFoundError:
        return False


def lock_folder(folder: str | os.PathLike[str]) -> None:
    """Claim a folder for this process until it ends, however it ends.

    The lock is one of the operating system's on the file ``.lock`` in the folder. It belongs to
    the process alone: its children do not inherit it, and a kill leaves nothing stale. Where the
    file system has no locks, a warning says so.

    Args:
        folder: an existing folder. Locking it again in the same process does nothing.

    Raises:
        RuntimeError: if another process holds the lock.
        OSError: if the folder cannot be written to.
    """
    file = FileIO(Path(folder, ".lock"), "a+")
    mine = [held.fileno() for held in _folders if not held.closed]  # closed in a child
    if any(os.path.sameopenfile(file.fileno(), held) for held in mine):
        file.close()
        return
    try:
        is_ours = try_lock(file)
    except OSError as error:
        file.close()
        message = "%s cannot be locked (%s): see to it that no other run writes there"
        logger.warning(message, folder, error)
        return
    if not is_ours:
        file.seek(0)
        owner = file.read(300).decode(errors="replace") or "unknown"
        file.close()
        raise RuntimeError(
            f"the folder {str(folder)!r} is in use by another run (process {owner}); wait for its "
            "end, or choose another output folder"
        )
    file.truncate(0)
    file.write(f"{os.getpid()} on {socket.gethostname()}".encode())
    _folders.append(file)  # to close it is to unlock the folder
    atexit.register(file.close)
