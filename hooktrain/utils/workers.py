"""Workers of a DataLoader, which ignore the signals by which a run is ended."""

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

# Signals that end a run or announce its end. Terminals and schedulers send them to all processes.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def start_workers(loader: Iterable[Any]) -> Iterator[Any]:
    """Return ``iter(loader)``, whose workers survive signals that are sent to all processes.

    The death of a worker is an error in a run that could still have saved a checkpoint. So the
    workers of a torch ``DataLoader`` block the signals of :data:`ENDING`, and this process alone
    handles them. The workers end when this process ends, even if they hang. With the start method
    "forkserver" they do not survive SIGTERM, which ends the server that they come from.

    Args:
        loader: gives the batches. Signals are not blocked for a loader that is no ``DataLoader``,
            and for none on systems that do not tell who has sent a signal (macOS).

    Raises:
        TypeError: if it is a data set, which gives samples instead of batches.
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
    """The signals that a worker blocks from its first moment on."""
    method = (loader.multiprocessing_context or multiprocessing).get_start_method()
    if method == "forkserver":  # the server would block them for its other children too
        return ()
    resource_tracker.ensure_running()  # it unblocks signals when it starts
    return ENDING


def _init_worker(
    given: Callable[[int], None] | None, of_main_thread: bool, worker_id: int
) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    # To the kernel the thread that started a process is its parent, and another may end early.
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
        if got is not None and got.si_pid == parent.pid:  # torch asks the worker to end
            break
    os._exit(0)
