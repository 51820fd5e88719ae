"""What a bug report or a run's log should say about the machine and the software."""

import os
import platform
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tabulate import tabulate

from hooktrain import __version__
from hooktrain.utils.env import device_module

# How the variables begin that torchrun and users set to change what is imported here.
_PREFIXES = (
    *(
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ),
    *("CUBLAS_", "CUDA_", "GLOO_", "KMP_", "MKL_", "NCCL_", "OMP_", "PYTHONHASHSEED"),
    *("PYTORCH_", "TORCH"),
)


def collect_env_info() -> str:
    """Describe platform, versions, devices and environment variables, as a table and torch's build.

    An item that cannot be read says so in its row; the others are still there.
    """
    table = tabulate(collect_env().items(), disable_numparse=True)
    return f"{table}\n{_read(torch.__config__.show)}"


def collect_env() -> dict[str, str]:
    """The items of that table by name; those of environment variables begin with ``$``."""
    items = {name: _read(item) for name, item in _ITEMS.items()}
    for name, value in sorted(os.environ.items()):
        if name.startswith(_PREFIXES):
            items[f"${name}"] = value
    return items


def _read(item: Callable[[], object]) -> str:
    try:
        return str(item())
    except Exception as error:
        return f"not readable: {error!r}"


def _devices() -> str:
    """The names of the devices of the current kind, each with how many there are."""
    if (module := device_module()) is None:
        return "none: torch.accelerator.is_available() == False"
    # Not every kind of device has names (mps).
    name_of = getattr(module, "get_device_name", lambda _: module.__name__)
    names = Counter(map(name_of, range(torch.accelerator.device_count())))
    return ", ".join(f"{number} x {name}" for name, number in names.items())


_ITEMS: dict[str, Callable[[], object]] = {
    "Platform": platform.platform,
    "Python": lambda: f"{platform.python_version()} ({sys.executable})",
    "hooktrain": lambda: f"{__version__} ({Path(__file__).parent.parent})",
    "numpy": lambda: np.__version__,
    "torch": lambda: f"{torch.__version__} ({Path(torch.__file__).parent})",
    "Devices": _devices,
    "CPUs": os.cpu_count,
    "CPU affinity": lambda: f"{len(os.sched_getaffinity(0))} CPUs",
    "torch threads": torch.get_num_threads,
}
