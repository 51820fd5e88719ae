"""DataLoader workers that ignore the signals by which a run is ended."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from multiprocessing import resource_tracker
from typing import Any

from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]
from torch.utils.data import DataLoader, Dataset

# What ends a run, or announces its end. Terminals and schedulers signal all processes.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def start_workers(loader: Iterable[Any]) -> Iterator[Any]:
    """``iter(loader)``, whose workers do not die of a signal to all processes.

    A worker that dies fails the run, which could have saved a checkpoint. So the workers
    of a torch ``DataLoader`` leave the signals of :data:`ENDING` to this process. They
    end with it, also when they hang. Not so with the start method "forkserver", whose
    server is a process of its own that SIGTERM ends.

    Args:
        loader: gives the batches. One that is not a ``DataLoader`` is left as it is, and
            so are all where the system does not say who has sent a signal (macOS).

    Raises:
        TypeError: if it is a data set, which gives samples and no batches.
    """
    if isinstance(loader, Dataset) and not hasattr(loader, "__iter__"):
        raise TypeError(
            f"give a loader of batches, such as a DataLoader, not a {type(loader)}"
        )
    if not isinstance(loader, DataLoader) or not hasattr(signal, "sigtimedwait"):
        return iter(loader)
    given = loader.worker_init_fn
    is_main_thread = threading.current_thread() is threading.main_thread()
    loader.worker_init_fn = partial(_init_worker, given, is_main_thread)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _inherited(loader))
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        loader.worker_init_fn = given


def _inherited(loader: DataLoader[Any]) -> Sequence[signal.Signals]:
    """What the workers block from the start on."""
    method = (loader.multiprocessing_context or multiprocessing).get_start_method()
    if method == "forkserver":  # the server would hand it on to other children
        return ()
    resource_tracker.ensure_running()  # it unblocks signals when it starts
    return ENDING


def _init_worker(
    given: Callable[[int], None] | None, of_main_thread: bool, worker_id: int
) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    # The kernel takes the end of the thread that starts a process for that of its parent.
    if of_main_thread:
        _prctl_pr_set_pdeathsig(signal.SIGKILL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if given is not None:
        given(worker_id)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    while parent.is_alive():
        got = signal.sigtimedwait(ENDING, 1.0)
        if got is not None and got.si_pid == parent.pid:  # torch terminates the worker
            break
    os._exit(0)
