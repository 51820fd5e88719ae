"""Imports names that hooktrain lacks from detectron2, mmengine and related packages."""

from collections.abc import Iterable
from typing import Any


def import_from_peers(name: str, modules: Iterable[str], otherwise: str) -> Any:
    """Import a name from the first of several modules that has it.

    A module's ``__getattr__`` calls this, so hooktrain's own names come first.

    Args:
        name: the name of a class, a function or a whole module.
        modules: the dotted names of modules. Packages that are not installed are skipped.
        otherwise: the message if no module has the name; it should say which package does.

    Raises:
        AttributeError: for one of Python's special names, such as ``__path__``.
        ImportError: with that message, and the errors of modules that cannot be imported.
    """
    if name.startswith("__"):
        raise AttributeError(name)
    failures = []
    for module in modules:
        try:
            found = __import__(module, fromlist=[name])
        except ImportError as error:
            is_missing = f"{module}.".startswith(f"{error.name}.")
            if not is_missing:
                failures.append(f"; {module} cannot be imported: {error}")
            continue
        if hasattr(found, name):
            return getattr(found, name)
    raise ImportError(otherwise + "".join(failures))
