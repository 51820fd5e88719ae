"""iopath's ``PathManager``: files by path or address, as detectron2's scripts open them."""

import logging
import os
import shutil
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

from hooktrain.checkpoint.sources import local_path, register_scheme
from hooktrain.utils.file_io import AnyPath, on_disk

logger = logging.getLogger(__name__)


class PathHandler:
    """Finds the files for addresses with certain prefixes.

    A subclass defines ``_get_supported_prefixes`` and ``_get_local_path``. It may also define
    ``_open``, ``_opent``, ``_exists``, ``_isfile``, ``_isdir``, ``_ls``, ``_mkdirs``, ``_rm``,
    ``_copy``, ``_copy_from_local``, ``_mv`` and ``_symlink``, which get the address. An operation
    that it does not define is applied to the file at the local path.
    """

    _strict_kwargs_check = True
    _get_local_path: Callable[..., str]

    def _get_supported_prefixes(self) -> list[str]:
        return []

    def _check_kwargs(self, kwargs: dict[str, Any]) -> None:
        """Refuse unknown arguments of a method, unless checking is switched off."""
        if kwargs and self._strict_kwargs_check:
            raise ValueError(f"{type(self).__name__} does not take {kwargs!r}")


# Files on the web and on a disk are found without a handler.
HTTPURLHandler = OneDrivePathHandler = NativePathHandler = PathHandler


def _opent(path: str, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(f"no handler has an _opent to read {path!r} as a table")


def _by_handler(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a method of PathManager: it calls the address's handler, or a function of the path."""

    def method(self: "_PathManager", path: AnyPath, *args: Any, **kwargs: Any) -> Any:
        handler = self._handler_of(path)
        own = getattr(handler, name, None)
        if own:
            return own(path, *args, **kwargs)
        changes = name in ("_mkdirs", "_rm")
        if name == "_open":
            mode = args[0] if args else kwargs.get("mode", "r")
            changes = any(letter in mode for letter in "wax+")
        if changes and handler is None:
            path = on_disk(path)
        if not PathHandler._strict_kwargs_check:
            known = signature(function).parameters
            kwargs = {key: kwargs[key] for key in kwargs.keys() & known}
        return function(self.get_local_path(path), *args, **kwargs)

    return method


def _make(function: Callable[[str, str], Any]) -> Callable[..., bool]:
    """Make a method that creates a file or link from another, and returns whether it succeeded.

    As in iopath it logs an error if the target already exists, or if the system refuses.
    """

    def make(source: str, target: AnyPath, overwrite: bool = False) -> bool:
        path = on_disk(target)
        try:
            if os.path.lexists(path) and not overwrite:
                raise FileExistsError(f"{path!r} already exists")
            function(source, path)
        except OSError as error:
            logger.error("NOT DONE: %s", error)
            return False
        return True

    return make


_copy_local = _make(shutil.copyfile)


def _copy(
    source: str, target: AnyPath, overwrite: bool = False, **options: Any
) -> bool:
    """Copy a local file to a path, or to an address by its handler's ``_copy_from_local``."""
    handler: Any = PathManager._handler_of(target)
    if handler is None:
        return _copy_local(source, target, overwrite)
    return handler._copy_from_local(source, target, overwrite, **options)  # type: ignore[no-any-return]


class _PathManager:
    """Finds and opens files. A process downloads files without waiting for other ranks."""

    def __init__(self) -> None:
        self._handlers: dict[str, PathHandler] = {}

    def __call__(self) -> "_PathManager":
        """Return this object: iopath's class and detectron2's object have the same name."""
        return self

    def register_handler(
        self, handler: PathHandler, allow_override: bool = True
    ) -> None:
        """Register a handler for the addresses that begin with its prefixes.

        Raises:
            KeyError: if a prefix already has a handler, and ``allow_override`` is False.
        """
        for prefix in handler._get_supported_prefixes():
            if prefix in self._handlers and not allow_override:
                raise KeyError(f"{prefix!r} has a handler: {self._handlers[prefix]!r}")
            register_scheme(prefix, handler._get_local_path)
            self._handlers[prefix] = handler

    def _handler_of(self, path: AnyPath) -> PathHandler | None:
        address = os.fspath(path)
        known = [prefix for prefix in self._handlers if address.startswith(prefix)]
        return self._handlers.get(max(known, key=len, default=""))

    def get_local_path(self, path: AnyPath, **kwargs: Any) -> str:
        """The path of a local file; see :func:`hooktrain.checkpoint.local_path`."""
        handler = self._handler_of(path)
        if kwargs and handler is not None:
            return handler._get_local_path(path, **kwargs)
        return local_path(path, alone=True)

    def set_strict_kwargs_checking(self, enable: bool) -> None:
        """Set whether unknown arguments of a method are refused or ignored."""
        PathHandler._strict_kwargs_check = enable

    def set_logging(self, enable_logging: bool = True) -> None:
        """Do nothing: file operations are not logged."""

    open = _by_handler("_open", open)
    opent = _by_handler("_opent", _opent)
    exists = _by_handler("_exists", os.path.exists)
    isfile = _by_handler("_isfile", os.path.isfile)
    isdir = _by_handler("_isdir", os.path.isdir)
    ls = _by_handler("_ls", os.listdir)
    mkdirs = _by_handler("_mkdirs", partial(os.makedirs, exist_ok=True))
    rm = _by_handler("_rm", os.remove)
    copy = _by_handler("_copy", _copy)
    copy_from_local = _by_handler("_copy_from_local", _copy)
    mv = _by_handler("_mv", _make(shutil.move))
    symlink = _by_handler("_symlink", _make(os.symlink))


PathManager = g_pathmgr = _PathManager()


def _from_model_zoo(address: str) -> str:
    name = address.removeprefix("detectron2://")
    return local_path(f"https://dl.fbaipublicfiles.com/detectron2/{name}", alone=True)


register_scheme("detectron2://", _from_model_zoo)
