"""One run at a time in an output folder."""

import atexit
import logging
import os
import socket
from io import FileIO
from pathlib import Path

from hooktrain.utils.file_io import AnyPath, try_lock

logger = logging.getLogger(__name__)

_held: list[FileIO] = []


def lock_folder(folder: AnyPath) -> None:
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
    mine = [held.fileno() for held in _held if not held.closed]  # closed in a child
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
    _held.append(file)  # to close it is to unlock the folder
    atexit.register(file.close)
