"""iopath's ``PathManager``: files by path or address, as detectron2's scripts open them."""

import os
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

from hooktrain.checkpoint.sources import local_path, register_scheme
from hooktrain.utils.file_io import AnyPath


class PathHandler:
    """What knows the files of some addresses.

    A subclass defines both methods. Its files are opened and looked for at their local paths, so a
    method ``_open`` need not be there, and is not called.
    """

    def _get_supported_prefixes(self) -> list[str]:
        return []

    def _get_local_path(self, path: str, **kwargs: Any) -> str:
        raise NotImplementedError(f"{type(self).__name__} must define _get_local_path for {path!r}")


HTTPURLHandler = OneDrivePathHandler = PathHandler  # files on the web are found without


def _on_local_path(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: "_PathManager", path: AnyPath, *args: Any, **kwargs: Any) -> Any:
        return function(self.get_local_path(path), *args, **kwargs)

    return method


class _PathManager:
    """Finds, opens and copies files. A process that downloads one waits for no other."""

    def __call__(self) -> "_PathManager":
        """Itself: iopath's class has the name of detectron2's object."""
        return self

    def register_handler(self, handler: PathHandler, allow_override: bool = True) -> None:
        """Take a handler for the addresses that begin with its prefixes."""
        register_scheme(handler._get_supported_prefixes(), handler._get_local_path, force=True)

    def get_local_path(self, path: AnyPath, **kwargs: Any) -> str:
        """The path of a local file, as :func:`~hooktrain.checkpoint.local_path` finds it."""
        return local_path(path, alone=True)

    open = _on_local_path(open)
    exists = _on_local_path(os.path.exists)
    isfile = _on_local_path(os.path.isfile)
    isdir = _on_local_path(os.path.isdir)
    ls = _on_local_path(os.listdir)
    mkdirs = _on_local_path(partial(os.makedirs, exist_ok=True))
    rm = _on_local_path(os.remove)

    def copy(self, src_path: AnyPath, dst_path: AnyPath, overwrite: bool = False) -> bool:
        """Copy a file; False if there is one already and ``overwrite`` is not set."""
        if is_free := overwrite or not self.exists(dst_path):
            shutil.copyfile(self.get_local_path(src_path), self.get_local_path(dst_path))
        return is_free


PathManager = _PathManager()


@partial(register_scheme, "detectron2://")
def _of_model_zoo(address: str) -> str:
    name = address.removeprefix("detectron2://")
    return local_path(f"https://dl.fbaipublicfiles.com/detectron2/{name}", alone=True)
