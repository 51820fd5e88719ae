"""Local files for addresses such as ``https://...`` and ``s3://...``."""

import hashlib
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import torch

from hooktrain.checkpoint.files import verify_file
from hooktrain.utils import comm
from hooktrain.utils.comm import on_all_ranks
from hooktrain.utils.file_io import AnyPath, is_address, replacing

logger = logging.getLogger(__name__)

# torch.hub's names, such as resnet18-f37072fd.pth, have the first digits of the SHA-256. Decimal
# digits alone are a date, as in model-20240101.pth.
_DIGEST = re.compile(r"-(?!\d+\.)([0-9a-f]{8,64})\.")

# Takes an address and returns the path of a local file.
Loader = Callable[[str], AnyPath]

_loaders: dict[str, Loader] = {}


def register_scheme(prefix: str, loader: Loader) -> None:
    """Register a loader, which turns addresses that begin with a prefix into local files.

    If an address begins with several prefixes, the longest counts. A loader replaces an earlier
    one of the same prefix.

    Example::

        register_scheme("zoo://", lambda address: address.replace("zoo://", "/data/zoo/"))
        Checkpointer(model).load("zoo://resnet18.pth")

    Args:
        prefix: the prefix, such as ``"zoo://"``.
        loader: takes an address and returns the path of a local file. It is called in one process
            per machine.
    """
    _loaders[prefix] = loader


def local_path(address: AnyPath, *, alone: bool = False) -> str:
    """The path of a local file for an address, which is downloaded if necessary.

    A file is downloaded into torch.hub's folder: from ``http://`` and ``https://`` once, and from
    all other schemes that fsspec knows, such as ``s3://``, again if it has changed there. It gets
    its name in that folder once it is complete and verified: a ``.pth`` file by its own checksums,
    a ``.safetensors`` file by its structure, and any file from a web server by the digest in its
    name, if there is one. Nothing is deleted: you may empty that folder at any time.

    Loaders of :func:`register_scheme` take precedence. Anything else is a path, which is returned
    unchecked.

    Collective, unless it is a path: one process of each machine fetches, and the others wait.

    Args:
        address: the path or address.
        alone: whether this process fetches by itself, without the other ranks.

    Raises:
        ValueError: if its scheme is unknown.
        ImportError: if a package for the scheme is not installed; the message names it.
        OSError: on every rank, if the file cannot be downloaded.
        CorruptCheckpointError: on every rank, if a ``.pth`` file is broken or truncated.
        RuntimeError: on every rank, if the file does not match the digest in its name.
    """
    address = os.fspath(address)
    if not is_address(address):
        return os.path.expanduser(address)
    longest = max(filter(address.startswith, _loaders), key=len, default="")
    loader = _loaders.get(longest, _download)
    if alone:
        return os.fspath(loader(address))
    local_rank = comm.get_local_rank()

    def fetch() -> str:
        if local_rank > 0:
            return ""
        return os.fspath(loader(address))

    paths = on_all_ranks(fetch)
    # The ranks of a machine are consecutive.
    return paths[comm.get_rank() - local_rank]


def _download(address: str) -> str:
    """Download a file, or find an earlier download."""
    is_web = address.startswith(("http://", "https://"))
    if is_web:  # fsspec would need aiohttp for this, which does not come with torch
        name, version = Path(urlsplit(address).path).name or "download", ""
    else:
        import fsspec

        system, remote = fsspec.url_to_fs(address)
        name, version = Path(remote).name, system.ukey(remote)
    folder = Path(torch.hub.get_dir(), "checkpoints")
    digest = _DIGEST.search(name)
    if digest is None:
        # The files of two addresses may have one name, and a file may be replaced by another.
        key = hashlib.sha256(f"{address}{version}".encode()).hexdigest()
        folder = folder / key[:16]
    path = folder / name
    if path.exists():
        return str(path)
    logger.info("Downloading %s to %s", address, path)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        if is_web:
            expected = digest and digest[1]
            torch.hub.download_url_to_file(address, str(temporary), expected, False)
        else:
            system.get_file(remote, str(temporary))
        if path.suffix in (".pth", ".safetensors"):
            verify_file(temporary)
    return str(path)
