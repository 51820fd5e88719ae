"""Files and folders that are the old one or the new one, whatever happens while they are written.

What is written has a temporary name in the same folder first: ``.<name>.tmp-<process>-<token>``.
When it is complete and on the disk, it is renamed. Meanwhile its process holds a lock on the file
``.<name>.tmp-<process>-<token>.lock``. What a killed process leaves is swept later.
"""

import errno
import logging
import os
import re
import secrets
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


AnyPath = str | os.PathLike[str]

_TEMPORARY = re.compile(
    r"(\.(?P<name>.+)\.tmp|(?P<aside>.+)\.old)(?P<owner>-\d+-[0-9a-f]{8})(\.lock)?"
)
_DISK_FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}
# What file systems say that cannot flush folders.
_CANNOT_SYNC = {
    errno.EINVAL,
    errno.EBADF,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.ENOTSUP,
}

# Numbers of processes are not enough: other machines and containers have the same ones.
_TOKEN = secrets.token_hex(4)


def is_address(path: AnyPath) -> bool:
    """Whether it is an address, such as ``s3://bucket/model.pth``, and no path on a disk."""
    return re.match(r"[\w+.:-]+://", os.fspath(path)) is not None


def on_disk(path: AnyPath) -> str:
    """A path to write to, with the home folder in place of ``~``.

    Raises:
        ValueError: for an address. Locking and renaming need a file system.
    """
    if is_address(path):
        advice = "give a folder on a disk; docs/guide.md shows how to copy checkpoints elsewhere"
        raise ValueError(f"a run cannot write to {path!r}: {advice}")
    return os.path.expanduser(path)


@contextmanager
def replacing(path: AnyPath) -> Iterator[Path]:
    """A temporary path. What is there when the block ends well takes the place of ``path``.

    The rename is on the disk when the block is left. If anything fails before it, what was written
    is removed and ``path`` stays as it was. A folder moves one in its place aside first, to
    ``<name>.old-<process>-<token>``, and removed afterwards. If the process is killed in between,
    :func:`sweep` puts it back.

    Args:
        path: a file or a folder, that may be there or not. Its parent must exist.

    Raises:
        IsADirectoryError: for a file, if there is a folder of its name.
        OSError: if something cannot be written. When the disk or a quota is full, the message has
            the path and the free space.
    """
    target = Path(path).absolute()
    temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}-{_TOKEN}")
    aside = target.with_name(f"{target.name}.old-{os.getpid()}-{_TOKEN}")
    try:
        with locked_file(temporary.with_name(f"{temporary.name}.lock")):
            yield temporary
            if target.is_dir() and temporary.is_dir():
                os.rename(target, aside)
            os.replace(temporary, target)
            sync_folder(target.parent)
            shutil.rmtree(aside, ignore_errors=True)
    except BaseException as error:
        with suppress(OSError):  # the error says more, and what is left can be swept
            if aside.exists() and not target.exists():
                os.rename(aside, target)
            _remove(temporary)
        raise_disk_full(error, target)
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
    """Delete a file or a folder. A folder loses its name first, so that no half of it is found.

    Raises:
        OSError: if it cannot be deleted. The rest of a folder is swept later.
    """
    path = Path(path).absolute()
    if path.is_dir():
        path = path.rename(path.with_name(f".{path.name}.tmp-{os.getpid()}-{_TOKEN}"))
    _remove(path)


def set_aside(path: Path) -> None:
    """Rename what another run has left to the first free ``<name>.1``, ``<name>.2``, ..."""
    free = next(p for n in count(1) if not (p := Path(f"{path}.{n}")).exists())
    path.rename(free)
    logger.info(
        "A new run begins: moved what another has left from %s to %s", path, free
    )


def sweep(folder: AnyPath) -> None:
    """Remove what killed processes left in a folder, and put back what they had moved aside.

    What is being written stays, by whichever process of whichever machine, since it is locked. So
    does all where there are no locks. What cannot be removed is logged.
    """
    for entry in sorted(Path(folder).iterdir()):
        match = _TEMPORARY.fullmatch(entry.name)
        if match is None:
            continue
        target = entry.with_name(match["name"] or match["aside"])
        try:
            if is_locked(target.with_name(f".{target.name}.tmp{match['owner']}.lock")):
                continue
            if match["aside"] and not os.path.lexists(target):
                os.rename(entry, target)
            else:
                _remove(entry)
        except OSError as error:
            logger.warning(
                "Cannot sweep %s, which a killed run has left: %s", entry, error
            )


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


@cache  # once a folder
def _warn_of_power_cuts(folder: Path, reason: str) -> None:
    message = "The file system of %s cannot flush folders (%s): a power cut may lose the last save"
    logger.warning(message, folder, reason)


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an exception says that the disk, a quota or the largest allowed file is full."""
    return isinstance(error, OSError) and error.errno in _DISK_FULL


def raise_disk_full(error: BaseException, path: Path) -> None:
    """Raise an OSError with the path and the free space, if an exception came of a full disk."""
    if isinstance(error, OSError) and str(error.strerror).startswith(
        "no space to write"
    ):
        return  # it says so already, perhaps of another rank's disk
    cause: BaseException | None = error if isinstance(error, Exception) else None
    while cause is not None and not is_disk_full(cause):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, OSError):
        free = shutil.disk_usage(path.parent).free
        message = f"no space to write {path}: {cause.strerror}, {free:,} bytes free"
        raise OSError(cause.errno, message) from error


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
