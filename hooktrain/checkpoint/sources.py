"""Local files for addresses such as ``https://...`` and ``s3://...``."""

import hashlib
import logging
import os
import re
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import torch

from hooktrain.checkpoint.files import CorruptCheckpointError, verify_file
from hooktrain.utils import comm
from hooktrain.utils.comm import on_all_ranks
from hooktrain.utils.file_io import AnyPath, atomic_write, is_address

logger = logging.getLogger(__name__)

# As torch.hub names files: resnet18-f37072fd.pth, with the first digits of the SHA-256. Decimal
# digits alone are the date in model-20240101.pth.
_DIGEST = re.compile(r"-(?!\d+\.)([0-9a-f]{8,64})\.")
_HTTP = ("http://", "https://")
_HTTP_TIMEOUT_S = 60.0  # in which a server has to answer
_CHUNK_BYTES = 16 << 20

Loader = Callable[[str], AnyPath]
"""Takes an address and returns the path of a local file."""

_loaders: dict[str, Loader] = {}


def register_scheme(prefix: str, loader: Loader) -> None:
    """Say how addresses that begin with a prefix become local files.

    Of several prefixes that an address begins with, the longest counts, and of two equal ones the
    later.

    Example::

        register_scheme("zoo://", lambda address: address.replace("zoo://", "/data/zoo/"))
        Checkpointer(model).load("zoo://resnet18.pth")

    Args:
        prefix: such as ``"zoo://"``.
        loader: takes an address and returns the path of a local file. It is called in one process
            a machine.
    """
    _loaders[prefix] = loader


def local_path(address: AnyPath, *, alone: bool = False) -> str:
    """The path of a local file for an address, which is downloaded if that is necessary.

    A file is downloaded into torch.hub's folder: from ``http://`` and ``https://`` once, and from
    all other schemes that fsspec knows, such as ``s3://``, again when it has changed there. It
    gets its name in that folder when it is complete and verified: by the digest in its name, if
    there is one, and by its own checksums, if it is a ``.pth`` file. Loaders of
    :func:`register_scheme` go first. Anything else is a path, which is not looked at here.
    Nothing is deleted: you may empty that folder at any time.

    Collective, unless it is a path: one process of each machine fetches, and the others wait.

    Args:
        address: the path or address.
        alone: this process fetches, whatever the others do.

    Raises:
        ValueError: if its scheme is unknown.
        ImportError: if a package for it is not installed; it says which.
        OSError: on every rank, if the file cannot be downloaded, or ends too early.
        CorruptCheckpointError: on every rank, if it is broken, or does not have the digest that
            its name tells.
    """
    address = os.fspath(address)
    if not is_address(address):
        return os.path.expanduser(address)
    longest = max(filter(address.startswith, _loaders), key=len, default="")
    loader = _loaders.get(longest, _download)
    if alone or comm.get_world_size() == 1:
        return os.fspath(loader(address))
    local_rank = comm.get_local_rank()

    def fetch() -> str:
        if local_rank > 0:
            return ""
        return os.fspath(loader(address))

    paths = on_all_ranks(fetch)
    # The ranks of a machine follow one another.
    return paths[comm.get_rank() - local_rank]


def _download(address: str) -> str:
    """Download a file, or find an earlier download."""
    name, version = _identify(address)
    folder = Path(torch.hub.get_dir(), "checkpoints")
    expected = _DIGEST.search(name)
    if expected is None:
        # The files of two addresses may have one name, and a file may be replaced by another.
        key = hashlib.sha256(f"{address}{version}".encode()).hexdigest()
        folder = folder / key[:16]
    path = folder / name
    if path.exists():
        return str(path)
    logger.info("Downloading %s to %s", address, path)
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        digest = copy_remote(address, file)
        if expected and not digest.startswith(expected[1]):
            raise CorruptCheckpointError(f"the SHA-256 of {address} is {digest}")
        if path.suffix == ".pth":
            file.flush()
            verify_file(file.name)
    return str(path)


def _identify(address: str) -> tuple[str, str]:
    """The name of a remote file, and its version in a store."""
    if address.startswith(_HTTP):
        return Path(urlsplit(address).path).name or "download", ""
    import fsspec

    system, path = fsspec.url_to_fs(address)
    return Path(path).name, system.ukey(path)


def copy_remote(address: str, target: IO[bytes]) -> str:
    """Write a remote file to an open local one, and return its SHA-256."""
    digest = hashlib.sha256()
    try:
        with _open(address) as source:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                target.write(chunk)
    except HTTPException as error:
        raise OSError(f"the download of {address} failed: {error!r}") from error
    # An answer of a web server knows how many bytes are still to come.
    if getattr(source, "length", None):
        raise OSError(f"{address} has ended {source.length} bytes too early")
    return digest.hexdigest()


def _open(address: str) -> Any:
    """A remote file, open for reading."""
    if address.startswith(_HTTP):
        # For these fsspec would need aiohttp, which does not come with torch.
        request = Request(address, headers={"User-Agent": "hooktrain"})
        return urlopen(request, timeout=_HTTP_TIMEOUT_S)
    import fsspec

    system, path = fsspec.url_to_fs(address)
    return system.open(path, "rb", block_size=_CHUNK_BYTES)
