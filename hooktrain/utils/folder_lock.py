"""One run at a time in an output folder."""

import fcntl
import os


def lock_folder(folder: str | os.PathLike[str]) -> None:
    """Claim a folder for this process until it ends, however it ends.

    The lock is one of the operating system's on the file ``.lock`` in the folder. It belongs to
    the process alone: its children do not inherit it, and a kill leaves nothing stale.

    Args:
        folder: an existing folder. Locking it again in the same process does nothing.

    Raises:
        RuntimeError: if another process holds the lock.
        OSError: if the folder cannot be written to.
    """
    # It stays open, since to close it is to unlock the folder.
    file = os.open(os.path.join(folder, ".lock"), os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.read(file, 32).decode().strip() or "unknown"
        os.close(file)
        raise RuntimeError(
            f"the folder {str(folder)!r} is in use by another run (process {owner}); wait for its "
            "end, or choose another output folder"
        ) from error
    os.truncate(file, 0)
    os.write(file, str(os.getpid()).encode())
