"""Starts the processes of a distributed run, or joins those that a launcher has started."""

import logging
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import (
    ProcessContext,
    ProcessException,
    start_processes,
)

from hooktrain.strategy import environment
from hooktrain.strategy.environment import DEFAULT_TIMEOUT as DEFAULT_TIMEOUT
from hooktrain.utils import comm
from hooktrain.utils.signals import ENDING, replace_handlers, restore_handlers

logger = logging.getLogger(__name__)

# When a process fails, the others get this long to end, and as long again after a SIGTERM.
_GRACE_SECONDS = 4.0


def launch(
    main_func: Callable[..., Any],
    num_gpus_per_machine: int = 1,
    num_machines: int = 1,
    machine_rank: int = 0,
    dist_url: str | None = None,
    args: tuple[Any, ...] = (),
    timeout: timedelta = DEFAULT_TIMEOUT,
    backend: str | None = None,
) -> Any:
    """Run ``main_func(*args)`` in every process of a distributed run.

    - In an existing process group, as under Ray or in a notebook, it calls the function. The code
      that created the group must choose the device, and destroy the group.
    - Under torchrun, srun, mpirun or submitit, which have already started the processes, this
      one joins the others, and the numbers given here are ignored; see
      :func:`hooktrain.strategy.environment.get_rank_info`.
    - For a single process, or zero, it calls the function, without a process group.
    - Otherwise it starts ``num_gpus_per_machine`` processes, which join each other as under
      torchrun, and waits for them. Start the same program on each machine. Loader workers in these
      processes start by the platform's default method (forked on Linux before Python 3.14).

    While ``main_func`` runs, the current accelerator of each joined process is that of its local
    rank (``comm.get_local_rank()``). When a rank fails, the others fail too, and report the error
    of the first.

    SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are forwarded to the started processes. If their
    parent is killed, they are killed too (Linux).

    Args:
        main_func: the function; to start processes it must be importable by name.
        num_gpus_per_machine: the number of processes on each machine; without CUDA they
            share the CPU.
        num_machines: the number of machines.
        machine_rank: the number of this machine, from 0.
        dist_url: the address of machine 0 at which several machines meet, such as
            ``"tcp://192.168.1.7:29500"``. The processes of one machine find a free port themselves.
        args: the arguments of ``main_func``; to start processes they must be picklable.
        timeout: the timeout of the collectives.
        backend: the backend of the process group; None is nccl with CUDA, else gloo.

    Returns:
        The result of ``main_func``; None if processes were started for it.

    Raises:
        ValueError: if the arguments contradict each other, or the launcher's variables are
            incomplete.
        RuntimeError: if a started process failed, with its rank and traceback; under a
            launcher, if another rank failed before this one.
        SystemExit: if a started process called ``sys.exit()`` with a code other than 0, which ends
            the others too: they should have saved by then.
    """
    if not 0 <= machine_rank < num_machines:
        raise ValueError(
            f"machine_rank must be in [0, {num_machines}), got {machine_rank!r}"
        )
    if dist.is_initialized():
        return main_func(*args)
    launcher = environment.infer_launcher()
    if launcher == "pytorch" or environment.get_rank_info(launcher).world_size > 1:
        return _run_rank(main_func, args, launcher, backend, timeout)
    world_size = num_machines * num_gpus_per_machine
    if world_size <= 1:
        return main_func(*args)
    variables, _store = environment.meeting_place(dist_url, num_machines)
    variables.update(
        WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(num_gpus_per_machine)
    )
    first = machine_rank * num_gpus_per_machine
    ranks = range(first, first + num_gpus_per_machine)
    work = (partial(_interruptible, main_func), args, "pytorch", backend, timeout)
    _run_processes(ranks, variables, work)
    return None


def _run_processes(
    ranks: range, variables: dict[str, str], work: tuple[Any, ...]
) -> None:
    """Start a process for each rank, and wait until all have ended."""
    failure, code = "", 0  # a code below 0 is that of a signal
    with _forwarding_signals() as signals:
        context: ProcessContext = start_processes(
            _child, (ranks, variables, work), len(ranks), join=False
        )
        for early in signals[:]:  # these came before all processes had started
            _signal_all(early)
        try:
            while not context.join(grace_period=_GRACE_SECONDS):
                pass
        except ProcessException as error:
            failure = f"rank {ranks[error.error_index]} failed: {error.msg.strip()}"
            code = getattr(error, "exit_code", 0)
    if failure and code <= 0 and not signals:
        raise RuntimeError(failure)
    if failure:  # the exit code or signal below would not say which rank it was
        logger.error(failure)
    if code > 0:
        raise SystemExit(code)
    if failure or signal.SIGINT in signals:
        # The signal has ended the processes, so let it end the parent too.
        signal.raise_signal(signals[0])


@contextmanager
def _forwarding_signals() -> Iterator[list[int]]:
    """Forward signals to the started processes; yield the list of those received."""
    signals: list[int] = []

    def pass_on(signum: int, _frame: object) -> None:
        signals.append(signum)
        _signal_all(signum)

    before = replace_handlers(ENDING, pass_on)
    try:
        yield signals
    finally:
        restore_handlers(before)


def _signal_all(signum: int) -> None:
    for process in multiprocessing.active_children():
        os.kill(process.pid, signum)  # type: ignore[arg-type]


def _child(index: int, ranks: range, variables: dict[str, str], work: Any) -> None:
    """Run a rank as under torchrun, in a started process."""
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
    # A rank that waits for others to join cannot raise a KeyboardInterrupt.
    replace_handlers(ENDING, signal.SIG_DFL)
    if not multiprocessing.parent_process().is_alive():  # type: ignore[union-attr]
        os._exit(1)  # it died before this process could ask to be killed with it
    # Outside the terminal's process group, so Ctrl-C reaches only the parent, which forwards it.
    os.setpgrp()
    os.environ.update(variables, RANK=str(ranks[index]), LOCAL_RANK=str(index))
    # A spawned process would spawn its loader workers too, each of which would import torch.
    multiprocessing.set_start_method(None, force=True)
    if "OMP_NUM_THREADS" not in os.environ:
        # Processes that each used all cores would slow each other down.
        torch.set_num_threads(max(1, torch.get_num_threads() // len(ranks)))
    _run_rank(*work)


def _interruptible(main_func: Callable[..., Any], *args: Any) -> Any:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return main_func(*args)


def _run_rank(main_func: Callable[..., Any], args: tuple[Any, ...], *how: Any) -> Any:
    """Join the other processes, call the function, and leave them."""
    from torch.distributed.elastic.multiprocessing.errors import record

    @record  # hands an error to torchrun, which prints it last
    def run() -> Any:
        try:
            environment.join_processes(*how)
            return main_func(*args)
        except Exception as error:
            if dist.is_torchelastic_launched():
                # torchrun ends all ranks when one has failed. It would itself fail if this
                # truncated the file with this error.
                with suppress(ValueError):  # outside the main thread
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
            report = f"rank {comm.get_rank()} failed:\n\n{traceback.format_exc()}"
            first = _first_error(report)
            if first == report:
                raise
            raise RuntimeError(first) from error
        finally:
            # After an error other ranks may wait for this one, and leaving would wait for them.
            if not isinstance(sys.exc_info()[1], Exception):
                environment.leave_processes()

    return run()


def _first_error(report: str) -> str:
    """Return the report of the first rank that failed, which may be this one."""
    # Without a process group or the server of its store, no other report is known.
    with suppress(RuntimeError, ValueError):
        store = dist.distributed_c10d._get_default_store()
        report = store.compare_set("hooktrain/first_error", "", report).decode()
    return report
