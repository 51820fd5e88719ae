"""Start the processes of a distributed run, or join those that a launcher has started."""

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from hooktrain.engine.processes import run_processes
from hooktrain.utils import comm
from hooktrain.utils.launchers import (
    DEFAULT_TIMEOUT,
    Launcher,
    Place,
    choose_backend,
    destroy_process_group,
    infer_launcher,
    init_process_group,
    resolve,
    set_device,
)

__all__ = ["DEFAULT_TIMEOUT", "launch"]

_FIRST_ERROR = "hooktrain/first_error"


@dataclass(frozen=True)
class _Group:
    """All that a process needs to know to join the others."""

    backend: str
    local_size: int
    first_rank: int
    world_size: int
    dist_url: str | None  # None: the store of the parent, at store_port
    store_port: int
    timeout: timedelta


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
    """Run `main_func(*args)` in every process of a distributed run.

    - Started by torchrun, srun or mpirun, which have started the processes already, this one joins
      them; what they say goes before `dist_url` and `machine_rank`.
      See :func:`~hooktrain.utils.launchers.resolve`.
    - A single process is a plain call, without a process group.
    - Otherwise it starts `num_gpus_per_machine` processes and waits for them. Start the same
      program on each machine.

    In a distributed run the process group, and one for each machine (`comm.get_local_rank()`), is
    there when `main_func` begins and destroyed when it ends, well or not. The current accelerator,
    if there is any, is that of the local rank. When a rank fails, the others fail too, since it
    has left them: they tell the error of the first.

    SIGINT and SIGTERM that reach the parent are handed on to its processes, and it waits for them
    to end. When the parent is killed, they are killed with it (Linux).

    Args:
        main_func: must be importable by name when processes are started.
        num_gpus_per_machine: processes on each machine; without CUDA they share the CPU.
        num_machines: the number of machines.
        machine_rank: the number of this machine, from 0.
        dist_url: where the processes meet, such as "tcp://192.168.1.7:29500", an address of machine
            0. With one machine None or "auto" find a place of their own.
        args: handed to `main_func`, pickled when processes are started.
        timeout: of the collectives.
        backend: of the process group; None is nccl with CUDA and gloo without.

    Returns:
        What `main_func` returned; when processes were started, a list of what it returned in each
        process of this machine, by local rank, which must be picklable.

    Raises:
        ValueError: the arguments contradict each other, the machine, or the launcher.
        RuntimeError: a started process failed; names its rank and holds its traceback. The others
            have been ended. Under a launcher: another rank failed before this one did.
        SystemExit: a started process called `sys.exit()`; raised when all of them have ended.
    """
    _check_counts(num_gpus_per_machine, num_machines, machine_rank)
    launcher = infer_launcher()
    place = resolve(launcher)
    if launcher == "pytorch" or place.world_size > 1:
        _check_agreement(place, launcher, num_gpus_per_machine, num_machines)
        # record() hands an error to torchrun, which prints it as the last thing.
        return record(_join)(main_func, args, launcher, backend, timeout)
    if num_machines * num_gpus_per_machine == 1:
        return main_func(*args)
    automatic = dist_url is None or dist_url == "auto"
    if automatic and num_machines > 1:
        raise ValueError(
            f"dist_url={dist_url!r} cannot tell {num_machines} machines where to meet: give an "
            "address of machine 0 and a free port of it, such as dist_url='tcp://10.0.0.1:29500'"
        )
    # The parent keeps the port it was given, so that nobody can take it before a child comes.
    store = _tcp_store(0, is_master=True) if automatic else None
    first_rank = machine_rank * num_gpus_per_machine
    group = _Group(
        backend=choose_backend(backend, num_gpus_per_machine),
        local_size=num_gpus_per_machine,
        first_rank=first_rank,
        world_size=num_machines * num_gpus_per_machine,
        dist_url=None if automatic else dist_url,
        store_port=0 if store is None else store.port,
        timeout=timeout,
    )
    ranks = range(first_rank, first_rank + num_gpus_per_machine)
    return run_processes(ranks, _child, (group, main_func, args), cleanup=destroy_process_group)


def _check_counts(num_gpus_per_machine: int, num_machines: int, machine_rank: int) -> None:
    for name, count in (
        ("num_gpus_per_machine", num_gpus_per_machine),
        ("num_machines", num_machines),
    ):
        if count < 1:
            raise ValueError(f"{name} must be at least 1 (also on the CPU), got {count!r}")
    if not 0 <= machine_rank < num_machines:
        raise ValueError(f"machine_rank must be in [0, {num_machines}), got {machine_rank!r}")


def _check_agreement(
    place: Place, launcher: Launcher, num_gpus_per_machine: int, num_machines: int
) -> None:
    name = {"pytorch": "torchrun", "slurm": "srun", "mpi": "mpirun"}[launcher]
    for argument, given, actual in (
        ("num_gpus_per_machine", num_gpus_per_machine, place.local_world_size),
        ("num_machines", num_machines, place.world_size // place.local_world_size),
    ):
        if given not in (1, actual):  # 1 is the default
            raise ValueError(f"{argument}={given!r}, but {name} started {actual}: leave it out")


def _join(
    main_func: Callable[..., Any],
    args: tuple[Any, ...],
    launcher: Launcher,
    backend: str | None,
    timeout: timedelta,
) -> Any:
    try:
        init_process_group(launcher, backend, timeout)
        return _call(main_func, args)
    finally:
        destroy_process_group()


def _call(main_func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return main_func(*args)
    except Exception as error:
        cause = _first_error(f"rank {comm.get_rank()} failed:\n\n{traceback.format_exc()}")
        if cause is None:
            raise
        raise RuntimeError(cause) from error


def _first_error(report: str) -> str | None:
    """Tell the other ranks of an error; what the first rank told, unless that is this one."""
    if not dist.is_initialized():
        return None
    try:
        # Not a collective: a request to the server of the store, which may have ended.
        store = dist.distributed_c10d._get_default_store()
        first: str = store.compare_set(_FIRST_ERROR, "", report).decode()
    except RuntimeError:
        return None
    return None if first == report else first


def _tcp_store(port: int, **kwargs: Any) -> Any:
    # torch exports the name only where distributed is built in, which hides it from mypy.
    return dist.TCPStore("127.0.0.1", port, wait_for_workers=False, **kwargs)  # type: ignore[attr-defined]


def _child(rank: int, group: _Group, main_func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    set_device(rank - group.first_rank)
    if "OMP_NUM_THREADS" not in os.environ:
        # Processes that take all cores each stand in each other's way: on two cores, two of two
        # threads take four times as long as two of one.
        torch.set_num_threads(max(1, torch.get_num_threads() // group.local_size))
    store = None
    if group.dist_url is None:
        store = _tcp_store(group.store_port, timeout=group.timeout)
    dist.init_process_group(
        group.backend,
        init_method=group.dist_url,
        store=store,
        rank=rank,
        world_size=group.world_size,
        timeout=group.timeout,
    )
    comm.create_local_process_group(group.local_size)
    return main_func(*args)
