"""Workers of a torch ``DataLoader`` that leave signals to the process that they work for."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing import forkserver, resource_tracker
from typing import Any

import torch
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]
from torch.utils.data import DataLoader, Dataset

# What ends a run, or announces its end. Terminals and schedulers signal all processes alike.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

_IN_FORK_SERVER = "hooktrain.utils.fork_server"


def start_workers(loader: Iterable[Any]) -> Iterator[Any]:
    """``iter(loader)``, but its workers do not die of a signal to all processes of the run.

    A worker that dies fails the run, which could have saved a checkpoint. So the workers of a torch
    ``DataLoader`` block the signals of :data:`ENDING`, and so do the programs that they start. They
    end when this process terminates them, and soon after its own end, also when they hang.

    Args:
        loader: gives the batches. One that is not a ``DataLoader`` is left as it is, and so are all
            where the system does not say who has sent a signal (macOS).

    Raises:
        TypeError: if it is a data set, a tensor or a string, which give no batches.
    """
    is_dataset = isinstance(loader, Dataset) and not hasattr(loader, "__iter__")
    if is_dataset or isinstance(loader, str | torch.Tensor):
        raise TypeError(
            f"give a loader of batches, such as a DataLoader, not a {type(loader)}"
        )
    tells_sender = hasattr(signal, "sigtimedwait")
    if (
        not isinstance(loader, DataLoader)
        or loader.num_workers == 0
        or not tells_sender
    ):
        return iter(loader)
    given = loader.worker_init_fn
    is_main = threading.current_thread() is threading.main_thread()
    loader.worker_init_fn = partial(_init_worker, given, is_main)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _inherited(loader))
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        loader.worker_init_fn = given


def _inherited(loader: DataLoader[Any]) -> tuple[int, ...]:
    """What the workers block from the start on: with ``"spawn"`` they take seconds to start."""
    method = (loader.multiprocessing_context or multiprocessing).get_start_method()
    if method == "spawn":
        resource_tracker.ensure_running()  # it unblocks signals when it starts
    if method != "forkserver":
        return ENDING
    # The server would hand it on to children that are not workers, so it blocks them by itself.
    preload = forkserver._forkserver._preload_modules  # type: ignore[attr-defined]
    if _IN_FORK_SERVER not in preload:
        multiprocessing.set_forkserver_preload([*preload, _IN_FORK_SERVER])
    return ()


def _init_worker(
    given: Callable[[int], None] | None, is_of_main_thread: bool, worker_id: int
) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    if (
        is_of_main_thread
    ):  # the kernel takes the end of the thread for that of the parent
        _prctl_pr_set_pdeathsig(signal.SIGKILL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if given is not None:
        given(worker_id)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    while parent.is_alive():
        got = signal.sigtimedwait(ENDING, 1.0)
        if (
            got is not None and got.si_pid == parent.pid
        ):  # terminate(), also as the parent exits
            break
    os._exit(0)
