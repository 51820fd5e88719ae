"""What a process sets up before it trains: the group of processes, seeds, and limits asked for."""

import logging
import multiprocessing
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hooktrain.utils import comm, launchers
from hooktrain.utils.env import seed_all_rng, set_rng_state
from hooktrain.utils.registry import did_you_mean

__all__ = [
    "Environment",
    "join_processes",
    "resume_randomness",
    "set_random_seed",
    "shared_timestamp",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Environment:
    """The settings of a process. Nothing happens to the process but what is asked for here.

    Args:
        launcher: who started the processes: ``"pytorch"`` (torchrun), ``"slurm"``, ``"mpi"``, or
            ``"none"``; None finds out, see :func:`hooktrain.utils.launchers.infer_launcher`.
        backend: of the process group, such as ``"nccl"`` or ``"gloo"``; None takes the one for the
            device.
        timeout: of the collectives.
        port: where the processes of SLURM and MPI meet; None is ``MASTER_PORT``, else 29500.
        seed: of Python's, numpy's and torch's generators, from 0 to 2^32 - 1, the same on all
            ranks; None draws one that all ranks share.
        diff_rank_seed: add the rank to the seed, for other random numbers on each rank.
        deterministic: let torch use deterministic algorithms only, and fail where there is none.
        cudnn_benchmark: let cuDNN try out which algorithm is fastest.
        resource_limit: raise the number of files that may be open to this, or to what the system
            allows; None leaves it (not on Windows).
        mp_start_method: ``"fork"``, ``"spawn"`` or ``"forkserver"`` for new processes; None leaves
            it.
    """

    launcher: launchers.Launcher | None = None
    backend: str | None = None
    timeout: timedelta = launchers.DEFAULT_TIMEOUT
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
        ``dist_cfg=dict(backend, port, timeout in seconds)`` and ``mp_cfg=dict(mp_start_method)``;
        its ``opencv_num_threads`` is not used, as OpenCV is not.

        Raises:
            TypeError: if it is no dict.
            ValueError: for an unknown name, or one that stands there twice.
        """
        if isinstance(settings, Environment):
            return settings
        if not isinstance(settings, Mapping | None):
            raise TypeError(f"env_kwargs must be a dict or an Environment, but got {settings!r}")
        flat: dict[str, Any] = {}
        for name, value in (settings or {}).items():
            items = dict(value or {}) if name in ("randomness", "dist_cfg", "mp_cfg") else None
            for key, item in ({name: value} if items is None else items).items():
                if key in flat:
                    raise ValueError(f"env_kwargs has {key!r} twice")
                flat[key] = item
        flat.pop("opencv_num_threads", None)
        known = [field.name for field in fields(cls)]
        for name in flat:
            if name not in known:
                raise ValueError(f"env_kwargs has no {name!r}{did_you_mean(name, known)}")
        if isinstance(flat.get("timeout"), int | float):
            flat["timeout"] = timedelta(seconds=flat["timeout"])
        return replace(cls(), **flat)

    def apply(self) -> None:
        """Change this process as asked for; see the arguments."""
        if self.mp_start_method is not None:
            multiprocessing.set_start_method(self.mp_start_method, force=True)
        if self.resource_limit is not None:
            _raise_open_files(self.resource_limit)
        if self.cudnn_benchmark:
            torch.backends.cudnn.benchmark = True
        if self.deterministic:
            # cuBLAS looks at it when it is used first.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.backends.cudnn.benchmark = False
            torch.backends.cudnn.deterministic = True
            torch.use_deterministic_algorithms(True)


def _raise_open_files(limit: int) -> None:
    import resource  # there is none on Windows

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    if soft != resource.RLIM_INFINITY and wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def join_processes(environment: Environment, backend: str | None) -> tuple[str, bool]:
    """Join the other processes of the run, unless this one has done so.

    Args:
        environment: of it, ``launcher``, ``timeout`` and ``port``.
        backend: of the process group; None lets the launcher choose.

    Returns:
        The launcher, and whether a process group was made here.
    """
    launcher = environment.launcher or launchers.infer_launcher()
    if launcher == "none" or (dist.is_available() and dist.is_initialized()):
        return launcher, False
    launchers.init_process_group(launcher, backend, environment.timeout, environment.port)
    return launcher, True


def set_random_seed(seed: int | None, diff_rank_seed: bool = False) -> int:
    """Seed the generators of Python, numpy and torch. A collective if there is no seed.

    Args:
        seed: from 0 to 2^32 - 1; None draws one that all ranks share.
        diff_rank_seed: use the seed plus the rank.

    Returns:
        The seed, without the rank.
    """
    if seed is None:
        seed = comm.shared_random_seed()
        logger.info("No seed is configured: drew %d", seed)
    seed_all_rng((seed + comm.get_rank()) % 2**32 if diff_rank_seed else seed)
    return seed


def resume_randomness(environment: Environment, seed: int, meta: Mapping[str, Any]) -> int:
    """Give this rank the random state of a checkpoint, or else seed it with the checkpoint's seed.

    Args:
        environment: of it, ``seed`` and ``diff_rank_seed``.
        seed: of the run so far.
        meta: of the checkpoint: ``seed``, and ``rng`` by rank.

    Returns:
        The seed of the run from now on.
    """
    saved, states = meta.get("seed"), meta.get("rng") or {}
    if saved is not None and saved != seed:
        if environment.seed is not None:
            logger.warning("The seed is %d, that of the checkpoint, and not %d", saved, seed)
        seed = saved
    if comm.get_rank() in states and len(states) == comm.get_world_size():
        set_rng_state(states[comm.get_rank()])
    elif saved is not None:
        logger.warning(
            "The checkpoint has random states of %d ranks, and there are %d: seeding with %d",
            *(len(states), comm.get_world_size(), seed),
        )
        set_random_seed(seed, environment.diff_rank_seed)
    return seed


def shared_timestamp() -> str:
    """The main process's local time as ``20251231_235959``. A collective."""
    return comm.broadcast(time.strftime("%Y%m%d_%H%M%S"))
