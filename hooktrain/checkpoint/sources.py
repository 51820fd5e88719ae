"""Where checkpoints come from: paths, and addresses such as ``https://...``, by their scheme."""

import hashlib
import importlib
import logging
import os
import re
from collections.abc import Callable, Sequence
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import torch

from hooktrain.checkpoint.agreement import on_all_ranks
from hooktrain.checkpoint.files import CorruptCheckpointError, verify_file
from hooktrain.utils import comm
from hooktrain.utils.file_io import AnyPath, atomic_write
from hooktrain.utils.logger import show_progress

logger = logging.getLogger(__name__)

Loader = Callable[[str], AnyPath]
"""Takes an address, and returns the path of a local file."""

_loaders: dict[str, Loader] = {}

# As torch.hub and MMEngine name files: resnet18-f37072fd.pth, with the first digits of the SHA-256.
# Decimal digits alone are the date in model-20240101.pth.
_DIGEST = re.compile(r"-(?!\d+\.)([0-9a-f]{8,64})\.")
_CHUNK_BYTES = 1 << 20
_TIMEOUT_SECONDS = 60.0


def register_scheme(
    prefixes: str | Sequence[str], loader: Any = None, *, force: bool = False
) -> Any:
    """Say how addresses that begin with a prefix become local files; also as a decorator.

    Of several prefixes that an address begins with, the longest counts.

    Example::

        @register_scheme("s3://")
        def from_s3(address: str) -> str:
            path = os.path.join("/tmp", os.path.basename(address))
            ...  # download, if it is not there
            return path

        Checkpointer(model).load("s3://bucket/model.pth")

    Args:
        prefixes: one or several, such as ``"s3://"``.
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

    ``http://`` and ``https://`` are downloaded into torch.hub's folder: once, unless it is broken.
    ``torchvision://resnet18`` are the default weights of a model of torchvision, if that is
    installed, and ``torchvision://resnet18.imagenet1k_v1`` certain ones. More can be added by
    :func:`register_scheme`. Anything else is a path, which is not looked at here.

    Collective, unless it is a path: one process of each machine fetches, and the others wait.

    Args:
        address: the path or address.
        alone: this process fetches, whatever the others do.

    Raises:
        ValueError: if it begins with a scheme that nobody has registered.
        OSError: on every rank, if the file cannot be fetched.
        CorruptCheckpointError: on every rank, if what was fetched does not have the digest that
            its name tells.
    """
    address = os.fspath(address)
    known = [prefix for prefix in _loaders if address.startswith(prefix)]
    if not known:
        if scheme := re.match(r"[\w+.-]+://", address):
            advice = f"use register_scheme({scheme[0]!r}, loader); known are {sorted(_loaders)}"
            raise ValueError(f"nothing is registered to load {address!r}: {advice}")
        return os.path.expanduser(address)
    loader = _loaders[max(known, key=len)]
    if alone:
        return os.fspath(loader(address))
    local_rank = comm.get_local_rank() if comm.get_world_size() > 1 else 0
    paths = on_all_ranks(lambda: "" if local_rank else os.fspath(loader(address)))
    # The ranks of a machine follow one another.
    return paths[comm.get_rank() - local_rank]


def _download(url: str) -> str:
    """Download a file, or find it where an earlier download has left it."""
    name = os.path.basename(urlsplit(url).path)
    if name in ("", ".", ".."):
        raise ValueError(f"the address must end with the name of a file: {url!r}")
    folder = os.path.join(torch.hub.get_dir(), "checkpoints")
    if not _DIGEST.search(name):
        # The files of two addresses may have one name, and torch.hub does not tell them apart.
        folder = os.path.join(folder, hashlib.sha256(url.encode()).hexdigest()[:16])
    path = os.path.join(folder, name)
    if os.path.exists(path):
        try:
            verify_file(path)
        except CorruptCheckpointError as error:
            logger.warning("Downloading again: %s", error)
        else:
            logger.info("Using %s, downloaded earlier from %s", path, url)
            return path
    os.makedirs(folder, exist_ok=True)
    logger.info("Downloading %s to %s", url, path)
    try:
        _write_download(url, path)
    except HTTPError as error:
        error.close()
        kind = FileNotFoundError if error.code in (404, 410) else OSError
        raise kind(f"cannot download {url}: {error}") from error
    except (URLError, HTTPException, ConnectionError, TimeoutError) as error:
        raise OSError(f"cannot download {url}: {type(error).__name__}: {error}") from error
    return path


def _write_download(url: str, path: str) -> None:
    """Download to ``path``. There is no such file before it is complete and checked."""
    digest = hashlib.sha256()
    request = Request(url, headers={"User-Agent": "hooktrain"})  # some hosts refuse urllib's own
    with urlopen(request, timeout=_TIMEOUT_SECONDS) as response, atomic_write(path) as file:
        expected = response.headers["Content-Length"]
        while chunk := response.read(_CHUNK_BYTES):
            file.write(chunk)
            digest.update(chunk)
            show_progress("Downloading MiB", file.tell() >> 20, int(expected or 0) >> 20)
        # A connection that is cut ends the data, and raises nothing.
        received = file.tell()
        if expected is not None and received != int(expected):
            raise ConnectionError(f"received {received:,} of {int(expected):,} bytes")
        named = _DIGEST.search(os.path.basename(path))
        if named and not digest.hexdigest().startswith(named[1]):
            problem = f"should begin with {named[1]}, and is {digest.hexdigest()}"
            raise CorruptCheckpointError(f"{url} is not what its name says: its SHA-256 {problem}")


def _from_torchvision(address: str) -> str:
    """Download weights of torchvision: ``torchvision://<model>`` or ``...<model>.<weights>``."""
    name, _, version = address.removeprefix("torchvision://").partition(".")
    weights = importlib.import_module("torchvision.models").get_model_weights(name)
    return _download(weights[version.upper() or "DEFAULT"].url)


register_scheme(["http://", "https://"], _download)
register_scheme("torchvision://", _from_torchvision)
