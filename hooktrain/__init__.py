"""hooktrain: a hook-based minimal trainer for PyTorch."""

import typing
from importlib import import_module
from importlib.util import find_spec

__version__ = "0.1.0"

if typing.TYPE_CHECKING:
    from hooktrain.api import *
else:

    def __getattr__(name: str) -> object:
        """Load a name of :mod:`hooktrain.api`, and with it torch, when it is asked for."""
        # The import system asks here for packages such as hooktrain.data before it loads them.
        if find_spec(f"hooktrain.{name}"):
            raise AttributeError(name)
        return getattr(import_module("hooktrain.api"), name)

    def __dir__() -> set[str]:
        """The names of this module and of :mod:`hooktrain.api`."""
        return {*globals(), *dir(import_module("hooktrain.api"))}
