"""iopath's ``PathManager``: files by path or address, as detectron2's scripts open them."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from hooktrain.checkpoint.sources import local_path, register_scheme
from hooktrain.utils.file_io import AnyPath, on_disk


class PathHandler:
    """Finds the files of some addresses.

    A subclass defines both methods. It may also define how its files are opened, looked for and
    changed, by ``_open``, ``_exists``, ``_isfile``, ``_isdir``, ``_ls``, ``_mkdirs`` and ``_rm``,
    which are given the address. What it does not define is done with the file at the local path.
    """

    _get_local_path: Callable[..., str]

    def _get_supported_prefixes(self) -> list[str]:
        return []


# Files on the web are found without a handler.
HTTPURLHandler = OneDrivePathHandler = PathHandler


def _by_handler(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A method of PathManager: that of an address's handler, or a function of the local path."""

    def method(self: "_PathManager", path: AnyPath, *args: Any, **kwargs: Any) -> Any:
        address = os.fspath(path)
        known = [prefix for prefix in self._handlers if address.startswith(prefix)]
        longest = max(known, key=len, default="")
        handler = self._handlers.get(longest)
        own = getattr(handler, name, None)
        if own:
            return own(path, *args, **kwargs)
        changes = name in ("_mkdirs", "_rm")
        if name == "_open":
            mode = args[0] if args else kwargs.get("mode", "r")
            changes = any(letter in mode for letter in "wax+")
        if changes and handler is None:
            path = on_disk(path)
        return function(self.get_local_path(path), *args, **kwargs)

    return method


class _PathManager:
    """Finds and opens files. A process that downloads one waits for no other."""

    def __init__(self) -> None:
        self._handlers: dict[str, PathHandler] = {}

    def __call__(self) -> "_PathManager":
        """Itself: iopath's class has the name of detectron2's object."""
        return self

    def register_handler(
        self, handler: PathHandler, allow_override: bool = True
    ) -> None:
        """Take a handler for the addresses that begin with its prefixes."""
        for prefix in handler._get_supported_prefixes():
            register_scheme(prefix, handler._get_local_path)
            self._handlers[prefix] = handler

    def get_local_path(self, path: AnyPath, **kwargs: Any) -> str:
        """The path of a local file, as :func:`hooktrain.checkpoint.local_path` finds it."""
        return local_path(path, alone=True)

    open = _by_handler("_open", open)
    exists = _by_handler("_exists", os.path.exists)
    isfile = _by_handler("_isfile", os.path.isfile)
    isdir = _by_handler("_isdir", os.path.isdir)
    ls = _by_handler("_ls", os.listdir)
    mkdirs = _by_handler("_mkdirs", partial(os.makedirs, exist_ok=True))
    rm = _by_handler("_rm", os.remove)


PathManager = g_pathmgr = _PathManager()


def _of_model_zoo(address: str) -> str:
    name = address.removeprefix("detectron2://")
    return local_path(f"https://dl.fbaipublicfiles.com/detectron2/{name}", alone=True)


register_scheme("detectron2://", _of_model_zoo)
