"""A process of a run: who started it, how it joins the others, its device and seed."""

import atexit
import gc
import logging
import os
import resource
import shutil
import signal
import subprocess
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

logger = logging.getLogger(__name__)

Launcher = Literal["none", "pytorch", "slurm", "mpi"]
DEFAULT_TIMEOUT = timedelta(minutes=30)

# With fewer ranks all connect at the start, and so hear at once of one that dies.
MANY = 128

# Rank, rank on the machine, number of processes, number on the machine. The first row
# that is set is who started this process: mpirun's daemons may be tasks of srun, and srun
# may start torchrun.
_VARIABLES: dict[Launcher, tuple[str, ...]] = {
    "pytorch": ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    "mpi": (  # Open MPI
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "slurm": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_TASKS_PER_NODE"),
}


@dataclass(frozen=True)
class RankInfo:
    """Which of the processes of a run this one is.

    Attributes:
        rank: its number, from 0 to ``world_size - 1``.
        local_rank: its number among the processes on its machine.
        world_size: the number of processes.
        local_world_size: the number of processes on its machine.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1


def infer_launcher() -> Launcher:
    """Who started this process, from the environment variables.

    ``"pytorch"`` is torchrun, or anybody who sets ``WORLD_SIZE`` as torchrun does;
    ``"mpi"`` is Open MPI's mpirun; ``"slurm"`` is srun. The batch script of a SLURM job
    has the variables of srun, and is ``"none"``.
    """
    is_batch_script = "SLURM_JOB_ID" in os.environ and "SLURM_STEP_ID" not in os.environ
    for launcher, (_, _, world_size, _) in _VARIABLES.items():
        if launcher == "slurm" and is_batch_script:
            continue
        if world_size in os.environ:
            return launcher
    return "none"


def get_rank_info(launcher: Launcher) -> RankInfo:
    """The ranks of this process, from the environment variables of its launcher.

    Args:
        launcher: see :func:`infer_launcher`.

    Raises:
        KeyError: if a variable is missing.
        ValueError: for an unknown launcher, or if a variable is not a number.
    """
    if launcher == "none":
        return RankInfo()
    if launcher not in _VARIABLES:
        raise ValueError(
            f"launcher must be 'none', 'pytorch', 'slurm' or 'mpi', got {launcher!r}"
        )
    *values, here = [os.environ[name] for name in _VARIABLES[launcher]]
    if launcher == "slurm":
        here = _tasks_by_machine(here)[int(os.environ.get("SLURM_NODEID", "0"))]
    return RankInfo(*map(int, (*values, here)))


def _tasks_by_machine(text: str) -> list[str]:
    """SLURM writes 2(x3),1 for two tasks on each of three machines, and one on the last."""
    counts = []
    for part in text.split(","):
        count, _, machines = part.rstrip(")").partition("(x")
        counts += [count] * int(machines or 1)
    return counts


def find_address(launcher: Launcher, info: RankInfo) -> tuple[str, int]:
    """Where the processes of SLURM and MPI meet: the host and the port of rank 0.

    That is ``MASTER_ADDR`` and ``MASTER_PORT`` if these are set. Otherwise it is SLURM's
    first node, or this machine if the run uses no other one, at port 29500. Each of two
    runs on one machine needs a port that is not the other's.

    Args:
        launcher: see :func:`infer_launcher`.
        info: see :func:`get_rank_info`.

    Raises:
        ValueError: if nothing says where rank 0 is.
    """
    address = os.environ.get("MASTER_ADDR")
    port = int(os.environ.get("MASTER_PORT", "29500"))
    if address is None and info.world_size == info.local_world_size:
        address = "127.0.0.1"
    elif address is None and launcher == "slurm" and shutil.which("scontrol"):
        command = ["scontrol", "show", "hostnames", os.environ["SLURM_NODELIST"]]
        address = subprocess.check_output(command, text=True, timeout=60).split()[0]
    elif address is None:
        raise ValueError(
            "set MASTER_ADDR to the address of the machine of rank 0, such as 10.0.0.1"
        )
    return address, port


def count_processes(launcher: Launcher | None = None) -> int:
    """The number of processes of the run, also before they have joined each other.

    Args:
        launcher: who started them; None finds out.
    """
    started = get_rank_info(launcher or infer_launcher()).world_size
    return max(comm.get_world_size(), started)


def restart_count() -> int:
    """How often torchrun has restarted the run after a failure; 0 at first."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def join_processes(
    launcher: Launcher,
    backend: str | None = None,
    timeout: timedelta | float = DEFAULT_TIMEOUT,
) -> None:
    """Join the other processes that the launcher has started. A collective.

    This makes the default process group, and makes the accelerator of the local rank the
    current one. The process may then open as many files as the system lets it. More than
    :data:`MANY` ranks connect by gloo only where they talk. When torchrun is killed, the
    process is killed with it (Linux).

    Args:
        launcher: see :func:`infer_launcher`.
        backend: of the group; None is the accelerator's (nccl for CUDA), and gloo without
            one.
        timeout: of the collectives; a number is of seconds.

    Raises:
        KeyError: as :func:`get_rank_info`.
        ValueError: as :func:`get_rank_info` and :func:`find_address`.
    """
    # Its functions have the default group as a default argument. Imported while there is
    # one, as the first optimizer does, it keeps the group's threads alive after the end
    # of the group, and a thread that is busy when the interpreter exits aborts the
    # process.
    import torch.distributed.nn.functional

    if dist.is_torchelastic_launched():
        # The ranks would train on without torchrun, and keep the output folder from its
        # successor.
        _prctl_pr_set_pdeathsig(signal.SIGKILL)
    info = get_rank_info(launcher)
    # A connection takes a descriptor, and gloo connects each rank with each other one.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if info.world_size > MANY:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    if not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=timeout)
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None:
        # There may be more processes than devices.
        count = torch.accelerator.device_count()
        torch.accelerator.set_device_index(info.local_rank % count)
    if backend is None:
        backend = dist.get_default_backend_for_device(device or "cpu")
    bound = None
    if device is not None and backend != "gloo":
        # Its device is known from the start, and joining shows whether they connect.
        bound = torch.device(device.type, torch.accelerator.current_device_index())
    dist.init_process_group(
        backend,
        device_id=bound,
        store=_store(launcher, info, timeout),
        rank=info.rank,
        world_size=info.world_size,
        timeout=timeout,
    )
    atexit.register(_leave_at_exit)
    comm.object_group(timeout)
    comm.set_local_rank(info.local_rank, info.local_world_size)


def meeting_place(
    dist_url: str | None, num_machines: int
) -> tuple[dict[str, str], Any]:
    """Where the processes meet that one process on each machine is about to start.

    Args:
        dist_url: an address of machine 0, if there are several machines.
        num_machines: the number of machines.

    Returns:
        The variables that say it, and the store there, if it is this process's.

    Raises:
        ValueError: for several machines, if that is no address with a port.
    """
    if num_machines > 1:
        url = urlparse(dist_url or "")
        if url.scheme != "tcp" or not url.hostname or not url.port:
            raise ValueError(
                "dist_url must be an address of machine 0 and a free port of it, such as "
                f"'tcp://10.0.0.1:29500', got {dist_url!r}"
            )
        return {"MASTER_ADDR": url.hostname, "MASTER_PORT": str(url.port)}, None
    # The parent keeps the port, so that nobody can take it before a child comes.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    return variables, store


def _store(launcher: Launcher, info: RankInfo, timeout: timedelta) -> Any:
    """The store where the processes meet, without the addresses of dead ones."""
    c10d: Any = dist  # mypy does not know of these names
    size = info.world_size
    if launcher != "pytorch":
        host, port = find_address(launcher, info)
        return c10d.TCPStore(host, port, size, info.rank == 0, timeout)
    meeting = c10d.rendezvous("env://", info.rank, size, timeout=timeout)
    store, *_ = next(meeting)
    store.set_timeout(timeout)
    if size == info.local_world_size:
        # torchrun's store survives a restart, with the addresses of the dead ranks in it.
        # Each of several machines has its own count of restarts, so the count does not
        # help there.
        return c10d.PrefixStore(f"attempt{restart_count()}", store)
    is_shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if is_shared and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        logger.warning(
            "Restarted processes will find the addresses of the dead ones: set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and use --rdzv-backend=c10d"
        )
    return store


def leave_processes() -> None:
    """Leave the process group, if there is one; its threads have ended then.

    A model in DistributedDataParallel holds the group too: let go of the model first.
    """
    if dist.is_initialized():
        gc.collect()  # models that only cycles hold
        dist.destroy_process_group()


def _leave_at_exit() -> None:
    """Leave the process group when the interpreter ends, if nobody has left it.

    After an uncaught error nothing waits for what other ranks may never send. gloo's destructor
    would do so; a further reference keeps it from being called.
    """
    if hasattr(sys, "last_value"):
        pythonapi.Py_IncRef(py_object(dist.distributed_c10d._world.pg_map))
    elif dist.is_initialized():
        leave_processes()
        # A model in DistributedDataParallel still holds the group. gloo's threads need the
        # interpreter to free what they have sent; one that waits for it later aborts the process.
        time.sleep(0.1)


def choose_device(wanted: str | torch.device | None = None) -> torch.device:
    """The device of this process; an accelerator becomes the current one.

    Args:
        wanted: such as ``"cpu"``, ``"cuda"`` or ``"cuda:1"``. None is the accelerator, or
            the CPU where there is none. Without a number it is the current one, which
            :func:`join_processes` has chosen for each rank.

    Raises:
        ValueError: if it is not there, or no name of a device.
    """
    there = torch.accelerator.current_accelerator(check_available=True)
    try:
        device = torch.device(wanted or there or "cpu")
    except RuntimeError as error:
        raise ValueError(
            f"device={str(wanted)!r} is no device, such as '{there or 'cpu'}': {error}"
        ) from None
    if device.type == "cpu":
        return torch.device("cpu")
    if there is None or device.type != there.type:
        raise ValueError(
            f"device={str(wanted)!r} is not there, but {there or 'the CPU only'}"
        )
    if device.index is not None:
        torch.accelerator.set_device_index(device.index)
    return torch.device(device.type, torch.accelerator.current_device_index())


def set_random_seed(
    seed: int | None = None, deterministic: bool = False, diff_rank_seed: bool = False
) -> int:
    """Seed the generators of Python, numpy and torch. A collective if there is no seed.

    Args:
        seed: from 0 to 2^32 - 1; None or a negative number draws one that all ranks
            share.
        deterministic: let torch use deterministic algorithms only, and raise an error
            where there is none.
        diff_rank_seed: seed each rank with the sum of the seed and its rank.

    Returns:
        The seed, without the rank.
    """
    if seed is None or seed < 0:
        seed = comm.shared_random_seed()
        logger.info("No seed is configured: drew %d", seed)
    own = (seed + comm.data_parallel_rank()) % 2**32
    seed_all_rng(own if diff_rank_seed else seed)
    if deterministic:
        # cuBLAS reads this variable when it is used first.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True
        torch.use_deterministic_algorithms(True)
    return seed


@dataclass(frozen=True)
class Environment:
    """How a strategy sets up its process. What is not asked for is left as it is.

    Args:
        launcher: who started the processes; None finds out, see :func:`infer_launcher`.
        backend: of the process group, such as ``"nccl"`` or ``"gloo"``; None takes the
            one for the device.
        timeout: of the collectives; a number is of seconds.
        seed: see :func:`set_random_seed`; the same on all ranks.
        diff_rank_seed: seed each rank with the sum of the seed and its rank.
        deterministic: let torch use deterministic algorithms only, and raise an error
            where there is none. cuDNN does not try which algorithm is the fastest then.
    """

    launcher: Launcher | None = None
    backend: str | None = None
    timeout: timedelta | float = DEFAULT_TIMEOUT
    seed: int | None = None
    diff_rank_seed: bool = False
    deterministic: bool = False
