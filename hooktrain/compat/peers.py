"""Names that hooktrain lacks are imported from the packages that have them, if installed."""

from collections.abc import Iterable
from typing import Any


def of_peers(name: str, modules: Iterable[str], otherwise: str) -> Any:
    """Import a name from the first of several modules that has it.

    A module's ``__getattr__`` calls this, so hooktrain's own names come first.

    Args:
        name: of a class, a function or a whole module.
        modules: dotted names. Those of packages that are not installed are passed over.
        otherwise: the message if no module has it, which says which package does.

    Raises:
        AttributeError: for a name of Python's own, such as ``__path__``.
        ImportError: with that message, and with the errors of modules that cannot be imported.
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
