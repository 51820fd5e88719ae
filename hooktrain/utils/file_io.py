"""Files that are either the old one or the new one, whatever happens while they are written."""

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal

_TEMPORARY = re.compile(r"\..+\.tmp-(?P<pid>\d+)-[0-9a-f]{8}")
_DISK_FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}

# What this process is writing. A pid alone does not tell: in a container the run that died and the
# one that takes over often have the same.
_in_progress: set[Path] = set()


@contextmanager
def atomic_write(
    path: str | os.PathLike[str], mode: Literal["wb", "w"] = "wb"
) -> Iterator[IO[Any]]:
    """Replace a file by a new one, all at once and durably.

    What is written goes to a temporary file in the same folder. When the block ends well, that is
    flushed to the disk and renamed to `path`, and the rename is flushed too. When anything fails
    before the rename, the temporary file is removed and `path` stays as it was.

    Example:
        >>> with atomic_write("model.pth") as file:  # doctest: +SKIP
        ...     torch.save(state, file)

    Args:
        path: the file; its folder must exist.
        mode: "wb" for bytes, "w" for text in UTF-8.

    Yields:
        The open temporary file.

    Raises:
        OSError: something could not be written. When the disk or a quota is full, the message
            holds the path and the free space, also where the writer made another exception of it
            (as `torch.save` does).
    """
    if mode not in ("wb", "w"):
        raise ValueError(f"mode must be 'wb' or 'w', got {mode!r}")
    target = Path(path).absolute()
    temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    _in_progress.add(temporary)
    try:
        with open(temporary, mode, encoding=None if mode == "wb" else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        sync_folder(target.parent)
    except BaseException as error:
        with suppress(OSError):  # the error that is under way says more; the file can be swept
            temporary.unlink(missing_ok=True)
        if isinstance(error, Exception) and (full := disk_full_error(error)) is not None:
            free = shutil.disk_usage(target.parent).free
            message = f"no space to write {target}: {os.strerror(full)}, {free:,} bytes free"
            raise OSError(full, message) from error
        raise
    finally:
        _in_progress.discard(temporary)


def is_disk_full(error: OSError) -> bool:
    """Whether an error says that the disk, a quota or the largest allowed file is full."""
    return error.errno in _DISK_FULL


def sweep_temporary_files(folder: str | os.PathLike[str]) -> list[Path]:
    """Remove what `atomic_write` left in a folder when its process was killed.

    The files of living processes stay. Whether a process lives can be seen on this machine only, so
    call it while no other machine writes there.

    Returns:
        The files that were removed, sorted.
    """
    left_over = [
        entry
        for entry in sorted(Path(folder).absolute().iterdir())
        if (match := _TEMPORARY.fullmatch(entry.name))
        and entry not in _in_progress
        and not is_another_living_process(int(match["pid"]))
    ]
    for entry in left_over:
        entry.unlink(missing_ok=True)
    return left_over


def sync_folder(folder: Path) -> None:
    """Make a rename in the folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that has no such thing
            raise
    finally:
        os.close(descriptor)


def disk_full_error(error: BaseException | None) -> int | None:
    """The errno of a full disk, from the exception or from one that it came of."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _DISK_FULL:
            return error.errno
        error = error.__cause__ or error.__context__
    return None


def is_another_living_process(pid: int) -> bool:
    """Whether a process of this machine, and not this one, has the number and has not ended.

    One that was killed keeps its number until its parent has taken notice (Linux tells them apart).
    """
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it lives, as another user
    try:
        # "<number> (<name, which may have brackets>) <state> ..."
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:  # there is no such file elsewhere
        return True
    return state[:1] != ["Z"]
