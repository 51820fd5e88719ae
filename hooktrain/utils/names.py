"""Names of Python objects: finding one by its dotted name, the inverse, and what a typo meant."""

import difflib
import importlib
import sys
from collections.abc import Iterable, Iterator
from enum import Enum
from types import MethodType
from typing import Any

import torch

__all__ = ["did_you_mean", "dotted_name", "importable_name", "locate"]


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """The end of an error message about a name that does not exist.

    Args:
        name: The name that was asked for.
        known: The names that exist.

    Returns:
        ``"; did you mean 'x'?"`` where one is near, otherwise the (at most twelve) names there are.
    """
    names = [str(k) for k in known]
    near = difflib.get_close_matches(str(name), names, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    shown = ", ".join(map(repr, names[:12])) + (", ..." if len(names) > 12 else "")
    return f"; there is {shown or 'nothing'}"


def locate(name: str) -> Any:
    """Import the object with a dotted name, such as ``"torch.optim.SGD"``.

    Modules are imported as needed; classes' attributes and re-exports are followed. Where a
    package has an attribute and a module of one name, the attribute wins, as in an import.

    Raises:
        ImportError: If there is no such object; the message names the part that exists and the
            nearest attribute of it. An import that fails inside an existing module is not hidden.
    """
    if not isinstance(name, str):
        raise TypeError(f"a dotted name must be a string, got {name!r}")
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        raise ImportError(f"{name!r} is not a dotted name, such as 'torch.optim.SGD'")
    reached, deepest = 0, None
    for split in range(1, len(parts) + 1):
        obj = _import_if_there(".".join(parts[:split]))
        if obj is None:
            break
        for depth in range(split, len(parts) + 1):
            if depth > reached:
                reached, deepest = depth, obj
            if depth == len(parts):
                return obj
            try:
                obj = getattr(obj, parts[depth])
            except AttributeError:
                break
    if not reached:
        raise ImportError(f"cannot locate {name!r}: there is no module {parts[0]!r}")
    public = [n for n in dir(deepest) if not n.startswith("_")]
    raise ImportError(
        f"cannot locate {name!r}: {'.'.join(parts[:reached])!r} has no {parts[reached]!r}"
        + did_you_mean(parts[reached], public)
    )


def _import_if_there(module: str) -> Any:
    """Import a module, or give None if there is none; errors from inside a module are raised."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as err:
        if err.name is not None and f"{module}.".startswith(f"{err.name}."):
            return None
        raise


def importable_name(obj: Any) -> tuple[str, str]:
    """The shortest ``(module, name)`` for which ``from module import name`` gives ``obj``.

    ``name`` is dotted for what is defined in a class. A public re-export is preferred:
    ``("torch.optim", "SGD")``, although the class is defined in ``torch.optim.sgd``.

    Args:
        obj: A class, function, class method, enum member or ``torch.dtype``.

    Raises:
        ValueError: If it cannot be imported by name: a lambda, something defined in a function,
            an ordinary instance.
    """
    if isinstance(obj, torch.dtype):
        return "torch", str(obj).removeprefix("torch.")
    for module, name in _candidates(obj):
        if _same(_attribute(sys.modules.get(module), name), obj):
            return module, name
    raise ValueError(
        f"{obj!r:.80} of type {type(obj).__name__} cannot be imported by name; name a class or"
        " function that is defined at the top of a module"
    )


def dotted_name(obj: Any) -> str:
    """The shortest dotted name by which `locate` finds ``obj``; see `importable_name`."""
    return ".".join(importable_name(obj))


def _candidates(obj: Any) -> Iterator[tuple[str, str]]:
    """Where an object may be found as ``(module, name)``, the best place first."""
    owner = type(obj) if isinstance(obj, Enum) else obj
    module, short = getattr(owner, "__module__", None), str(getattr(obj, "__name__", None))
    name = str(getattr(owner, "__qualname__", short))
    if isinstance(obj, Enum):
        name = f"{name}.{obj.name}"
    parts = module.split(".") if isinstance(module, str) else []
    if not parts or any(part.startswith("_") for part in parts):
        # Extensions do not know the public home of their functions: see who has them.
        holders = [m for m, mod in [*sys.modules.items()] if short in getattr(mod, "__dict__", ())]
        for holder in sorted(holders, key=lambda m: ("._" in f".{m}", m.count("."), m)):
            yield holder, short
    for length in range(1, len(parts) + 1):
        yield ".".join(parts[:length]), name
        yield ".".join(parts[:length]), short  # torch.tanh calls itself _VariableFunctions.tanh


def _attribute(obj: Any, name: str) -> Any:
    """A nested attribute, or None."""
    for part in name.split("."):
        obj = getattr(obj, part, None)
    return obj


def _same(found: Any, obj: Any) -> bool:
    # A class method is bound anew at each access: the same one is equal, not identical.
    return found is obj or (isinstance(obj, MethodType) and bool(found == obj))
