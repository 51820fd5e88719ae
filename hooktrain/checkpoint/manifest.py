"""The manifest of a folder of shards: which files it has, and how to tell whether intact."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hooktrain.checkpoint.storage import CorruptCheckpointError
from hooktrain.utils.file_io import atomic_write

__all__ = [
    "MANIFEST",
    "METADATA",
    "REST",
    "FileRecord",
    "check_digests",
    "check_sizes",
    "read_manifest",
    "record_of",
    "verify_folder",
    "write_manifest",
]

MANIFEST = "manifest.json"
METADATA = ".metadata"  # of torch.distributed.checkpoint
REST = "state.pth"  # what is no tensor
_FORMAT = 1


class FileRecord(NamedTuple):
    """What the manifest says about a file."""

    size: int
    sha256: str


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


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
