"""Atomic replacement of files and folders, and one lock for each folder.

A file is written under a temporary name in the same folder, which begins with a dot and ends with
``.tmp-hooktrain-<pid>-<host>``. When it is complete and on the disk, it is renamed. Temporary files
of a killed process are removed by the next one that locks the folder.
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

# The end of the name of a folder that is being replaced. Other names may be anybody's.
MOVED_ASIDE = r"\.old-hooktrain-\d+-.+"
_TEMPORARY = re.compile(r"\..+\.tmp-hooktrain-(\d+)-(.+?)(?:\.\d+)?")
_DISK_FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}
# The errors of file systems that cannot flush folders.
_CANNOT_SYNC = {errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.ENOTSUP}

_locks: dict[Path, FileLock] = {}


def lock_folder(folder: AnyPath) -> None:
    """Claim a folder for this process until it ends, and remove what killed runs left in it.

    The lock is one of the operating system's on the file ``.lock`` in the folder, so a kill leaves
    nothing stale, and children do not inherit it. On a file system without locks a warning says so,
    and nothing is removed.

    Args:
        folder: an existing folder. Locking it again in the same process does nothing.

    Raises:
        RuntimeError: if another process holds the lock.
        OSError: if the folder is not there or cannot be written to.
    """
    path = Path(folder).resolve(strict=True) / ".lock"
    if path in _locks and _locks[path].is_locked:  # a forked child's copy is not
        return
    path.touch()
    # filelock's fallback is a file, which would outlive a kill.
    lock = FileLock(path, timeout=0, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        owner = path.read_text()
        raise RuntimeError(
            f"the folder {str(folder)!r} is in use by another run (process {owner}); "
            "wait for its end, or choose another output folder"
        ) from None
    except OSError as error:
        message = "%s cannot be locked (%s): make sure that no other run writes there"
        logger.warning(message, folder, error)
        return
    owner = f"{os.getpid()} on {socket.gethostname()}"
    path.write_text(owner)
    _locks[path] = lock
    sweep(folder)


def unlock_folder(folder: AnyPath) -> None:
    """Release the lock of :func:`lock_folder`, if this process holds it."""
    path = Path(folder).resolve() / ".lock"
    lock = _locks.pop(path, None)
    if lock is not None:
        lock.release()


def sweep(folder: AnyPath) -> None:
    """Remove temporary files, and put back folders that were moved aside.

    The caller must hold the lock of the folder. What cannot be removed is logged. What another
    process of this machine is writing stays, since a single save or a fetch takes no lock.
    """
    for entry in sorted(Path(folder).iterdir()):
        try:
            temporary = _TEMPORARY.fullmatch(entry.name)
            if temporary and not _is_of_another_process(*temporary.groups()):
                _remove(entry)
            moved = re.fullmatch(rf"(.+){MOVED_ASIDE}", entry.name)
            if moved is not None:
                target = entry.with_name(moved[1])
                _put_back(entry, target)
        except OSError as error:
            logger.warning("Cannot remove %s of a killed run: %s", entry, error)


def _is_of_another_process(number: str, host: str) -> bool:
    """Whether it is another process than this one, alive and on this machine."""
    if host != socket.gethostname() or int(number) == os.getpid():
        return False
    try:
        os.kill(int(number), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # it is another user's
    return True


def _put_back(aside: Path, target: Path) -> None:
    if target.exists():
        delete(aside)
    else:
        os.rename(aside, target)


def is_address(path: AnyPath) -> bool:
    """Whether it is an address, such as ``s3://bucket/model.pth``, and no path on a disk."""
    return re.match(r"[\w+.:-]+://", os.fspath(path)) is not None


def on_disk(path: AnyPath) -> str:
    """A path to write to, with the home folder in place of ``~``.

    Raises:
        ValueError: for an address, since a run locks and renames what it writes.
    """
    if is_address(path):
        raise ValueError(
            f"a run cannot write to {path!r}: give a folder on a disk, and this address "
            "as train.store, where each checkpoint goes too"
        )
    return os.path.expanduser(path)


def temporary_path(path: Path) -> Path:
    """The path at which this process writes a file before that gets its name."""
    return path.with_name(f".{path.name}.tmp-{_owner()}")


def publish(folder: AnyPath, name: str) -> None:
    """Give a file its name, if this process has written it at its :func:`temporary_path`."""
    path = Path(folder, name)
    with suppress(FileNotFoundError):
        temporary_path(path).replace(path)


@contextmanager
def replacing(path: AnyPath) -> Iterator[Path]:
    """Give a temporary path, and let what is written there replace ``path`` in one go.

    The rename is on the disk when the block is left. If anything fails before it, what was written
    is removed, and ``path`` stays as it was. A folder that is replaced is first renamed to
    ``<name>.old-hooktrain-<pid>-<host>.<number>``, which :func:`sweep` puts back after a kill. What
    the file system keeps of it, since somebody has it open, is swept later.

    Args:
        path: a file or a folder, which need not exist. Its parent must exist.

    Raises:
        IsADirectoryError: for a file, if there is a folder of its name.
        OSError: if something cannot be written; it names the path.
    """
    target = Path(path).absolute()
    temporary = temporary_path(target)
    aside = first_free(target.with_name(f"{target.name}.old-{_owner()}"))
    try:
        _remove(temporary)  # of a killed process that had the same number
        yield temporary
        if target.is_dir() and temporary.is_dir():
            os.rename(target, aside)
        os.replace(temporary, target)
        sync_folder(target.parent)
        with suppress(OSError):
            delete(aside)
    except BaseException as error:
        # The first error says more, and sweep() removes what is left.
        with suppress(OSError):
            if aside.exists():
                _put_back(aside, target)
            _remove(temporary)
        if isinstance(error, OSError) and error.errno and error.filename is None:
            error.filename = str(target)
        raise


@contextmanager
def atomic_write(path: AnyPath) -> Iterator[IO[bytes]]:
    """Replace a file by a new one, all at once and durably; see :func:`replacing`.

    Example:
        >>> with atomic_write("model.pth") as file:  # doctest: +SKIP
        ...     torch.save(state, file)

    Yields:
        The open temporary file, for bytes.
    """
    with replacing(path) as temporary, open(temporary, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def delete(path: AnyPath) -> None:
    """Delete a file or a folder. A folder is renamed first, so that no half of it is found.

    Raises:
        OSError: if it cannot be deleted. The rest of a folder is swept later.
    """
    path = Path(path).absolute()
    if path.is_dir():
        path = path.rename(first_free(temporary_path(path)))
    _remove(path)


def first_free(path: Path) -> Path:
    """The first of ``<name>.1``, ``<name>.2``, ... that is not there."""
    for number in count(1):
        free = path.with_name(f"{path.name}.{number}")
        if not free.exists():
            break
    return free


def sync_folder(folder: Path) -> None:
    """Make a rename in the folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
        _warn_of_power_cuts(folder, str(error))
    finally:
        os.close(descriptor)


@cache  # it warns once a folder
def _warn_of_power_cuts(folder: Path, reason: str) -> None:
    message = "%s cannot flush folders (%s): a power cut may lose the last save"
    logger.warning(message, folder, reason)


def is_disk_full(error: BaseException) -> bool:
    """Whether an exception says that the disk, a quota or the largest allowed file is full."""
    return isinstance(error, OSError) and error.errno in _DISK_FULL


def _owner() -> str:
    return f"hooktrain-{os.getpid()}-{socket.gethostname()}"


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
