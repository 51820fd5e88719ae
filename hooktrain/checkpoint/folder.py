"""Folders that are there as a whole or not at all, with a manifest to tell whether intact."""

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from hooktrain.checkpoint.storage import CorruptCheckpointError
from hooktrain.utils.file_io import (
    _disk_full_error,
    _is_another_living_process,
    _sync_folder,
    atomic_write,
)

__all__ = [
    "MANIFEST",
    "FileRecord",
    "check_digests",
    "check_sizes",
    "commit_folder",
    "disk_full_as_oserror",
    "make_temporary_folder",
    "read_manifest",
    "record_of",
    "remove_temporary_folder",
    "sweep_temporary_folders",
    "verify_folder",
    "write_manifest",
]

MANIFEST = "manifest.json"
_FORMAT = 1
_LEFT_OVER = re.compile(r"(?P<name>.+)\.(?P<kind>tmp|old)-(?P<pid>\d+)-[0-9a-f]{8}")

# What this process is writing. A pid alone does not tell: in a container the run that died and the
# one that takes over often have the same.
_in_progress: set[Path] = set()


class FileRecord(NamedTuple):
    """What the manifest says about a file."""

    size: int
    sha256: str


def make_temporary_folder(folder: Path) -> Path:
    """Make the folder to write to, beside ``folder``, and sweep what killed runs left there.

    Raises:
        FileExistsError: if there is something at ``folder`` that is no sharded checkpoint, and so
            will not be replaced by one.
    """
    if folder.exists() and not (folder / MANIFEST).exists():
        raise FileExistsError(
            f"{folder} is there and no sharded checkpoint (it has no {MANIFEST}): it is not "
            "replaced. Remove it, or choose another name"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    sweep_temporary_folders(folder.parent)
    temporary = _beside(folder, "tmp")
    temporary.mkdir()
    _in_progress.add(temporary)
    return temporary


def remove_temporary_folder(temporary: Path) -> None:
    """Give up what was written; what cannot be removed now is swept later."""
    shutil.rmtree(temporary, ignore_errors=True)
    _in_progress.discard(temporary)


def commit_folder(temporary: Path, folder: Path) -> None:
    """Let a temporary folder, whose files are on the disk, take its final name, durably.

    An older folder of that name is moved aside first and removed at last. Killed between, the older
    one is put back by the next sweep.
    """
    old = _beside(folder, "old") if folder.exists() else None
    if old is not None:
        os.rename(folder, old)
    try:
        os.rename(temporary, folder)
    except OSError:
        if old is not None:
            os.rename(old, folder)
        raise
    _in_progress.discard(temporary)
    _sync_folder(folder.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def sweep_temporary_folders(parent: str | os.PathLike[str]) -> list[Path]:
    """Remove what killed processes left of folders, or put back what they had moved aside.

    Those of living processes stay. Whether a process lives can be seen on this machine only, so
    call it while no other machine writes there.

    Returns:
        The left over folders, sorted; none of them is there any more.
    """
    left_over = []
    for entry in sorted(Path(parent).absolute().iterdir()):
        match = _LEFT_OVER.fullmatch(entry.name)
        if match is None or entry in _in_progress or _is_another_living_process(int(match["pid"])):
            continue
        left_over.append(entry)
        final = entry.with_name(match["name"])
        if match["kind"] == "old" and not final.exists():
            os.rename(entry, final)
        else:
            shutil.rmtree(entry)
    return left_over


def record_of(path: Path) -> FileRecord:
    """The size and digest of a file (sha256, 1 to 2 GB/s)."""
    digest, size = hashlib.sha256(), 0
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
            size += len(chunk)
    return FileRecord(size, digest.hexdigest())


def write_manifest(folder: Path, files: Mapping[str, FileRecord], **more: Any) -> None:
    """Write the manifest, durably and with the names of all files before it.

    Args:
        folder: where the files lie.
        files: of the folder, by name, each on the disk already.
        more: entries of plain types to keep in it.
    """
    records = {name: record._asdict() for name, record in sorted(files.items())}
    content = {"format": _FORMAT, **more, "files": records}
    with atomic_write(folder / MANIFEST, "w") as file:
        json.dump({"sha256": _digest(content), "content": content}, file, indent=1)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The content of the manifest, with a :class:`FileRecord` for each of ``"files"``.

    Raises:
        FileNotFoundError: if there is no such folder.
        CorruptCheckpointError: if it has no manifest, or a broken one.
    """
    path = folder / MANIFEST
    try:
        document = json.loads(path.read_bytes())
        content: dict[str, Any] = document["content"]
        if document["sha256"] != _digest(content):
            raise CorruptCheckpointError(f"{path} is not intact: its digest does not match")
        if content["format"] != _FORMAT:
            raise CorruptCheckpointError(
                f"{path} has the format {content['format']!r}; this version reads {_FORMAT}"
            )
        content["files"] = {name: FileRecord(**item) for name, item in content["files"].items()}
    except (FileNotFoundError, NotADirectoryError) as error:
        if not folder.exists():
            raise FileNotFoundError(f"there is no checkpoint {str(folder)!r}") from error
        raise CorruptCheckpointError(
            f"{folder} is no sharded checkpoint: it has no {MANIFEST}"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(f"{path} is not readable: {error!r}") from error
    return content


def verify_folder(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Read all files of a sharded checkpoint and compare them with its manifest.

    Returns:
        The manifest: its ``"format"``, ``"world_size"``, ``"torch"`` and ``"files"``.

    Raises:
        CorruptCheckpointError: naming the first file that is missing, truncated or altered.
        FileNotFoundError: if there is no such folder; other ``OSError`` if it cannot be read.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    check_sizes(folder, manifest["files"])
    check_digests(folder, manifest["files"])
    return manifest


def check_sizes(folder: Path, files: Mapping[str, FileRecord]) -> None:
    """Check that the files are there, and as long as they should be.

    Raises:
        CorruptCheckpointError: naming the first that is not.
    """
    for name, record in files.items():
        path = folder / name
        if name != os.path.basename(name) or not path.is_file():
            raise CorruptCheckpointError(f"{path} is missing")
        size = path.stat().st_size
        if size != record.size:
            raise CorruptCheckpointError(f"{path} has {size:,} bytes instead of {record.size:,}")


def check_digests(folder: Path, files: Mapping[str, FileRecord]) -> None:
    """Read the files, and check that they are what was written.

    Raises:
        CorruptCheckpointError: naming the first that is not.
    """
    for name, record in files.items():
        if record_of(folder / name) != record:
            raise CorruptCheckpointError(
                f"{folder / name} was altered: its sha256 is not that of the manifest"
            )


def disk_full_as_oserror(write: Callable[[], Any], folder: Path) -> Any:
    """Call ``write``; what torch made of a full disk becomes an OSError again.

    Raises:
        OSError: with the folder and the free space, if the disk or a quota is full.
    """
    try:
        return write()
    except Exception as error:
        full = _disk_full_error(error)
        if full is None:
            raise
        free = -1
        with suppress(OSError):
            free = shutil.disk_usage(folder.parent).free
        message = f"no space to write {folder}: {os.strerror(full)}, {free:,} bytes free"
        raise OSError(full, message) from error


def _beside(folder: Path, kind: str) -> Path:
    return folder.with_name(f"{folder.name}.{kind}-{os.getpid()}-{secrets.token_hex(4)}")


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
