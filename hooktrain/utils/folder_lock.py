"""One run at a time in an output folder."""

import fcntl
import os
from pathlib import Path
from typing import IO

# The lock files, which stay open for as long as this process lives.
_open_files: list[IO[str]] = []


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
    file = (Path(folder) / ".lock").open("a+", encoding="utf-8")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        raise RuntimeError(
            f"the folder {str(folder)!r} is in use by another run (process {owner}); wait for its "
            "end, or choose another output folder"
        ) from error
    file.truncate(0)
    print(os.getpid(), file=file, flush=True)
    _open_files.append(file)
