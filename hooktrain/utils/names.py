"""Python objects by dotted name, suggestions for unknown names, and checks of arguments."""

import difflib
import inspect
import logging
import pydoc
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from numbers import Real
from typing import Any, TypeAlias, TypeVar

import torch

T = TypeVar("T")

# The result of a state_dict(). A load_state_dict() must not change it.
State: TypeAlias = dict[str, Any]

# Numbers by name, such as the metrics of an iteration or of an evaluation.
Numbers: TypeAlias = dict[str, float]

# The keys, indices and field names that lead to a value in nested containers.
Keys: TypeAlias = tuple[Any, ...]

logger = logging.getLogger(__name__)


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """The hint at the end of an error message about an unknown name.

    Args:
        name: the unknown name.
        known: the known names.

    Returns:
        ``"; did you mean 'x'?"`` if a known name is similar. Otherwise the first twelve known
        names, or "" if there are no known names.
    """
    names = list(map(str, known))
    near = difflib.get_close_matches(str(name), names, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    shown = ", ".join(map(repr, names[:12]))
    return f"; there is {shown}" if names else ""


def as_list(given: Iterable[T], kind: type, name: str) -> list[T]:
    """Convert an argument that must be a collection of objects of one class to a list.

    Args:
        given: the argument.
        kind: the class of its items, which may also be None.
        name: the name of the argument, for the error.

    Raises:
        TypeError: for a single object or a string in place of a collection, and for an item of
            another class.
    """
    if isinstance(given, kind | str):
        raise TypeError(f"{name} must be a list: [{given!r}]")
    items = list(given)
    for item in items:
        if not isinstance(item, kind | None):
            raise TypeError(f"{name} must be {kind.__name__} objects: {item!r}")
    return items


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Refuse a value that is not a whole number, or is too small.

    Args:
        name: the name of the argument, for the error.
        value: the argument.
        least: the smallest legal value.

    Raises:
        ValueError: if the value is smaller, a fraction or not a number.
    """
    if not isinstance(value, Real) or value < least or value % 1:
        raise ValueError(
            f"{name} must be a whole number, at least {least}, but got {value!r}"
        )


def dotted(path: Keys) -> str:
    """Join keys and indices to a dotted path, as in messages, references and overrides."""
    return ".".join(map(str, path))


def is_loss(name: str) -> bool:
    """Whether a metric of this name is a loss: the name contains "loss", as in MMEngine."""
    return "loss" in name


def names_used(method: Any) -> tuple[str, ...]:
    """The names of globals, attributes and methods in the code of a Python function."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    return code.co_names if code else ()


def refuse_overrides(kind: type, instead: Mapping[str, str]) -> None:
    """Refuse a class with methods that would never be called, as soon as it is defined.

    Call it in ``__init_subclass__``.

    Args:
        kind: the class.
        instead: the names of these methods, each with advice on what to do instead.

    Raises:
        TypeError: if the class defines one of these methods.
    """
    for name, hint in instead.items():
        if name in vars(kind):
            raise TypeError(f"{kind.__qualname__}.{name} would never be called: {hint}")


def locate(name: str) -> Any:
    """Import the object with a dotted name, such as ``"torch.optim.SGD"``.

    If a package has both an attribute and a module of that name, the attribute is returned.

    Raises:
        ImportError: if there is no such object.
        Exception: the error of a module that fails while it is imported.
    """
    try:
        found = pydoc.locate(name)
    except pydoc.ErrorDuringImport as error:
        raise error.value from None  # type: ignore[misc, unused-ignore]
    if found is None:
        raise ImportError(f"cannot locate {name!r}")
    return found


def importable_name(obj: Any) -> str:
    """The shortest dotted name by which :func:`locate` finds an object.

    A public re-export is preferred: ``"torch.optim.SGD"``, although the class is defined in
    ``torch.optim.sgd``.

    Args:
        obj: a class, function, class method or ``torch.dtype``.

    Raises:
        ValueError: if the object cannot be imported by name, such as a lambda, an object that is
            defined in a function, or an ordinary instance.
    """
    if isinstance(obj, torch.dtype):
        return str(obj)
    home = getattr(obj, "__module__", None) or ""
    name = getattr(obj, "__qualname__", "")
    # The prefix of torch.tanh.__qualname__, for example.
    name = name.removeprefix("_VariableFunctionsClass.")
    modules = accumulate(home.split("."), "{}.{}".format)
    for module in modules:
        whole = f"{module}.{name}"
        found = pydoc.locate(whole)
        # Each access to a class method makes a new object, so `is` would be False.
        if type(found) is type(obj) and found == obj:
            return whole
    raise ValueError(
        f"{obj!r:.80} of type {type(obj).__name__} cannot be imported by name; use a "
        "class or function that is defined at the top level of a module"
    )


def call(
    target: Callable[..., Any] | str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    where: str,
) -> Any:
    """Call ``target(*args, **kwargs)``, and add a note about the target to any error.

    Args:
        target: a callable, or its dotted name.
        args: the positional arguments.
        kwargs: the keyword arguments.
        where: the end of the note, which says where the user wrote the call, such as
            ``"(model.head)"``.

    Raises:
        Exception: the target's error, with the note.
    """
    try:
        function = locate(target) if isinstance(target, str) else target
        return function(*args, **kwargs)
    except Exception as error:
        name = getattr(target, "__qualname__", target)
        add_note(error, f"while instantiating {name} {where}")
        raise


def add_note(error: Exception, note: str) -> None:
    """Add a note to an error; on Python 3.10, whose errors have no notes, log it."""
    getattr(error, "add_note", logger.error)(note)


def states_of(objects: Mapping[str, Any]) -> State:
    """The states of objects by name.

    Raises:
        TypeError: if a ``state_dict`` returns None, for example because its return is missing.
    """
    states = {}
    for key, each in objects.items():
        states[key] = each.state_dict()
        if states[key] is None:
            raise TypeError(f"{key}.state_dict() must return a dict, not None")
    return states
