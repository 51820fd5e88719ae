"""The process of a rank: its launcher, how it joins the others, its device and its seed."""

import atexit
import gc
import logging
import os
import resource
import signal
import sys
import time
from ctypes import py_object, pythonapi
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

from hooktrain.utils import comm
from hooktrain.utils.env import seed_all_rng
from hooktrain.utils.tensors import Device

logger = logging.getLogger(__name__)

Launcher = Literal["none", "pytorch", "slurm", "mpi", "submitit"]
DEFAULT_TIMEOUT = timedelta(minutes=30)

# The variables for rank, local rank, world size and local world size. The first launcher whose
# variables are set has started this process: mpirun's daemons may be tasks of srun, and srun may
# start torchrun, or submitit's local executor.
_VARIABLES: dict[Launcher, tuple[str, ...]] = {
    "pytorch": ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    "mpi": (  # Open MPI
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "submitit": (  # its local executor, on one machine; on a cluster submitit uses srun
        "SUBMITIT_LOCAL_GLOBALID",
        "SUBMITIT_LOCAL_LOCALID",
        "SUBMITIT_LOCAL_NTASKS",
        "SUBMITIT_LOCAL_NTASKS",
    ),
    # The third is set for the tasks of srun only, not for the batch script of a job. The last one
    # lists the ranks on the machine, such as 2,3.
    "slurm": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_GTIDS"),
}


@dataclass(frozen=True)
class RankInfo:
    """The ranks of a process and the numbers of processes.

    Attributes:
        rank: the rank in the run, from 0 to ``world_size - 1``.
        local_rank: the rank on the machine.
        world_size: the number of processes.
        local_world_size: the number of processes on the machine.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1


def infer_launcher() -> Launcher:
    """The launcher of this process, from the environment variables.

    ``"pytorch"`` is torchrun, or another launcher that sets ``WORLD_SIZE``; ``"mpi"`` is Open MPI's
    mpirun; ``"slurm"`` is srun; ``"submitit"`` is submitit's local executor. The launcher of the
    batch script of a SLURM job is ``"none"``.
    """
    for launcher, (_, _, world_size, _) in _VARIABLES.items():
        if world_size in os.environ:
            return launcher
    return "none"


def get_rank_info(launcher: Launcher) -> RankInfo:
    """The ranks of this process, from the environment variables of the launcher.

    Args:
        launcher: see :func:`infer_launcher`.

    Raises:
        ValueError: if the launcher is unknown, or a variable is missing or not a number.
    """
    if launcher == "none":
        return RankInfo()
    if launcher not in _VARIABLES:
        raise ValueError(
            f"launcher must be 'none' or one of {[*_VARIABLES]}, got {launcher!r}"
        )
    names = _VARIABLES[launcher]
    if os.environ.get(names[2]) == "1":  # a single process need not know more
        return RankInfo()
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise ValueError(
            f"the environment lacks {missing} of {names}. If each machine or container has one "
            "process, set LOCAL_RANK=0 LOCAL_WORLD_SIZE=1; for a single process, unset WORLD_SIZE"
        )
    *numbers, here = [os.environ[name] for name in names]
    if launcher == "slurm":
        here = str(len(here.split(",")))
    return RankInfo(*map(int, (*numbers, here)))


def count_processes() -> int:
    """The number of processes of the run, even before they have joined each other."""
    if dist.is_initialized():  # perhaps by a script whose variables are incomplete
        return dist.get_world_size()
    return get_rank_info(infer_launcher()).world_size


def restart_count() -> int:
    """How often torchrun has restarted the run after a failure, or SLURM has requeued its job."""
    names = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    return sum(int(os.environ.get(name, "0")) for name in names)


def join_processes(
    launcher: Launcher,
    backend: str | None = None,
    timeout: timedelta | float = DEFAULT_TIMEOUT,
) -> None:
    """Join the other processes that the launcher has started. A collective.

    This initialises the default process group, and makes the accelerator of the local rank the
    current one. It raises the process's limit of open files as far as allowed, and sets
    ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``, as torchrun does. If
    torchrun is killed, the process is killed with it (Linux).

    Args:
        launcher: see :func:`infer_launcher`.
        backend: the backend of the group; None is the accelerator's (nccl for CUDA), and gloo if
            there is no accelerator.
        timeout: the timeout of collectives, as a timedelta or in seconds.

    Raises:
        ValueError: as :func:`get_rank_info`; or if there are several machines, and ``MASTER_ADDR``,
            the address of the machine of rank 0, is not set.
    """
    # The functions of this module have the default group as a default argument. If it were first
    # imported while a group exists, as building an optimizer does, it would keep the group's
    # threads alive after the group is destroyed. A thread that is busy at the interpreter's exit
    # aborts the process.
    import torch.distributed.nn.functional

    if dist.is_torchelastic_launched():
        # Otherwise the ranks would outlive torchrun, and keep the output folder locked for the
        # next run.
        _prctl_pr_set_pdeathsig(signal.SIGKILL)
    info = get_rank_info(launcher)
    # gloo connects each pair of ranks, and a connection takes a file descriptor.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=timeout)
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None:
        # There may be more processes than devices.
        index = info.local_rank % torch.accelerator.device_count()
        device = choose_device(torch.device(device.type, index))
    if backend is None:
        backend = dist.get_default_backend_for_device(device or "cpu")
    dist.init_process_group(
        backend,
        # Given a device, the group connects at once, so connection errors are raised here.
        device_id=None if backend == "gloo" else device,
        store=_store(info, timeout),
        rank=info.rank,
        world_size=info.world_size,
        timeout=timeout,
    )
    atexit.register(_leave_at_exit)
    comm.object_group(timeout)
    # comm.get_local_rank() and comm.get_local_size() read these.
    os.environ["LOCAL_RANK"] = str(info.local_rank)
    os.environ["LOCAL_WORLD_SIZE"] = str(info.local_world_size)


def meeting_place(
    dist_url: str | None, num_machines: int
) -> tuple[dict[str, str], Any]:
    """The address at which the processes that this one is about to start will meet.

    Args:
        dist_url: an address of machine 0, if there are several machines.
        num_machines: the number of machines.

    Returns:
        The environment variables with the address, and the store if this process serves it.

    Raises:
        ValueError: for several machines, if ``dist_url`` is not an address with a port.
    """
    if num_machines > 1:
        url = urlparse(dist_url or "")
        if url.scheme != "tcp" or not url.hostname or not url.port:
            raise ValueError(
                "dist_url must be an address of machine 0 with a free port, such as "
                f"'tcp://10.0.0.1:29500', got {dist_url!r}"
            )
        return {"MASTER_ADDR": url.hostname, "MASTER_PORT": str(url.port)}, None
    # The parent binds the port, so that no other program takes it before the children connect.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    return variables, store


def _store(info: RankInfo, timeout: timedelta) -> Any:
    """The store of the process group, without the addresses of dead processes.

    The processes meet at ``MASTER_ADDR``, by default this machine if the run uses no other, and
    ``MASTER_PORT``, by default 29500. Two runs on one machine need different ports.
    """
    c10d: Any = dist  # torch's stubs lack these names
    is_one_machine = info.world_size == info.local_world_size
    if is_one_machine:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    meeting = c10d.rendezvous("env://", info.rank, info.world_size, timeout=timeout)
    store, *_ = next(meeting)
    if is_one_machine:
        # torchrun's store survives a restart, and still has the addresses of the dead ranks. On
        # several machines the restart counts may differ, so they cannot be used as a prefix.
        store = c10d.PrefixStore(f"attempt{restart_count()}", store)
    return store


def leave_processes() -> None:
    """Leave the process group, if there is one, and end its threads.

    A model in DistributedDataParallel keeps the group alive, so delete the model first.
    """
    if dist.is_initialized():
        gc.collect()  # for models in reference cycles
        dist.destroy_process_group()


def _leave_at_exit() -> None:
    """Leave the process group when the interpreter exits, if the script has not left it.

    After an uncaught error the process must not wait for messages that other ranks may never send.
    gloo's destructor would wait, so one more reference keeps it from being called.
    """
    if hasattr(sys, "last_value"):
        pythonapi.Py_IncRef(py_object(dist.distributed_c10d._world.pg_map))
    elif dist.is_initialized():
        leave_processes()
        # A model in DistributedDataParallel may still hold the group. gloo's threads need the
        # interpreter to free the tensors that they have sent. A thread that waits for the
        # interpreter after its end aborts the process.
        time.sleep(0.1)


def choose_device(wanted: Device | None = None) -> torch.device:
    """The device of this process; an accelerator becomes the current one.

    Args:
        wanted: the device, such as ``"cpu"``, ``"cuda"`` or ``"cuda:1"``. None is the accelerator,
            or the CPU if there is none. Without a number it is the current device, which
            :func:`join_processes` sets for each rank.

    Raises:
        RuntimeError: if the name is unknown, or names an accelerator and there is none.
    """
    if wanted is None:
        wanted = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    device = torch.device(wanted)
    if device.type == "cpu":
        return torch.device("cpu")
    if device.index is not None:
        torch.accelerator.set_device_index(device.index)
    return torch.device(device.type, torch.accelerator.current_device_index())


def set_random_seed(
    seed: int | None = None, deterministic: bool = False, diff_rank_seed: bool = False
) -> int:
    """Seed the generators of Python, numpy and torch. A collective if no seed is given.

    Args:
        seed: the seed, from 0 to 2^32 - 1; for None or a negative number, the ranks draw one
            together.
        deterministic: whether torch uses deterministic algorithms only, and raises an error for an
            operation that has none.
        diff_rank_seed: whether to add the rank to the seed of each rank.

    Returns:
        The seed, without the rank.
    """
    if seed is None or seed < 0:
        seed = comm.shared_random_seed()
        logger.info("No seed is configured: drew %d", seed)
    own = (seed + comm.data_parallel_rank()) % 2**32
    seed_all_rng(own if diff_rank_seed else seed)
    if deterministic:
        # cuBLAS reads this variable at its first use.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)
    return seed


@dataclass(frozen=True)
class Environment:
    """Settings of a strategy's process.

    Args:
        launcher: the program that started the processes; None infers it, see
            :func:`infer_launcher`.
        backend: the backend of the process group, such as ``"nccl"`` or ``"gloo"``; None is the
            device's default.
        timeout: the timeout of collectives, as a timedelta or in seconds.
        seed: see :func:`set_random_seed`; the same on all ranks.
        diff_rank_seed: whether to add the rank to the seed of each rank.
        deterministic: whether torch uses deterministic algorithms only, and raises an error for an
            operation that has none. cuDNN then does not search for the fastest algorithm.
    """

    launcher: Launcher | None = None
    backend: str | None = None
    timeout: timedelta | float = DEFAULT_TIMEOUT
    seed: int | None = None
    diff_rank_seed: bool = False
    deterministic: bool = False
