"""Atomic replacement of files and folders, and a lock per folder.

A file is written under a temporary name in the same folder, which begins with a dot and ends with
``.tmp-hooktrain-<pid>-<host>``. It is renamed once it is complete and on the disk. The next process
that locks the folder removes the temporary files of killed processes.
"""

import errno
import logging
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import IO

from filelock import FileLock, Timeout

logger = logging.getLogger(__name__)

AnyPath = str | os.PathLike[str]

# The suffix of a folder that is being replaced. Files and folders with other names may not belong
# to a run.
MOVED_ASIDE = r"\.old-hooktrain-\d+-.+"
_TEMPORARY = re.compile(r"\..+\.tmp-hooktrain-(\d+)-(.+?)(?:\.\d+)?")
_DISK_FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}
# Errors of file systems that cannot flush folders.
_CANNOT_SYNC = {errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.ENOTSUP}

_locks: dict[Path, FileLock] = {}


def lock_folder(folder: AnyPath) -> None:
    """Lock a folder for this process, and remove temporary files of killed runs.

    The operating system locks the file ``.lock`` in the folder, so the lock does not survive a
    kill, and child processes do not inherit it. :func:`unlock_folder` releases it. On a file system
    without locks there is a warning, and nothing is removed.

    Args:
        folder: an existing folder. Locking it again in the same process has no effect.

    Raises:
        RuntimeError: if another process holds the lock.
        OSError: if the folder does not exist or cannot be written to.
    """
    path = Path(folder).resolve() / ".lock"
    if path in _locks and _locks[path].is_locked:  # a forked child's copy is not locked
        return
    path.touch()
    # No fallback to filelock's soft lock, whose mere file would survive a kill. One thread may
    # unlock a folder that another has locked.
    lock = FileLock(path, timeout=0, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        owner = path.read_text() or "unknown"  # not written yet
        raise RuntimeError(
            f"the folder {str(folder)!r} is in use by another run (process and host: {owner}); "
            "wait for it to end, or choose another output folder"
        ) from None
    except OSError as error:
        logger.warning(
            "Cannot lock %s (%s): make sure that no other run writes there",
            folder,
            error,
        )
        return
    path.write_text(_owner())
    _locks[path] = lock
    sweep(folder)


def keep_lock(folder: AnyPath) -> None:
    """Lock a folder again if it was renamed or deleted since this process locked it.

    Raises:
        RuntimeError: if another process has since locked a folder of that name.
    """
    path = Path(folder).resolve() / ".lock"
    is_there = path.exists() and path.read_text() == _owner()
    if path in _locks and not is_there:
        logger.warning(
            "%s was renamed or deleted: the run continues in a new folder", folder
        )
        unlock_folder(folder)
        lock_folder(folder)


def unlock_folder(folder: AnyPath) -> None:
    """Release the lock of :func:`lock_folder`, if this process holds it."""
    path = Path(folder).resolve() / ".lock"
    if path in _locks:
        _locks.pop(path).release()


def sweep(folder: AnyPath) -> None:
    """Remove temporary files, and restore folders that were moved aside.

    The caller must hold the lock of the folder. Errors are logged. Temporary files of other live
    processes on this machine are kept, since a single save or a fetch takes no lock.
    """
    for entry in sorted(Path(folder).iterdir()):
        try:
            temporary = _TEMPORARY.fullmatch(entry.name)
            if temporary and not _belongs_to_live_process(*temporary.groups()):
                _remove(entry)
            moved = re.fullmatch(rf"(.+){MOVED_ASIDE}", entry.name)
            if moved:
                _put_back(entry, entry.with_name(moved[1]))
        except OSError as error:
            logger.warning("Cannot remove %s of a killed run: %s", entry, error)


def _belongs_to_live_process(number: str, host: str) -> bool:
    """Whether a temporary file belongs to another live process on this machine."""
    if host != socket.gethostname() or int(number) == os.getpid():
        return False
    try:
        os.kill(int(number), 0)
        # A killed process is a zombie until its parent waits for it; some containers never do.
        return "Z (zombie)" not in Path(f"/proc/{number}/status").read_text()
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True  # another user's process, or the system has no /proc


def _put_back(aside: Path, target: Path) -> None:
    if target.exists():
        delete(aside)
    else:
        os.rename(aside, target)


def is_address(path: AnyPath) -> bool:
    """Whether the path is an address, such as ``s3://bucket/model.pth``."""
    return re.match(r"[\w+.:-]+://", os.fspath(path)) is not None


def on_disk(path: AnyPath) -> str:
    """A path to write to, with ``~`` expanded.

    Raises:
        ValueError: for an address, since a run must lock and rename its files.
    """
    if is_address(path):
        raise ValueError(
            f"a run cannot write to {path!r}: use a folder on a disk, and set train.store to "
            "the address, to which each checkpoint is then copied"
        )
    return os.path.expanduser(path)


def temporary_path(path: Path) -> Path:
    """The path at which this process writes a file before it is renamed."""
    return path.with_name(f".{path.name}.tmp-{_owner()}")


def publish(folder: AnyPath, name: str) -> None:
    """Rename the file that this process wrote at :func:`temporary_path`, if there is one."""
    path = Path(folder, name)
    with suppress(FileNotFoundError):
        temporary_path(path).replace(path)


@contextmanager
def replacing(path: AnyPath) -> Iterator[Path]:
    """Write a file or folder at a temporary path, which then replaces ``path`` atomically.

    After the block, the rename is on the disk. If anything fails before the rename, the temporary
    path is removed and ``path`` is unchanged. A replaced folder is first renamed to
    ``<name>.old-hooktrain-<pid>-<host>.<number>``, which :func:`sweep` restores after a kill. If
    the old folder is still open somewhere, :func:`sweep` removes the rest later.

    Args:
        path: a file or a folder, which need not exist. Its parent must exist.

    Raises:
        IsADirectoryError: for a file, if a folder of the same name exists.
        OSError: if writing fails; the error names the path.

    Yields:
        The temporary path.
    """
    target = Path(path).absolute()
    temporary = temporary_path(target)
    aside = first_free(target.with_name(f"{target.name}.old-{_owner()}"))
    try:
        _remove(temporary)  # a killed process may have had the same id
        yield temporary
        if target.is_dir() and temporary.is_dir():
            os.rename(target, aside)
        os.replace(temporary, target)
        sync(target.parent)
        with suppress(OSError):
            delete(aside)
    except BaseException as error:
        # The original error is more helpful, and sweep() removes the rest.
        with suppress(OSError):
            if aside.exists():
                _put_back(aside, target)
            _remove(temporary)
        if isinstance(error, OSError) and error.errno and error.filename is None:
            error.filename = str(target)
        raise


@contextmanager
def atomic_write(path: AnyPath) -> Iterator[IO[bytes]]:
    """Replace a file by a new one, atomically and durably; see :func:`replacing`.

    Example:
        >>> with atomic_write("model.pth") as file:  # doctest: +SKIP
        ...     torch.save(state, file)

    Yields:
        The temporary file, open in binary mode.
    """
    with replacing(path) as temporary, open(temporary, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def delete(path: AnyPath) -> None:
    """Delete a file or a folder. A folder is renamed first, so it is never found incomplete.

    Raises:
        OSError: if it cannot be deleted. :func:`sweep` removes the rest of a folder later.
    """
    path = Path(path).absolute()
    if path.is_dir():
        path = path.rename(first_free(temporary_path(path)))
    _remove(path)


def first_free(path: Path) -> Path:
    """The first of ``<name>.1``, ``<name>.2``, ... that does not exist."""
    for number in count(1):
        free = path.with_name(f"{path.name}.{number}")
        if not free.exists():
            break
    return free


def sync(path: AnyPath) -> None:
    """Flush a file, or a folder so that a rename in it survives a power cut, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
        _warn_about_power_cuts(str(path), str(error))
    finally:
        os.close(descriptor)


@cache  # one warning for each path
def _warn_about_power_cuts(path: str, reason: str) -> None:
    logger.warning(
        "Cannot flush %s (%s): a power cut may lose the last save", path, reason
    )


def is_disk_full(error: BaseException) -> bool:
    """Whether an exception means that the disk is full, or a quota or file size limit reached."""
    return isinstance(error, OSError) and error.errno in _DISK_FULL


def _owner() -> str:
    """The process id and the host, for names of temporary files and for locks."""
    return f"hooktrain-{os.getpid()}-{socket.gethostname()}"


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
