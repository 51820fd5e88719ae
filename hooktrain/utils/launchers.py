"""Which launcher has started this process, its place among the others, and their process group."""

import gc
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, get_args

import torch
import torch.distributed as dist

# Its functions have the default group of the moment of the import as default arguments. Imported
# later, as the first optimizer does, they keep that group's threads alive after its end, and one
# of them that is still busy when the interpreter exits aborts the process.
import torch.distributed.nn.functional

from hooktrain.utils import comm
from hooktrain.utils.slurm import expand_task_counts, first_node

__all__ = [
    "DEFAULT_PORT",
    "DEFAULT_TIMEOUT",
    "Launcher",
    "Place",
    "choose_backend",
    "destroy_process_group",
    "infer_launcher",
    "init_process_group",
    "resolve",
    "restart_count",
    "set_device",
]

logger = logging.getLogger(__name__)

Launcher = Literal["none", "pytorch", "slurm", "mpi"]
DEFAULT_PORT = 29500
DEFAULT_TIMEOUT = timedelta(minutes=30)

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OPEN_MPI = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")


@dataclass(frozen=True)
class Place:
    """The place of a process in a run.

    Attributes:
        rank: its number, from 0 to ``world_size - 1``.
        local_rank: its number among those on its machine.
        world_size: the number of processes.
        local_world_size: the number of processes on its machine.
        address: of the machine of rank 0, where the processes meet.
        port: of that machine.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    address: str = "127.0.0.1"
    port: int = DEFAULT_PORT


def infer_launcher() -> Launcher:
    """What has started this process, from the environment variables that it sets.

    ``"pytorch"`` is torchrun, or anybody who sets ``WORLD_SIZE`` as torchrun does; ``"mpi"`` is
    mpirun or mpiexec, also inside of a SLURM job, whose variables then count machines; ``"slurm"``
    is srun. A job's batch script is no task of srun, so it is ``"none"`` there.
    """
    env = os.environ
    if "WORLD_SIZE" in env:
        return "pytorch"
    if "OMPI_COMM_WORLD_LOCAL_RANK" in env:
        return "mpi"
    if "SLURM_NTASKS" in env and not ("SLURM_JOB_ID" in env and "SLURM_STEP_ID" not in env):
        return "slurm"
    return "mpi" if "PMI_RANK" in env and "PMI_SIZE" in env else "none"


def restart_count() -> int:
    """How often torchrun has restarted the run after a failure; 0 in its first attempt."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def resolve(launcher: Launcher, port: int | None = None) -> Place:
    """The place of this process, from the variables that its launcher has set.

    With SLURM and MPI ``MASTER_ADDR`` and ``MASTER_PORT`` say where to meet, if they are set.
    Otherwise it is the first node of SLURM's list, this machine for an MPI run on one machine, and
    port 29500. Set ``MASTER_PORT`` for two runs on one machine.

    Args:
        launcher: see :func:`infer_launcher`.
        port: to meet at, with SLURM and MPI; goes before ``MASTER_PORT``.

    Raises:
        ValueError: for an unknown launcher, and for variables that are missing or no numbers.
    """
    if launcher == "none":
        return Place()
    if launcher == "pytorch":
        return _from_torchrun(os.environ)
    chosen_port = _number(os.environ, "MASTER_PORT", DEFAULT_PORT) if port is None else port
    if launcher == "slurm":
        return _from_slurm(os.environ, chosen_port)
    if launcher == "mpi":
        return _from_mpi(os.environ, chosen_port)
    raise ValueError(f"launcher must be one of {get_args(Launcher)}, got {launcher!r}")


def init_process_group(
    launcher: Launcher,
    backend: str | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    port: int | None = None,
) -> Place:
    """Join the other processes that the launcher has started. Collective.

    Makes the default process group and one for each machine, and takes the accelerator of the
    local rank as the current one. No environment variable is changed. For ``"none"`` nothing
    happens.

    Args:
        launcher: see :func:`infer_launcher`.
        backend: of the group; None is the accelerator's (nccl for CUDA), and gloo without one.
        timeout: of the collectives.
        port: see :func:`resolve`.

    Raises:
        ValueError: as :func:`resolve`; or a machine has fewer accelerators than processes.
    """
    place = resolve(launcher, port)
    if launcher == "none":
        return place
    chosen = choose_backend(backend, place.local_world_size)
    set_device(place.local_rank)
    host = f"[{place.address}]" if ":" in place.address else place.address
    url = "env://" if launcher == "pytorch" else f"tcp://{host}:{place.port}"
    # torch exports these names only where distributed is built in, which hides them from mypy.
    meeting = dist.rendezvous(url, place.rank, place.world_size, timeout=timeout)  # type: ignore[attr-defined]
    store, *_ = next(meeting)
    store.set_timeout(timeout)
    if place.world_size > place.local_world_size:
        _warn_of_restarts(os.environ)
    else:
        # torchrun's store outlives a restart, with the addresses of the dead ranks in it. Each of
        # several machines counts the restarts for itself, so that the number is of no use there.
        store = dist.PrefixStore(f"attempt{restart_count()}", store)  # type: ignore[attr-defined]
    dist.init_process_group(
        chosen, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout
    )
    comm.create_local_process_group(place.local_world_size)
    return place


def _warn_of_restarts(env: Mapping[str, str]) -> None:
    restarts = env.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if restarts and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        logger.warning(
            "Restarted processes of several machines often do not find each other, since torchrun "
            "lets them meet where the dead ones have met. For a fresh place at each restart set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and use --rdzv-backend=c10d"
        )


def destroy_process_group() -> None:
    """Leave the process group, if there is one; its threads have ended when this returns.

    A model in DistributedDataParallel holds it too: let go of the model first.
    """
    if dist.is_available() and dist.is_initialized():
        gc.collect()  # models that are held by nothing but cycles
        dist.destroy_process_group()


def choose_backend(backend: str | None, local_world_size: int) -> str:
    """The backend for so many processes on this machine; None takes the accelerator's.

    Raises:
        ValueError: if there are fewer accelerators than processes that need one each.
    """
    if not torch.accelerator.is_available():
        return backend or "gloo"
    device = torch.accelerator.current_accelerator()
    assert device is not None
    chosen = backend or dist.get_default_backend_for_device(device)
    if chosen != "gloo" and local_world_size > torch.accelerator.device_count():
        raise ValueError(
            f"{local_world_size} processes need a GPU each, and this machine has "
            f"{torch.accelerator.device_count()}: ask for fewer, or give backend='gloo'"
        )
    return chosen


def set_device(local_rank: int) -> None:
    """Make the accelerator of a local rank the current one, if there are several."""
    if torch.accelerator.is_available() and (count := torch.accelerator.device_count()) > 1:
        # With gloo there may be more processes than devices.
        device = torch.accelerator.current_accelerator()
        torch.get_device_module(device).set_device(local_rank % count)


def _from_torchrun(env: Mapping[str, str]) -> Place:
    _require(env, _TORCHRUN, "torchrun's environment variables")
    return Place(
        rank=_number(env, "RANK"),
        local_rank=_number(env, "LOCAL_RANK"),
        world_size=_number(env, "WORLD_SIZE"),
        local_world_size=_number(env, "LOCAL_WORLD_SIZE"),
        address=env["MASTER_ADDR"],
        port=_number(env, "MASTER_PORT"),
    )


def _from_slurm(env: Mapping[str, str], port: int) -> Place:
    _require(env, ("SLURM_PROCID", "SLURM_NTASKS"), "srun's environment variables")
    rank = _number(env, "SLURM_PROCID")
    # That of the step, which may be smaller than its job.
    world_size = _number(env, "SLURM_STEP_NUM_TASKS", _number(env, "SLURM_NTASKS"))
    local_size = _slurm_tasks_here(env, world_size)
    return Place(
        rank=rank,
        local_rank=_number(env, "SLURM_LOCALID", rank % local_size),
        world_size=world_size,
        local_world_size=local_size,
        address=env.get("MASTER_ADDR") or _first_slurm_node(env),
        port=port,
    )


def _slurm_tasks_here(env: Mapping[str, str], world_size: int) -> int:
    counts = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE")
    if counts is None:
        nodes = _number(env, "SLURM_STEP_NUM_NODES", _number(env, "SLURM_NNODES", 1))
        return max(1, world_size // nodes)
    sizes = expand_task_counts(counts)
    return sizes[min(_number(env, "SLURM_NODEID", 0), len(sizes) - 1)]


def _first_slurm_node(env: Mapping[str, str]) -> str:
    names = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    nodes = next((env[name] for name in names if env.get(name)), None)
    if nodes is None:
        raise ValueError("SLURM_NODELIST is missing: set it, or MASTER_ADDR, to the node of rank 0")
    return first_node(nodes)


def _from_mpi(env: Mapping[str, str], port: int) -> Place:
    if "OMPI_COMM_WORLD_RANK" in env or "OMPI_COMM_WORLD_LOCAL_RANK" in env:  # Open MPI
        names = tuple(f"OMPI_COMM_WORLD_{name}" for name in _OPEN_MPI)
    else:  # MPICH and Intel MPI
        names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    _require(env, names, "MPI's environment variables")
    rank, world_size, local_rank, local_size = (_number(env, name) for name in names)
    address = env.get("MASTER_ADDR")
    if not address and local_size < world_size:
        raise ValueError(
            f"MPI has started {world_size} processes, {local_size} of them here: set MASTER_ADDR "
            "to the address of the machine of rank 0, as in mpirun -x MASTER_ADDR=10.0.0.1 ..."
        )
    return Place(rank, local_rank, world_size, local_size, address or "127.0.0.1", port)


def _require(env: Mapping[str, str], names: tuple[str, ...], whose: str) -> None:
    if missing := [name for name in names if name not in env]:
        raise ValueError(
            f"{', '.join(missing)} of {whose} are missing: set them too, or unset the others "
            f"({', '.join(n for n in names if n in env)}) to let launch() start the processes"
        )


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = env.get(name)
    if value is None and default is not None:
        return default
    if value is None or not value.isdigit():
        raise ValueError(f"the environment variable {name} must be a number, got {value!r}")
    return int(value)
