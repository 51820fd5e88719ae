"""Where checkpoints come from: paths, and addresses such as ``https://...``, by their scheme."""

import hashlib
import importlib
import logging
import os
import re
from collections.abc import Callable, Sequence
from http.client import HTTPException
from typing import Any, TypeVar, overload
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import torch

from hooktrain.checkpoint.agreement import on_all_ranks
from hooktrain.checkpoint.storage import CorruptCheckpointError
from hooktrain.utils import comm
from hooktrain.utils.file_io import atomic_write

__all__ = ["Loader", "check_digest", "digest_in_name", "local_path", "register_scheme"]

logger = logging.getLogger(__name__)

Loader = Callable[[str], str | os.PathLike[str]]
"""Takes an address, and returns the path of a local file."""

L = TypeVar("L", bound=Loader)

_loaders: dict[str, Loader] = {}

_DIGEST = re.compile(r"-([0-9a-f]{8,64})\.")
_CHUNK_BYTES = 1 << 20
_TIMEOUT_SECONDS = 60.0


@overload
def register_scheme(prefixes: str | Sequence[str], loader: L, *, force: bool = False) -> L: ...


@overload
def register_scheme(prefixes: str | Sequence[str], *, force: bool = False) -> Callable[[L], L]: ...


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

    Raises:
        KeyError: if a prefix has a loader; nothing was registered.
        ValueError: if a prefix is empty, as paths would have it too.
    """
    if loader is None:
        return lambda decorated: register_scheme(prefixes, decorated, force=force)
    prefixes = [prefixes] if isinstance(prefixes, str) else list(prefixes)
    if not prefixes or "" in prefixes:
        raise ValueError(f"prefixes must be such as 's3://', but got {prefixes!r}")
    taken = [prefix for prefix in prefixes if prefix in _loaders]
    if taken and not force:
        raise KeyError(f"{taken} have a loader already; to replace it, give force=True")
    _loaders.update(dict.fromkeys(prefixes, loader))
    return loader


def local_path(address: str | os.PathLike[str]) -> str:
    """The path of a local file for an address; fetched, if it has to be.

    ``http://`` and ``https://`` are downloaded into torch.hub's folder, once.
    ``torchvision://resnet18`` are the default weights of a model of torchvision, if that is
    installed, and ``torchvision://resnet18.imagenet1k_v1`` certain ones. More can be added by
    :func:`register_scheme`. Anything else is a path, which is not looked at here.

    For all ranks to call, unless it is a path: one process of each machine fetches, and the others
    wait for it.

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
            raise ValueError(
                f"nothing is registered to load {address!r}: known are {sorted(_loaders)}, and "
                f"register_scheme({scheme[0]!r}, loader) adds one"
            )
        return os.path.expanduser(address)
    loader = _loaders[max(known, key=len)]
    if comm.get_world_size() == 1:
        return os.fspath(loader(address))
    local_rank = comm.get_local_rank()
    path = on_all_ranks(lambda: "" if local_rank else os.fspath(loader(address)))
    # The ranks of a machine follow one another.
    return comm.all_gather(path)[comm.get_rank() - local_rank]


def digest_in_name(path: str | os.PathLike[str]) -> str | None:
    """The digest in a file name such as ``resnet18-f37072fd.pth``, if there is one.

    That is what torch.hub and MMEngine write: after a dash and before a dot, at least eight
    hexadecimal digits, the first ones of the file's SHA-256. Decimal digits alone, as one digest in
    43 has them, do not count: they are the date in ``model-20240101.pth``.
    """
    match = _DIGEST.search(os.path.basename(path))
    return match[1] if match and not match[1].isdecimal() else None


def check_digest(path: str | os.PathLike[str]) -> None:
    """Compare a file with the digest in its name; nothing happens if there is none.

    Raises:
        CorruptCheckpointError: if it is another.
    """
    if expected := digest_in_name(path):
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
        _compare_digests(expected, digest.hexdigest(), os.fspath(path))


def _compare_digests(expected: str, found: str, path: str) -> None:
    if not found.startswith(expected):
        raise CorruptCheckpointError(
            f"{path} is not what its name tells: the SHA-256 should begin with {expected}, and is "
            f"{found}. Remove the file, if it is a broken download; rename it, if that is no digest"
        )


@register_scheme(["http://", "https://"])
def _download(url: str) -> str:
    """Download a file, or find it where an earlier download has left it."""
    name = os.path.basename(urlsplit(url).path)
    if name in ("", ".", ".."):
        raise ValueError(f"the address must end with the name of a file: {url!r}")
    folder = os.path.join(torch.hub.get_dir(), "checkpoints")
    if not digest_in_name(name):
        # The files of two addresses may have one name, and torch.hub does not tell them apart.
        folder = os.path.join(folder, hashlib.sha256(url.encode()).hexdigest()[:16])
    path = os.path.join(folder, name)
    if os.path.exists(path):
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
    """Download to ``path``; as long as that is not complete and checked, there is no such file."""
    digest = hashlib.sha256()
    request = Request(url, headers={"User-Agent": "hooktrain"})  # some hosts refuse urllib's own
    with urlopen(request, timeout=_TIMEOUT_SECONDS) as response, atomic_write(path) as file:
        while chunk := response.read(_CHUNK_BYTES):
            file.write(chunk)
            digest.update(chunk)
        # A connection that is cut ends the data, and raises nothing.
        expected, received = response.headers["Content-Length"], file.tell()
        if expected is not None and received != int(expected):
            raise ConnectionError(f"received {received:,} of {int(expected):,} bytes")
        if name_digest := digest_in_name(path):
            _compare_digests(name_digest, digest.hexdigest(), url)


@register_scheme("torchvision://")
def _from_torchvision(address: str) -> str:
    """Download weights of torchvision: ``torchvision://<model>`` or ``...<model>.<weights>``."""
    name, _, version = address.removeprefix("torchvision://").partition(".")
    try:
        models = importlib.import_module("torchvision.models")
    except ImportError as error:
        raise ImportError(f"{address!r} needs torchvision: pip install torchvision") from error
    weights = models.get_model_weights(name)
    try:
        url = weights[version.upper() or "DEFAULT"].url
    except KeyError:
        known = [f"{name}.{known.name.lower()}" for known in weights]
        raise ValueError(f"torchvision has no {version!r} of {name!r}, only {known}") from None
    return _download(url)
