"""What fails on one rank is raised on every rank."""

import pickle
from collections.abc import Callable
from typing import TypeVar

from hooktrain.utils import comm

__all__ = ["on_all_ranks", "on_main_process"]

T = TypeVar("T")


def on_all_ranks(function: Callable[[], T]) -> T:
    """Call a function on every rank; raise the error of the first that failed on all. Collective.

    Where none failed, that is one sum of one number.

    Args:
        function: makes no collective calls, since another rank may have failed before.

    Returns:
        What it returned on this rank.
    """
    result, error = None, None
    try:
        result = function()
    except Exception as problem:  # raised below, once all ranks are here
        error = problem
    if comm.any_rank(error is not None):
        raise next(e for e in comm.all_gather(_portable(error)) if e is not None)
    return result  # type: ignore[return-value]  # the function returned it


def on_main_process(function: Callable[[], T]) -> T:
    """Call a function on the main process; return, or raise, the same on every rank. Collective.

    Args:
        function: what it returns is sent to the other ranks, so it must be picklable.
    """
    result, error = None, None
    if comm.is_main_process():
        try:
            result = function()
        except Exception as problem:  # raised below, once the others know
            error = problem
    result, error = comm.broadcast((result, _portable(error)))
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # the function returned it


def _portable(error: Exception | None) -> Exception | None:
    """The error, or its text if it cannot be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
