"""Start the processes of a distributed run, or join those that torchrun has started."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hooktrain.engine.processes import run_processes
from hooktrain.utils import comm

DEFAULT_TIMEOUT = timedelta(minutes=30)

_TORCHRUN_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)


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

    - Started by torchrun, which has started the processes already, this one joins them; what
      torchrun says goes before `dist_url` and `machine_rank`.
    - A single process is a plain call, without a process group.
    - Otherwise it starts `num_gpus_per_machine` processes and waits for them. Start the same
      program on each machine.

    In a distributed run the process group, and one for each machine (`comm.get_local_rank()`), is
    there when `main_func` begins and destroyed when it ends, well or not. With CUDA the current
    device is that of the local rank.

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
        ValueError: the arguments contradict each other, the machine, or torchrun.
        RuntimeError: a started process failed; names its rank and holds its traceback. The others
            have been ended.
        SystemExit: a started process called `sys.exit()`; raised when all of them have ended.
    """
    _check_counts(num_gpus_per_machine, num_machines, machine_rank)
    if _under_torchrun():
        local_size = _check_torchrun(num_gpus_per_machine, num_machines)
        return _join_torchrun(main_func, args, timeout, _choose_backend(backend, local_size))
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
        backend=_choose_backend(backend, num_gpus_per_machine),
        local_size=num_gpus_per_machine,
        first_rank=first_rank,
        world_size=num_machines * num_gpus_per_machine,
        dist_url=None if automatic else dist_url,
        store_port=0 if store is None else store.port,
        timeout=timeout,
    )
    ranks = range(first_rank, first_rank + num_gpus_per_machine)
    return run_processes(ranks, _child, (group, main_func, args), cleanup=_destroy_process_group)


def _check_counts(num_gpus_per_machine: int, num_machines: int, machine_rank: int) -> None:
    for name, count in (
        ("num_gpus_per_machine", num_gpus_per_machine),
        ("num_machines", num_machines),
    ):
        if count < 1:
            raise ValueError(f"{name} must be at least 1 (also on the CPU), got {count!r}")
    if not 0 <= machine_rank < num_machines:
        raise ValueError(f"machine_rank must be in [0, {num_machines}), got {machine_rank!r}")


def _choose_backend(backend: str | None, local_size: int) -> str:
    if backend == "gloo" or not torch.cuda.is_available():
        return backend or "gloo"
    if local_size > torch.cuda.device_count():
        raise ValueError(
            f"{local_size} processes need a GPU each, and this machine has "
            f"{torch.cuda.device_count()}: ask for fewer, or give backend='gloo'"
        )
    return backend or "nccl"


def _under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ or all(
        name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")
    )


def _check_torchrun(num_gpus_per_machine: int, num_machines: int) -> int:
    """The number of processes on this machine, if the arguments agree with it."""
    missing = [name for name in _TORCHRUN_VARIABLES if name not in os.environ]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} of torchrun's environment variables are missing: set them too, "
            "or unset RANK and WORLD_SIZE to let launch() start the processes"
        )
    local_size = int(os.environ["LOCAL_WORLD_SIZE"])
    machines = int(os.environ["WORLD_SIZE"]) // local_size
    for name, given, actual in (
        ("num_gpus_per_machine", num_gpus_per_machine, local_size),
        ("num_machines", num_machines, machines),
    ):
        if given not in (1, actual):  # 1 is the default
            raise ValueError(f"{name}={given!r}, but torchrun started {actual}: leave it out")
    return local_size


def _join_torchrun(
    main_func: Callable[..., Any], args: tuple[Any, ...], timeout: timedelta, backend: str
) -> Any:
    _set_device(int(os.environ["LOCAL_RANK"]))
    try:
        dist.init_process_group(backend, init_method="env://", timeout=timeout)
        comm.create_local_process_group(int(os.environ["LOCAL_WORLD_SIZE"]))
        return main_func(*args)
    finally:
        _destroy_process_group()


def _set_device(local_rank: int) -> None:
    if torch.cuda.is_available():
        # With gloo there may be more processes than devices.
        torch.cuda.set_device(local_rank % torch.cuda.device_count())


def _destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _tcp_store(port: int, **kwargs: Any) -> Any:
    # torch exports the name only where distributed is built in, which hides it from mypy.
    return dist.TCPStore("127.0.0.1", port, wait_for_workers=False, **kwargs)  # type: ignore[attr-defined]


def _child(rank: int, group: _Group, main_func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    _set_device(rank - group.first_rank)
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
