"""Files and folders that are the old one or the new one, whatever happens while they are written.

What is written has a temporary name in the same folder first: ``.<name>.tmp-<process>-<token>``.
When it is complete and on the disk, it is renamed. What a killed process leaves is swept later.
"""

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

AnyPath = str | os.PathLike[str]

_TEMPORARY = re.compile(r"(\..+\.tmp|(?P<aside>.+)\.old)-(?P<pid>\d+)-(?P<token>[0-9a-f]{8})")
_DISK_FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}

# Tells what this process writes from what a dead one with the same number left. In a container the
# run that died and the one that takes over often have the same number.
_TOKEN = secrets.token_hex(4)


@contextmanager
def replacing(path: AnyPath) -> Iterator[Path]:
    """A temporary path. What is there when the block ends well takes the place of ``path``.

    The rename is on the disk when the block is left. If anything fails before it, what was written
    is removed and ``path`` stays as it was. A folder in its place is moved aside first, to
    ``<name>.old-<process>-<token>``, and removed afterwards. If the process is killed in between,
    :func:`sweep` puts it back.

    Args:
        path: a file or a folder, that may be there or not. Its parent must exist.

    Raises:
        OSError: if something cannot be written. When the disk or a quota is full, the message has
            the path and the free space.
    """
    target = Path(path).absolute()
    temporary = _beside(target, f".{target.name}.tmp")
    aside = _beside(target, f"{target.name}.old")
    try:
        yield temporary
        if target.is_dir():
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


def _beside(target: Path, name: str) -> Path:
    return target.with_name(f"{name}-{os.getpid()}-{_TOKEN}")


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
        path = path.rename(_beside(path, f".{path.name}.tmp"))
    _remove(path)


def sweep(folder: AnyPath) -> None:
    """Remove what killed processes left in a folder, and put back what they had moved aside.

    What living processes write stays. Only processes of this machine can be seen, so call it while
    no other machine writes there.
    """
    for entry in sorted(Path(folder).iterdir()):
        match = _TEMPORARY.fullmatch(entry.name)
        if match is None or _is_written(int(match["pid"]), match["token"]):
            continue
        if match["aside"] and not entry.with_name(match["aside"]).exists():
            os.rename(entry, entry.with_name(match["aside"]))
        else:
            _remove(entry)


def sync_folder(folder: Path) -> None:
    """Make a rename in the folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that cannot flush folders
            raise
    finally:
        os.close(descriptor)


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an exception says that the disk, a quota or the largest allowed file is full."""
    return isinstance(error, OSError) and error.errno in _DISK_FULL


def raise_disk_full(error: BaseException, path: Path) -> None:
    """Raise an OSError with the path and the free space, if an exception came of a full disk."""
    if isinstance(error, OSError) and str(error.strerror).startswith("no space to write"):
        return  # it says so already, perhaps of another rank's disk
    cause: BaseException | None = error if isinstance(error, Exception) else None
    while cause is not None and not is_disk_full(cause):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, OSError):
        free = shutil.disk_usage(path.parent).free
        message = f"no space to write {path}: {cause.strerror}, {free:,} bytes free"
        raise OSError(cause.errno, message) from error


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _is_written(pid: int, token: str) -> bool:
    """Whether the process that chose a temporary name lives on this machine."""
    if pid == os.getpid():
        return token == _TOKEN
    try:
        with suppress(PermissionError):  # it lives, and belongs to another user
            os.kill(pid, 0)
        # "<number> (<name, which may have brackets>) <state> ..."
        status = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except ProcessLookupError:
        return False
    except OSError:  # only Linux has this file
        return True
    return status.rpartition(")")[2].split()[:1] != ["Z"]  # killed, and its parent has not noticed
