"""Child processes that tell what became of them, end together, and do not outlive their parent."""

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import FrameType
from typing import Any

_FORWARDED = (signal.SIGINT, signal.SIGTERM)
_GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL for the others when one process has failed
_PR_SET_PDEATHSIG = 1  # of Linux's prctl()


def run_processes(
    ranks: range,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    cleanup: Callable[[], None],
) -> list[Any]:
    """Call `target(rank, *args)` in a process for each rank and wait for all of them.

    SIGINT and SIGTERM that reach this process are handed on to them. On Linux they are killed with
    it.

    Args:
        ranks: the numbers of the processes.
        target: importable by name; it, `args` and what it returns are pickled.
        args: the other arguments.
        cleanup: called in each process at the end, after an error has been told.

    Returns:
        What each call returned, in the order of `ranks`.

    Raises:
        RuntimeError: a process failed or died; names its rank and holds its traceback. The others
            have been ended.
        SystemExit, KeyboardInterrupt: raised in a process; here when all of them have ended.
    """
    processes: list[SpawnProcess] = []
    receivers: list[Connection] = []
    signals: list[int] = []
    try:
        for rank in ranks:
            process, receiver = _start(rank, target, args, cleanup)
            processes.append(process)
            receivers.append(receiver)
        with _forwarded_signals(processes, signals):
            outcomes = _receive(ranks, processes, receivers)
            for process in processes:
                process.join()
    except RuntimeError:
        if signals:  # that is what the process died of, so let it end this one too
            _end(processes)
            signal.raise_signal(signals[0])
        raise
    finally:
        _end(processes)
        for receiver in receivers:
            receiver.close()
    for kind, value in outcomes:
        if kind == "ended":
            raise value
    return [value for _, value in outcomes]


def _start(
    rank: int, target: Callable[..., Any], args: tuple[Any, ...], cleanup: Callable[[], None]
) -> tuple[SpawnProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=_child, args=(sender, os.getpid(), cleanup, target, rank, *args), name=f"rank {rank}"
    )
    with sender:  # afterwards only the child has it open, so that its death ends the stream
        process.start()
    return process, receiver


@contextmanager
def _forwarded_signals(processes: Sequence[SpawnProcess], received: list[int]) -> Iterator[None]:
    """Hand SIGINT and SIGTERM on to the processes, which know how to end the run in order."""

    def forward(signum: int, _frame: FrameType | None) -> None:
        received.append(signum)
        for process in processes:
            if process.pid is not None and process.exitcode is None:
                with suppress(ProcessLookupError):  # it has ended a moment ago
                    os.kill(process.pid, signum)

    if threading.current_thread() is not threading.main_thread():
        yield  # Python has signal handlers in the main thread only
        return
    previous = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _receive(
    ranks: range, processes: Sequence[SpawnProcess], receivers: Sequence[Connection]
) -> list[tuple[str, Any]]:
    """What each process has to tell; raises for the first that failed, at once."""
    outcomes: dict[int, tuple[str, Any]] = {}
    waiting = list(range(len(receivers)))
    while waiting:
        failures: list[tuple[float, str]] = []
        ready = wait([receivers[i] for i in waiting])
        for i in [i for i in waiting if receivers[i] in ready]:
            waiting.remove(i)
            try:
                kind, value = pickle.loads(receivers[i].recv_bytes())
            except EOFError:
                failures.append((0.0, f"rank {ranks[i]} {_how_it_died(processes[i])}"))
                continue
            if kind == "error":
                failed_at, report = value
                failures.append((failed_at, f"rank {ranks[i]} failed:\n\n{report}"))
            outcomes[i] = (kind, value)
        if failures:
            # A rank that goes makes the others fail: the first one is the cause.
            raise RuntimeError(min(failures)[1])
    return [outcomes[i] for i in range(len(processes))]


def _how_it_died(process: SpawnProcess) -> str:
    process.join()
    assert process.exitcode is not None
    if process.exitcode < 0:
        return f"was ended by {signal.Signals(-process.exitcode).name}"
    return f"ended with exit code {process.exitcode} before it could tell why"


def _end(processes: Sequence[SpawnProcess]) -> None:
    """End what still runs: with SIGTERM, and when that is not heeded with SIGKILL."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + _GRACE_SECONDS
    try:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
            process.join()


def _child(
    sender: Connection,
    parent: int,
    cleanup: Callable[[], None],
    target: Callable[..., Any],
    *args: Any,
) -> None:
    _die_with(parent)
    # Out of the terminal's group: Ctrl-C reaches the parent only, which hands it on once.
    os.setpgrp()
    message = None
    try:
        message = pickle.dumps(("result", target(*args)))
    except (SystemExit, KeyboardInterrupt) as error:
        message = pickle.dumps(("ended", error))
    except BaseException:
        # Told before the cleanup, which makes the others fail, or hangs because they do not.
        failure = (time.monotonic(), traceback.format_exc())
        sender.send_bytes(pickle.dumps(("error", failure)))
    cleanup()
    if message is not None:
        sender.send_bytes(message)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; only Linux has that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before
            os._exit(1)
