"""hooktrain: a hook-based minimal trainer for PyTorch."""

import typing
from importlib import import_module
from importlib.util import find_spec

__version__ = "0.1.0"

if typing.TYPE_CHECKING:
    from hooktrain.api import *
else:

    def __getattr__(name: str) -> object:
        """Load a name of :mod:`hooktrain.api`, and thereby torch, on first use."""
        # The import system looks up packages such as hooktrain.data here before it loads them.
        if find_spec(f"hooktrain.{name}"):
            raise AttributeError(name)
        api = import_module("hooktrain.api")
        if name == "__all__":  # for `from hooktrain import *`
            return [public for public in dir(api) if public[0] != "_"]
        return getattr(api, name)

    def __dir__() -> set[str]:
        """The names of this module and of :mod:`hooktrain.api`."""
        return {*globals(), *__getattr__("__all__")}
