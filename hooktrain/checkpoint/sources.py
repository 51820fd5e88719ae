"""Where checkpoints come from: paths, and addresses such as ``https://...``, by their scheme."""

import hashlib
import importlib
import logging
import os
import re
from collections.abc import Callable, Sequence
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import torch

from hooktrain.checkpoint.files import CorruptCheckpointError, verify_file
from hooktrain.utils import comm
from hooktrain.utils.comm import on_all_ranks
from hooktrain.utils.file_io import AnyPath, atomic_write, is_address, sweep
from hooktrain.utils.logger import show_progress

logger = logging.getLogger(__name__)

Loader = Callable[[str], AnyPath]
"""Takes an address, and returns the path of a local file."""

_loaders: dict[str, Loader] = {}

# As torch.hub and MMEngine name files: resnet18-f37072fd.pth, with the first digits of the SHA-256.
# Decimal digits alone are the date in model-20240101.pth.
_DIGEST = re.compile(r"-(?!\d+\.)([0-9a-f]{8,64})\.")
_HTTP = ("http://", "https://")
# How files of torch.save are named. Others, such as .json, are not looked into.
_TORCH_FILES = (".pth", ".pt", ".ckpt", ".bin", ".pyth")
_CHUNK_BYTES = 1 << 24  # each is a request to a store such as s3
_TIMEOUT_SECONDS = 60.0


def register_scheme(
    prefixes: str | Sequence[str], loader: Any = None, *, force: bool = False
) -> Any:
    """Say how addresses that begin with a prefix become local files; also as a decorator.

    Of several prefixes that an address begins with, the longest counts.

    Example::

        @register_scheme("zoo://")
        def from_zoo(address: str) -> str:
            return os.path.join("/data/zoo", address.removeprefix("zoo://"))

        Checkpointer(model).load("zoo://resnet18.pth")

    Args:
        prefixes: one or several, such as ``"zoo://"``.
        loader: takes an address and returns the path of a local file. It is called in one process
            a machine.
        force: replace the loader that a prefix has, instead of refusing.

    Returns:
        The loader.

    Raises:
        KeyError: if a prefix has a loader; nothing was registered.
    """
    if loader is None:
        return lambda decorated: register_scheme(prefixes, decorated, force=force)
    prefixes = [prefixes] if isinstance(prefixes, str) else list(prefixes)
    taken = [prefix for prefix in prefixes if prefix in _loaders]
    if taken and not force:
        raise KeyError(f"{taken} have a loader already; to replace it, give force=True")
    _loaders.update(dict.fromkeys(prefixes, loader))
    return loader


def local_path(address: AnyPath, *, alone: bool = False) -> str:
    """The path of a local file for an address; fetched, if it has to be.

    Files are downloaded into torch.hub's folder: once, unless one is broken there. What is at
    ``http://`` and ``https://`` is taken to stay as it is. All other schemes that fsspec knows,
    such as ``s3://``, need the package for it (s3fs), and are downloaded again when they change.
    ``torchvision://resnet18`` are the default weights of a model of torchvision, if that is
    installed, and ``torchvision://resnet18.imagenet1k_v1`` certain ones. What was added by
    :func:`register_scheme` goes first. Anything else is a path, which is not looked at here.

    Collective, unless it is a path: one process of each machine fetches, and the others wait.

    Args:
        address: the path or address.
        alone: this process fetches, whatever the others do.

    Raises:
        ValueError: if it begins with a scheme that nobody knows.
        ImportError: if a package for it is not installed; it says which.
        OSError: on every rank, if the file cannot be fetched, or is a folder.
        CorruptCheckpointError: on every rank, if what was fetched does not have the digest that
            its name tells.
    """
    address = os.fspath(address)
    known = [prefix for prefix in _loaders if address.startswith(prefix)]
    if not known and not is_address(address):
        return os.path.expanduser(address)
    loader = _loaders[max(known, key=len)] if known else _download
    if alone:
        return os.fspath(loader(address))
    local_rank = comm.get_local_rank() if comm.get_world_size() > 1 else 0
    paths = on_all_ranks(lambda: "" if local_rank else os.fspath(loader(address)))
    # The ranks of a machine follow one another.
    return paths[comm.get_rank() - local_rank]


def _download(url: str) -> str:
    """Download a file, or find it where an earlier download has left it."""
    try:
        return _find_or_fetch(url)
    except (CorruptCheckpointError, ImportError, ValueError):  # these say what is wrong
        raise
    except Exception as error:  # the packages of stores have classes of their own
        if isinstance(error, HTTPError):
            error.close()
        is_missing = isinstance(error, FileNotFoundError) or getattr(
            error, "code", 0
        ) in (404, 410)
        kind = FileNotFoundError if is_missing else OSError
        raise kind(f"cannot download {url}: {type(error).__name__}: {error}") from error


def _find_or_fetch(url: str) -> str:
    name, version = os.path.basename(urlsplit(url).path or url), ""
    if name in ("", ".", ".."):
        raise ValueError(f"the address must end with the name of a file: {url!r}")
    if not url.startswith(_HTTP):
        remote = _open(url)
        info = remote.fs.info(remote.path)
        if info["type"] == "directory":
            raise IsADirectoryError("it is a folder; copy it to a disk and load that")
        version = str(info)  # a file there may be replaced by another one
    folder = os.path.join(torch.hub.get_dir(), "checkpoints")
    if not _DIGEST.search(name):
        # The files of two addresses may have one name, and torch.hub does not tell them apart.
        folder = os.path.join(
            folder, hashlib.sha256((url + version).encode()).hexdigest()[:16]
        )
    path = os.path.join(folder, name)
    if os.path.exists(path):
        try:
            if name.endswith(_TORCH_FILES):
                verify_file(path)
            logger.info("Using %s, downloaded earlier from %s", path, url)
            return path
        except CorruptCheckpointError as error:
            logger.warning("Downloading again: %s", error)
    os.makedirs(folder, exist_ok=True)
    sweep(folder)  # what killed downloads have left
    logger.info("Downloading %s to %s", url, path)
    _write_download(url, path)
    return path


def _open(url: str) -> Any:
    """A remote file, for a with statement. It has a ``length`` (HTTP) or a ``size``, if known."""
    if url.startswith(_HTTP):  # for which fsspec needs aiohttp
        request = Request(
            url, headers={"User-Agent": "hooktrain"}
        )  # some refuse urllib's own
        return urlopen(request, timeout=_TIMEOUT_SECONDS)
    import fsspec

    return fsspec.open(url)


def _write_download(url: str, path: str) -> None:
    """Download to ``path``. There is no such file before it is complete and checked."""
    digest = hashlib.sha256()
    with _open(url) as source, atomic_write(path) as file:
        size = getattr(source, "size", None) or getattr(source, "length", None) or 0
        while chunk := source.read(_CHUNK_BYTES):
            file.write(chunk)
            digest.update(chunk)
            show_progress("Downloading MiB", file.tell() >> 20, size >> 20)
        # A connection that is cut ends the data, and raises nothing.
        if size and file.tell() != size:
            raise ConnectionError(f"received {file.tell():,} of {size:,} bytes")
        named = _DIGEST.search(os.path.basename(path))
        if named and not digest.hexdigest().startswith(named[1]):
            problem = f"should begin with {named[1]}, and is {digest.hexdigest()}"
            raise CorruptCheckpointError(
                f"{url} is not what its name says: its SHA-256 {problem}"
            )


def _from_torchvision(address: str) -> str:
    """Download weights of torchvision: ``torchvision://<model>`` or ``...<model>.<weights>``."""
    name, _, version = address.removeprefix("torchvision://").partition(".")
    weights = importlib.import_module("torchvision.models").get_model_weights(name)
    return _download(weights[version.upper() or "DEFAULT"].url)


register_scheme("torchvision://", _from_torchvision)
