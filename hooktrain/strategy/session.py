"""Who and where this process is: its rank, device, seed and folders."""

import logging
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from hooktrain.strategy.environment import (
    Environment,
    join_processes,
    set_random_seed,
    shared_timestamp,
)
from hooktrain.utils import comm, launchers
from hooktrain.utils.collect_env import collect_env
from hooktrain.utils.device import choose_device
from hooktrain.utils.logger import setup_logger

__all__ = ["Session"]


class Session:
    """The part of a strategy that knows the process; see :class:`BaseStrategy`.

    The constructor only stores; :meth:`setup` does what it asks for.
    """

    def __init__(
        self,
        *,
        work_dir: str | os.PathLike[str] = "work_dirs",
        experiment_name: str | None = None,
        env_kwargs: Environment | Mapping[str, Any] | None = None,
        log_kwargs: Mapping[str, Any] | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        self._work_dir = os.path.abspath(work_dir)
        self._name = experiment_name
        self.environment = Environment.of(env_kwargs)
        self._log_kwargs = None if log_kwargs is None else dict(log_kwargs)
        self._wanted_device = None if device is None else torch.device(device)
        self.logger = logging.getLogger("hooktrain.strategy")
        self._is_set_up = False
        self._launcher = "none"
        self._made_group = False
        self._device = torch.device("cpu")
        self._timestamp = ""
        self._seed = 0

    def setup(self) -> None:
        """Join the other processes, choose the device, seed; log to a file if that is asked for.

        A second call does nothing. It is a collective; :meth:`prepare` calls it. Call it before if
        you build the model yourself, so that its weights depend on the seed.
        """
        if self._is_set_up:
            return
        self._launcher, self._made_group = self._setup_distributed()
        self._device = choose_device(self._wanted_device)
        self._timestamp = shared_timestamp()
        self.environment.apply()
        self._seed = set_random_seed(self.environment.seed, self.environment.diff_rank_seed)
        self._is_set_up = True
        if self._log_kwargs is not None:
            self.build_logger(**self._log_kwargs)

    def teardown(self) -> None:
        """Leave the other processes, if :meth:`setup` has joined them. No collective.

        A model in DistributedDataParallel holds the process group too: let go of it first.
        """
        if self._made_group:
            launchers.destroy_process_group()
        self._made_group = False

    def _setup_distributed(self) -> tuple[str, bool]:
        """Join the other processes: the launcher, and whether a process group was made here."""
        wanted = self._wanted_device
        on_cpu = wanted is not None and wanted.type == "cpu"
        backend = self.environment.backend or ("gloo" if on_cpu else None)
        return join_processes(self.environment, backend)

    def _after_setup(self, value: Any) -> Any:
        if not self._is_set_up:
            raise RuntimeError(
                f"{type(self).__name__} is not set up: call setup() or prepare() first"
            )
        return value

    @property
    def work_dir(self) -> str:
        """The folder of the checkpoints, absolute."""
        return self._work_dir

    @property
    def log_dir(self) -> str:
        """The folder of this run's logs, inside of ``work_dir``; it need not be there yet."""
        return os.path.join(self._work_dir, self.timestamp)

    @property
    def experiment_name(self) -> str:
        """The name with the timestamp, or the timestamp alone."""
        return self.timestamp if self._name is None else f"{self._name}_{self.timestamp}"

    @property
    def timestamp(self) -> str:
        """When the run was set up, as ``20251231_235959``; the same on all ranks."""
        timestamp: str = self._after_setup(self._timestamp)
        return timestamp

    @property
    def launcher(self) -> str:
        """Who started the processes: ``"pytorch"``, ``"slurm"``, ``"mpi"`` or ``"none"``."""
        launcher: str = self._after_setup(self._launcher)
        return launcher

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        device: torch.device = self._after_setup(self._device)
        return device

    @property
    def seed(self) -> int:
        """The seed of the run, without a rank; after a resume that of the checkpoint."""
        seed: int = self._after_setup(self._seed)
        return seed

    @property
    def randomness(self) -> dict[str, Any]:
        """``seed`` as configured, ``diff_rank_seed`` and ``deterministic``."""
        names = ("seed", "diff_rank_seed", "deterministic")
        return {name: getattr(self.environment, name) for name in names}

    @property
    def rank(self) -> int:
        """The number of this process, from 0."""
        return comm.get_rank()

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return comm.get_world_size()

    @property
    def distributed(self) -> bool:
        """Whether there is a process group."""
        return dist.is_available() and dist.is_initialized()

    def build_logger(
        self, log_level: int | str = "INFO", log_file: str | os.PathLike[str] | None = None
    ) -> logging.Logger:
        """Log to the terminal and to a file.

        Args:
            log_level: the least important messages to show.
            log_file: see :func:`~hooktrain.utils.logger.setup_logger`; None is
                ``<log_dir>/<timestamp>.log``.
        """
        if log_file is None:
            log_file = os.path.join(self.log_dir, f"{self.timestamp}.log")
        root = setup_logger(log_file, self.rank)
        root.setLevel(log_level)
        return root

    def collect_env(self) -> tuple[dict[str, str], dict[str, Any]]:
        """What is worth knowing about the machine and the software, and about this run."""
        runtime = {
            **{name: value for name, value in vars(self.environment).items() if value is not None},
            "seed": self.seed,
            "Distributed launcher": self.launcher,
            "Distributed training": self.distributed,
            "GPU number": self.world_size,
            "Device": str(self.device),
        }
        return collect_env(), runtime
