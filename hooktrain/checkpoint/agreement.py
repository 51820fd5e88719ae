"""What fails on one rank is raised on every rank."""

import pickle
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hooktrain.utils import comm
from hooktrain.utils.background import BackgroundWorker

T = TypeVar("T")


def on_all_ranks(function: Callable[[], T], group: ProcessGroup | None = None) -> list[T]:
    """Call a function on every rank. If it fails on one, its error is raised on all. Collective.

    Args:
        function: makes no collective calls, since it may fail on another rank. What it returns is
            sent to all ranks, so it must be picklable.
        group: of all ranks; by default that of :mod:`hooktrain.utils.comm`. A thread needs a group
            that nobody else uses.

    Returns:
        What it returned on each rank, in their order.

    Raises:
        Exception: the error of the first rank that failed.
    """
    if comm.get_world_size() == 1:
        return [function()]
    result: T | None = None
    error: Exception | None = None
    try:
        result = function()
    except Exception as problem:  # raised below, when all ranks know
        error = problem
    outcomes = comm.all_gather((result, _portable(error)), group)
    for _, first in outcomes:
        if first is not None:
            raise first from error
    return [own for own, _ in outcomes]  # type: ignore[misc]  # none has failed


def on_main_process(function: Callable[[], T], group: ProcessGroup | None = None) -> T:
    """Call a function on the main process; return or raise the same on every rank. Collective.

    Args:
        function: as for :func:`on_all_ranks`.
        group: as for :func:`on_all_ranks`.
    """
    is_main = comm.is_main_process()
    return on_all_ranks(lambda: function() if is_main else None, group)[0]  # type: ignore[return-value]


def all_come(seconds: float | None = None) -> bool:
    """Whether all ranks come here. A rank that is in another collective has not come. Collective.

    Args:
        seconds: how long this rank waits at most; None waits as long as the process group does.
    """
    if comm.get_world_size() == 1:
        return True
    worker, group = BackgroundWorker("meeting"), comm.object_group()
    worker.submit(lambda: dist.monitored_barrier(group), daemon=True)
    return worker.wait(seconds)


def _portable(error: Exception | None) -> Exception | None:
    """The error, or its text if it cannot be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
