"""What hooktrain lacks comes from the packages that have it, where these are installed."""

from collections.abc import Iterable
from typing import Any


def of_peers(name: str, modules: Iterable[str], otherwise: str) -> Any:
    """What ``from module import name`` gives for the first of some modules that has it.

    A module's ``__getattr__`` asks this, so what hooktrain has itself comes first.

    Args:
        name: of a class, a function or a whole module.
        modules: dotted names. Those of packages that are not installed are passed over.
        otherwise: a sentence for when none has it: which package does.

    Raises:
        AttributeError: for a name of Python's own, such as ``__path__``.
        ImportError: with that sentence, and why modules could not be imported.
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
