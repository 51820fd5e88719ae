"""DataLoader workers that ignore the signals that end a run."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from multiprocessing import resource_tracker
from multiprocessing.util import Finalize
from typing import Any

from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]
from torch.utils.data import DataLoader, Dataset

from hooktrain.utils.signals import ENDING


def start_workers(loader: Iterable[Any]) -> Iterator[Any]:
    """Return ``iter(loader)``, whose workers survive signals that are sent to all processes.

    If a signal killed a worker, the run would end with an error before it could save a checkpoint.
    So the workers of a torch ``DataLoader`` block the signals of ``ENDING``, and only this
    process handles them. The workers end with this process; on Linux even those that hang, if the
    main thread has started them. With the start method "forkserver" they do not survive SIGTERM,
    which ends their server.

    Args:
        loader: the loader of the batches. Signals are blocked only for a ``DataLoader``, and only
            on systems that report the sender of a signal (not on macOS).

    Raises:
        TypeError: for a data set, which yields samples instead of batches.
        RuntimeError: by the iterator, if a worker has died.
    """
    if isinstance(loader, Dataset) and not hasattr(loader, "__iter__"):
        raise TypeError(
            f"pass a loader of batches, such as a DataLoader, not a {type(loader)}"
        )
    if not isinstance(loader, DataLoader) or loader.num_workers == 0:
        return iter(loader)
    if not hasattr(signal, "sigtimedwait"):
        return _report_dead_workers(iter(loader))
    given = loader.worker_init_fn
    is_main_thread = threading.current_thread() is threading.main_thread()
    loader.worker_init_fn = partial(_init_worker, given, is_main_thread)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _inherited(loader))
    try:
        return _report_dead_workers(iter(loader))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        loader.worker_init_fn = given
        _kill_at_exit(os.getpid())


def _report_dead_workers(batches: Iterator[Any]) -> Iterator[Any]:
    """The batches, with a clear error if a worker dies while it returns one."""
    try:
        yield from batches
    except (ConnectionError, EOFError) as error:
        # Errors of samples, and of workers that die at other moments, get torch's own message.
        if str(error).startswith("Caught "):
            raise
        raise RuntimeError(
            "a worker of the data loader died while it returned a batch. If it ran out of memory, "
            "the kernel's log says so"
        ) from error


@cache  # once per process: a child inherits neither the cache entry nor the Finalize
def _kill_at_exit(process: int) -> None:
    """At the exit, kill the workers that remain, for which Python would wait without a limit."""
    Finalize(None, _kill_workers, exitpriority=0)


def _kill_workers() -> None:
    # torch's handler would raise an error for the workers that are killed.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        if child.daemon:  # multiprocessing itself would end all of them by SIGTERM
            child.kill()


def _inherited(loader: DataLoader[Any]) -> Sequence[signal.Signals]:
    """The signals that a worker inherits as blocked."""
    method = (loader.multiprocessing_context or multiprocessing).get_start_method()
    if method == "forkserver":  # the server would block the signals in all its children
        return ()
    resource_tracker.ensure_running()  # starting it later would unblock the signals
    return ENDING


def _init_worker(
    given: Callable[[int], None] | None, of_main_thread: bool, worker_id: int
) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    # To the kernel, the parent is a thread, and only the main thread surely lives to the end.
    if of_main_thread:
        _prctl_pr_set_pdeathsig(signal.SIGKILL)
    threading.Thread(target=_end_when_asked, daemon=True).start()
    if given is not None:
        given(worker_id)


def _end_when_asked() -> None:
    """End the worker when its parent sends SIGTERM, which torch does if a worker hangs."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    while signal.sigwaitinfo(ENDING).si_pid != parent.pid:
        pass
    os._exit(0)
