"""Calling what a configuration names, with errors that say which part of it was wrong."""

import inspect
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hooktrain.utils.names import did_you_mean

__all__ = ["call"]

logger = logging.getLogger(__name__)


def call(
    target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], what: str
) -> Any:
    """Call ``target(*args, **kwargs)``; an error says that this was about ``what``.

    Args:
        target: what to call.
        args: its positional arguments.
        kwargs: its keyword arguments; they are not changed.
        what: in the words of the user, such as ``"model.head (torch.nn.Linear)"``.

    Raises:
        TypeError: if the target does not accept the arguments; for a name that is unknown, the
            message has the nearest one.
        Exception: what the target itself raises is passed on as it is, with a note (Python 3.10,
            which has no notes, logs an error that says the same).
    """
    try:
        return target(*args, **kwargs)
    except Exception as err:
        if isinstance(err, TypeError):
            reason = _mismatch(target, args, kwargs) or _unknown_to_bases(target, kwargs, err)
            if reason:
                raise TypeError(f"cannot instantiate {what}: {reason}") from err
        if sys.version_info >= (3, 11):
            err.add_note(f"while instantiating {what}")
        else:
            logger.error("while instantiating %s: %s", what, err)
        raise


def _mismatch(
    target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str | None:
    """Why a target does not accept the arguments; None if it does, or if that is unknown."""
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # some of the callables written in C do not tell
        return None
    try:
        signature.bind(*args, **kwargs)
    except TypeError as err:
        names = signature.parameters
        unknown = [key for key in kwargs if key not in names]
        return f"{err}{did_you_mean(unknown[0], names)}" if unknown else str(err)
    return None


def _unknown_to_bases(
    target: Callable[..., Any], kwargs: Mapping[str, Any], err: TypeError
) -> str | None:
    """Which argument neither a class nor those that it hands ``**kwargs`` on to accept."""
    if not isinstance(target, type) or "unexpected keyword argument" not in str(err):
        return None
    constructors = [vars(base)["__init__"] for base in target.__mro__ if "__init__" in vars(base)]
    names = {name for each in constructors for name in inspect.signature(each).parameters}
    unknown = [key for key in kwargs if key not in names]
    return f"{err}{did_you_mean(unknown[0], sorted(names))}" if unknown else None
