"""A process of a run: who started it, how it joins the others, its settings, device and seed."""

import gc
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

from hooktrain.utils import comm
from hooktrain.utils.env import seed_all_rng

logger = logging.getLogger(__name__)

Launcher = Literal["none", "pytorch", "slurm", "mpi"]
DEFAULT_TIMEOUT = timedelta(minutes=30)

_OPEN_MPI = ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE")
# Rank, rank on the machine, number of processes, number on the machine. The first is who started
# this process: mpirun's daemons may be tasks of srun, and srun may start torchrun.
_VARIABLES: list[tuple[Launcher, tuple[str, ...]]] = [
    ("pytorch", ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")),
    ("mpi", tuple(f"OMPI_COMM_WORLD_{name}" for name in _OPEN_MPI)),
    (
        "slurm",
        ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_TASKS_PER_NODE"),
    ),
    (
        "mpi",
        ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS"),
    ),  # MPICH, Intel's
]


@dataclass(frozen=True)
class Place:
    """The place of a process in a run.

    Attributes:
        rank: its number, from 0 to ``world_size - 1``.
        local_rank: its number among those on its machine.
        world_size: the number of processes.
        local_world_size: the number of processes on its machine.
        url: where the processes meet.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    url: str = "env://"


def infer_launcher() -> Launcher:
    """Who started this process, from the environment variables.

    ``"pytorch"`` is torchrun, or anybody who sets ``WORLD_SIZE`` as torchrun does; ``"mpi"`` is
    mpirun or mpiexec; ``"slurm"`` is srun. The batch script of a SLURM job has the variables of
    srun, and is ``"none"``.
    """
    is_batch_script = "SLURM_JOB_ID" in os.environ and "SLURM_STEP_ID" not in os.environ
    for launcher, names in _VARIABLES:
        if names[2] in os.environ and not (launcher == "slurm" and is_batch_script):
            return launcher
    return "none"


def find_place(launcher: Launcher, port: int | None = None) -> Place:
    """The place of this process, from the environment variables that its launcher has set.

    The processes of SLURM and MPI meet at ``MASTER_ADDR`` and ``MASTER_PORT`` if these are set.
    Otherwise they meet at SLURM's first node, or on this machine if MPI uses no other one, at port
    29500. Each of two runs on one machine needs a port that is not the other's. Without
    ``LOCAL_WORLD_SIZE`` there is one process for each accelerator of a machine, or one machine.

    Args:
        launcher: see :func:`infer_launcher`.
        port: where the processes of SLURM and MPI meet, instead of ``MASTER_PORT``.

    Raises:
        ValueError: for an unknown launcher, or if a variable is missing or not a number.
    """
    if launcher == "none":
        return Place()
    env: Mapping[str, str] = os.environ
    if launcher == "pytorch" and {"LOCAL_RANK", "WORLD_SIZE"} <= env.keys():
        size = int(
            env["WORLD_SIZE"]
        )  # who does not set the other uses all of a machine's devices
        env = {
            "LOCAL_WORLD_SIZE": f"{min(size, torch.accelerator.device_count() or size)}",
            **env,
        }
    known = [names for name, names in _VARIABLES if name == launcher]
    if not known:
        raise ValueError(
            f"launcher must be one of {get_args(Launcher)}, got {launcher!r}"
        )
    names = next((names for names in known if names[2] in env), known[0])
    if missing := ", ".join(name for name in names if name not in env):
        raise ValueError(
            f"{launcher!r} has not set {missing}: set them, or unset {names[2]}"
        )
    # SLURM writes 2(x3) for two tasks on each of three machines.
    rank, local_rank, size, local_size = (
        int(env[name].partition("(")[0]) for name in names
    )
    if launcher == "pytorch":
        return Place(rank, local_rank, size, local_size)
    address = env.get("MASTER_ADDR") or _first_machine(launcher, size == local_size)
    if ":" in address:
        address = f"[{address}]"
    url = f"tcp://{address}:{port or env.get('MASTER_PORT', 29500)}"
    return Place(rank, local_rank, size, local_size, url)


def _first_machine(launcher: Launcher, is_the_only_one: bool) -> str:
    if is_the_only_one:
        return "127.0.0.1"
    if launcher == "slurm" and shutil.which("scontrol"):
        command = ["scontrol", "show", "hostnames", os.environ["SLURM_NODELIST"]]
        return subprocess.check_output(command, text=True, timeout=60).split()[0]
    raise ValueError(
        "set MASTER_ADDR to the address of the machine of rank 0, such as 10.0.0.1"
    )


def count_processes(launcher: Launcher | None = None) -> int:
    """The number of processes of the run, also before they have joined each other.

    Args:
        launcher: who started them; None finds out.
    """
    return max(
        comm.get_world_size(), find_place(launcher or infer_launcher()).world_size
    )


def restart_count() -> int:
    """How often torchrun has restarted the run after a failure; 0 in its first attempt."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def join_processes(
    launcher: Launcher,
    backend: str | None = None,
    timeout: timedelta | float = DEFAULT_TIMEOUT,
    port: int | None = None,
) -> None:
    """Join the other processes that the launcher has started. A collective.

    Makes the default process group and one for each machine, and takes the accelerator of the
    local rank as the current one. No environment variable is changed. When torchrun is killed, the
    process is killed with it (Linux).

    Args:
        launcher: see :func:`infer_launcher`.
        backend: of the group; None is the accelerator's (nccl for CUDA), and gloo without one.
        timeout: of the collectives; a number is of seconds.
        port: see :func:`find_place`.

    Raises:
        ValueError: as :func:`find_place`; or if this machine has fewer accelerators than processes.
    """
    # Its functions have the default group as a default argument. Imported while there is one, as
    # the first optimizer does, it keeps the group's threads alive after the end of the group, and
    # a thread that is busy when the interpreter exits aborts the process.
    import torch.distributed.nn.functional

    if dist.is_torchelastic_launched():
        # The ranks would train on without torchrun, and keep the output folder from its successor.
        _prctl_pr_set_pdeathsig(signal.SIGKILL)
    place = find_place(launcher, port)
    timeout = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    chosen = _choose_backend(backend, place.local_world_size)
    if (
        torch.accelerator.is_available()
    ):  # with gloo there may be more processes than devices
        torch.accelerator.set_device_index(
            place.local_rank % torch.accelerator.device_count()
        )
    # torch exports these names only where distributed is built in, which hides them from mypy.
    meeting = dist.rendezvous(place.url, place.rank, place.world_size, timeout=timeout)  # type: ignore[attr-defined]
    store, *_ = next(meeting)
    store.set_timeout(timeout)
    is_shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if place.world_size == place.local_world_size:
        # torchrun's store survives a restart, with the addresses of the dead ranks in it. Each of
        # several machines has its own count of restarts, so the count does not help there.
        store = dist.PrefixStore(f"attempt{restart_count()}", store)  # type: ignore[attr-defined]
    elif is_shared and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        advice = "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and use --rdzv-backend=c10d"
        logger.warning(
            "Restarted processes will find the addresses of the dead ones: %s", advice
        )
    dist.init_process_group(
        chosen,
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timeout,
    )
    comm.create_local_process_group(place.local_world_size)


def _choose_backend(backend: str | None, local_world_size: int) -> str:
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return backend or "gloo"
    chosen = backend or dist.get_default_backend_for_device(device)
    if chosen != "gloo" and local_world_size > (
        count := torch.accelerator.device_count()
    ):
        needs = f"{local_world_size} processes need a GPU each, and this machine has {count}"
        raise ValueError(f"{needs}: ask for fewer, or give backend='gloo'")
    return chosen


def leave_processes() -> None:
    """Leave the process group, if there is one; its threads have ended when this returns.

    A model in DistributedDataParallel holds the group too: let go of the model first.
    """
    if dist.is_initialized():
        gc.collect()  # models that only cycles hold
        dist.destroy_process_group()


def choose_device(wanted: str | torch.device | None = None) -> torch.device:
    """The device of this process; an accelerator becomes the current one.

    Args:
        wanted: such as ``"cpu"``, ``"cuda"`` or ``"cuda:1"``. None is the accelerator, or the CPU
            where there is none. Without a number each of several ranks gets its own.

    Raises:
        ValueError: if it is not there.
    """
    there = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device(wanted or there or "cpu")
    if device.type == "cpu":
        return torch.device("cpu")
    if there is None or device.type != there.type:
        raise ValueError(
            f"device={str(wanted)!r} is not there, but {there or 'the CPU only'}"
        )
    index: int | None = device.index  # torch says that it is an int
    if index is None:
        index = torch.accelerator.current_device_index()
        if comm.get_world_size() > 1:
            index = comm.get_local_rank() % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    return torch.device(device.type, index)


def set_random_seed(seed: int | None = None, *, diff_rank_seed: bool = False) -> int:
    """Seed the generators of Python, numpy and torch. A collective if there is no seed.

    Args:
        seed: from 0 to 2^32 - 1; None or a negative number draws one that all ranks share.
        diff_rank_seed: seed each rank with the sum of the seed and its rank.

    Returns:
        The seed, without the rank.
    """
    if seed is None or seed < 0:
        seed = comm.shared_random_seed()
        logger.info("No seed is configured: drew %d", seed)
    seed_all_rng((seed + comm.get_rank()) % 2**32 if diff_rank_seed else seed)
    return seed


@dataclass(frozen=True)
class Environment:
    """The settings of a process. Nothing is changed that is not asked for.

    Args:
        launcher: who started the processes; None finds out, see :func:`infer_launcher`.
        backend: of the process group, such as ``"nccl"`` or ``"gloo"``; None takes the one for the
            device.
        timeout: of the collectives; a number is of seconds.
        port: where the processes of SLURM and MPI meet; None is ``MASTER_PORT``, else 29500.
        seed: see :func:`set_random_seed`; the same on all ranks.
        diff_rank_seed: seed each rank with the sum of the seed and its rank.
        deterministic: let torch use deterministic algorithms only, and fail where there is none.
        cudnn_benchmark: let cuDNN try which algorithm is the fastest.
        resource_limit: raise the number of files that may be open to this, or to what the system
            allows; not on Windows.
        mp_start_method: ``"fork"``, ``"spawn"`` or ``"forkserver"`` for new processes.
    """

    launcher: Launcher | None = None
    backend: str | None = None
    timeout: timedelta | float = DEFAULT_TIMEOUT
    port: int | None = None
    seed: int | None = None
    diff_rank_seed: bool = False
    deterministic: bool = False
    cudnn_benchmark: bool = False
    resource_limit: int | None = None
    mp_start_method: str | None = None

    @classmethod
    def of(cls, settings: "Environment | Mapping[str, Any] | None") -> "Environment":
        """The settings from a dict, with the names of this class or those of MMEngine.

        MMEngine's are ``randomness=dict(seed, diff_rank_seed, deterministic)``,
        ``dist_cfg=dict(backend, port, timeout)`` and ``mp_cfg=dict(mp_start_method)``; its
        ``opencv_num_threads`` has no effect, as OpenCV is not used.

        Raises:
            TypeError: for an unknown name.
            ValueError: for another ``init_backend`` than torch's.
        """
        if isinstance(settings, Environment):
            return settings
        flat: dict[str, Any] = {}
        for name, value in (settings or {}).items():
            is_group = name in ("randomness", "dist_cfg", "mp_cfg")
            flat.update((value or {}) if is_group else {name: value})
        flat.pop("opencv_num_threads", None)
        if (by := flat.pop("init_backend", "torch")) != "torch":
            raise ValueError(f"init_backend must be 'torch', but got {by!r}")
        return cls(**flat)

    def apply(self) -> None:
        """Change this process as asked for; see the arguments."""
        if self.mp_start_method is not None:
            multiprocessing.set_start_method(self.mp_start_method, force=True)
        if self.resource_limit is not None:
            import resource  # Windows does not have it

            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            most = self.resource_limit if hard < 0 else min(self.resource_limit, hard)
            if 0 <= soft < most:  # a negative limit is none
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        if self.cudnn_benchmark:
            torch.backends.cudnn.benchmark = True
        if self.deterministic:
            # cuBLAS looks at it when it is used first.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.backends.cudnn.benchmark = False
            torch.backends.cudnn.deterministic = True
            torch.use_deterministic_algorithms(True)
