"""Python objects by name: near misses, dotted names, and calls of what they name."""

import difflib
import importlib
import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from importlib.util import find_spec
from typing import Any

import torch

logger = logging.getLogger(__name__)


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """The end of an error message about a name that does not exist.

    Args:
        name: The name that was asked for.
        known: The names that exist.

    Returns:
        ``"; did you mean 'x'?"`` if one is near, else a list of (at most twelve) names that exist.
    """
    names = [str(k) for k in known]
    near = difflib.get_close_matches(str(name), names, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    shown = ", ".join(map(repr, names[:12])) + (", ..." if len(names) > 12 else "")
    return f"; there is {shown or 'nothing'}"


def is_loss(name: str) -> bool:
    """Whether a metric of this name is a loss: one that has "loss" in it, as in MMEngine."""
    return "loss" in name


def refuse_overrides(kind: type, instead: Mapping[str, str]) -> None:
    """Say at once, when a class is defined, that nothing would call a method of it.

    For ``__init_subclass__``.

    Args:
        kind: The class.
        instead: What to do instead of overriding each of these methods, by their names.

    Raises:
        TypeError: If it defines one of them.
    """
    if found := next((name for name in instead if name in vars(kind)), None):
        message = f"{kind.__qualname__}.{found} would never be called: {instead[found]}"
        raise TypeError(message)


def refuse_signatures(
    kind: type, base: type, on_class: Sequence[str], hint: str = ""
) -> None:
    """Say at once, when a class is defined, that a method does not take what it is called with.

    For ``__init_subclass__``.

    Args:
        kind: The class.
        base: The one whose methods it overrides; what they need is what they are called with.
        on_class: The class methods that are called on the class, and never on an object.
        hint: More to say.

    Raises:
        TypeError: If it defines one of them for other arguments.
    """
    for name in vars(kind).keys() & vars(base).keys():
        if name.startswith("_") or not callable(original := getattr(base, name)):
            continue
        parameters = inspect.signature(original).parameters.values()
        given = [p.name for p in parameters if p.default is p.empty]
        plain = [inspect.isfunction(vars(c)[name]) for c in (kind, base)]
        called = (
            ["self", *given]
            if plain == [True, False] and name not in on_class
            else given
        )
        try:
            inspect.signature(getattr(kind, name)).bind(*called)
        except TypeError as error:
            text = f"{kind.__qualname__}.{name} is called with ({', '.join(given)}): {error}"
            raise TypeError(text + hint) from None


def locate(name: str) -> Any:
    """Import the object with a dotted name, such as ``"torch.optim.SGD"``.

    Modules are imported where needed. If a package has an attribute and a module of the same
    name, the attribute wins, as in an import.

    Raises:
        ImportError: If there is no such object. The message has the part that exists and its
            nearest attribute. An import that fails inside an existing module raises its own error.
    """
    path, *rest = name.split(".")
    found = importlib.import_module(path)
    for part in rest:
        # The path may also be a module that an attribute of its package hides.
        holder = found if hasattr(found, part) else sys.modules.get(path, found)
        if hasattr(holder, part):
            found = getattr(holder, part)
        elif hasattr(holder, "__path__") and find_spec(f"{holder.__name__}.{part}"):
            found = importlib.import_module(f"{holder.__name__}.{part}")
        else:
            hint = did_you_mean(part, [n for n in dir(holder) if not n.startswith("_")])
            raise ImportError(f"cannot locate {name!r}: {path!r} has no {part!r}{hint}")
        path = f"{path}.{part}"
    return found


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
    for module, name in _places(obj):
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        # Each access gives a new class method: the same one is equal, not identical.
        if type(found) is type(obj) and found == obj:
            return module, name
    raise ValueError(
        f"{obj!r:.80} of type {type(obj).__name__} cannot be imported by name; name a class or"
        " function that is defined at the top of a module"
    )


def _places(obj: Any) -> Iterator[tuple[str, str]]:
    """Where an object may be found as ``(module, name)``, the best place first."""
    owner = type(obj) if isinstance(obj, Enum) else obj
    module, name = (
        getattr(owner, "__module__", None),
        getattr(owner, "__qualname__", ""),
    )
    name = f"{name}.{obj.name}" if isinstance(obj, Enum) else name
    short = name.rpartition(".")[2]
    parts = module.split(".") if isinstance(module, str) else ["_"]
    if any(part.startswith("_") for part in parts):
        # Extensions do not know the public module of their functions: look who has them.
        holders = [
            m
            for m, mod in [*sys.modules.items()]
            if short in getattr(mod, "__dict__", ())
        ]
        for holder in sorted(holders, key=lambda m: ("._" in f".{m}", m.count("."), m)):
            yield holder, short
    for length in range(1, len(parts) + 1):
        yield ".".join(parts[:length]), name
        yield (
            ".".join(parts[:length]),
            short,
        )  # torch.tanh calls itself _VariableFunctions.tanh


def call(
    target: Callable[..., Any] | str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    where: str,
) -> Any:
    """Call ``target(*args, **kwargs)``, with a note about the target on every error.

    Python 3.10 has no notes on errors; there the note is logged.

    Args:
        target: What to call, or its dotted name.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        where: Where the user wrote the call, such as ``"(model.head)"``; it ends the note.

    Raises:
        Exception: What the target raises, with the note. For an argument that it does not know,
            the note suggests the nearest one.
    """
    try:
        target = locate(target) if isinstance(target, str) else target
        return target(*args, **kwargs)
    except Exception as err:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(err))
        known = _parameters(target) if unknown and isinstance(err, TypeError) else []
        hint = did_you_mean(unknown[1], known) if unknown and known else ""
        name = (
            target
            if isinstance(target, str)
            else getattr(target, "__qualname__", repr(target))
        )
        note = f"while instantiating {name} {where}{hint}"
        getattr(err, "add_note", logger.error)(note)  # Python 3.10 has no notes
        raise


def _parameters(target: Any) -> list[str]:
    """The parameters of a function, or of the constructors of a class and its bases."""
    bases: Sequence[Any] = target.__mro__ if isinstance(target, type) else ()
    callables = [base.__init__ for base in bases] or [target]
    try:
        return [
            name for each in callables for name in inspect.signature(each).parameters
        ]
    except (TypeError, ValueError):  # some callables written in C have no signature
        return []
