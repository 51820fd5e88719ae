"""Local files for addresses such as ``https://...`` and ``s3://...``."""

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import torch

from hooktrain.utils import comm
from hooktrain.utils.comm import on_all_ranks
from hooktrain.utils.file_io import AnyPath, is_address

# As torch.hub names files: resnet18-f37072fd.pth, with the first digits of the SHA-256. Decimal
# digits alone are the date in model-20240101.pth.
_DIGEST = re.compile(r"-(?!\d+\.)([0-9a-f]{8,64})\.")

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
    """The path of a local file for an address; fetched, if it has to be.

    Files are downloaded into torch.hub's folder: ``http://`` and ``https://`` once, by
    :mod:`torch.hub`, and all schemes that fsspec knows, such as ``s3://``, again when they have
    changed. What was added by :func:`register_scheme` goes first. Anything else is a path, which
    is not looked at here.

    Collective, unless it is a path: one process of each machine fetches, and the others wait.

    Args:
        address: the path or address.
        alone: this process fetches, whatever the others do.

    Raises:
        ValueError: if it begins with a scheme that nobody knows.
        ImportError: if a package for it is not installed; it says which.
        OSError: on every rank, if the file cannot be fetched.
        RuntimeError: on every rank, if it does not have the digest that its name tells.
    """
    address = os.fspath(address)
    if not is_address(address):
        return os.path.expanduser(address)
    known = [prefix for prefix in _loaders if address.startswith(prefix)]
    longest = max(known, key=len, default="")
    loader = _loaders.get(longest, _by_fsspec)
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


def _by_torch(url: str) -> str:
    """Download by HTTP, or find what was downloaded before."""
    name = Path(urlsplit(url).path).name
    path = Path(torch.hub.get_dir(), "checkpoints", name)
    digest = _DIGEST.search(name)
    if digest is None:
        # The files of two addresses may have one name, which torch.hub takes for the same.
        of_url = hashlib.sha256(url.encode()).hexdigest()
        path = path.parent / of_url[:16] / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        expected = digest[1] if digest else None
        torch.hub.download_url_to_file(url, str(path), expected, progress=False)
    return str(path)


def _by_fsspec(address: str) -> str:
    import fsspec

    folder = os.path.join(torch.hub.get_dir(), "fsspec")
    options = {"cache_storage": folder, "check_files": True}
    path: str = fsspec.open_local(f"filecache::{address}", filecache=options)
    return path


register_scheme("http", _by_torch)  # and https
