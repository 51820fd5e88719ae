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

# The variables that torchrun and users set to steer what is imported here.
_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PREFIXES = (
    "CUBLAS_",
    "CUDA_",
    "GLOO_",
    "KMP_",
    "MKL_",
    "NCCL_",
    "OMP_",
    "PYTHONHASHSEED",
    "PYTORCH_",
    "TORCH",
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
    return items | {f"${name}": value for name, value in _environment()}


def _read(item: Callable[[], object]) -> str:
    try:
        return str(item())
    except Exception as error:
        return f"not readable: {error!r}"


def _python() -> str:
    return f"{platform.python_version()} ({sys.executable})"


def _hooktrain() -> str:
    return f"{__version__} ({Path(__file__).parent.parent})"


def _torch() -> str:
    debug = ", debug build" if torch.version.debug else ""
    return f"{torch.__version__} ({Path(torch.__file__).parent}{debug})"


def _cuda() -> str:
    if torch.version.cuda is None:
        return "not in this build of torch"
    return f"{torch.version.cuda}, available: {torch.cuda.is_available()}"


def _accelerator() -> str:
    if not torch.accelerator.is_available():
        return "No: torch.accelerator.is_available() == False"
    return str(torch.accelerator.current_accelerator())


def _devices() -> str:
    """The names of the devices of the current kind, each with how many there are."""
    if not torch.accelerator.is_available():
        return "none"
    module = torch.get_device_module()
    count = torch.accelerator.device_count()
    # Not every kind of device has names (mps).
    names = Counter(
        module.get_device_name(i) if hasattr(module, "get_device_name") else module.__name__
        for i in range(count)
    )
    return ", ".join(f"{number} x {name}" for name, number in names.items())


def _affinity() -> str:
    if not hasattr(os, "sched_getaffinity"):
        return "all (no affinity on this platform)"
    return f"{len(os.sched_getaffinity(0))} CPUs"


def _environment() -> list[tuple[str, str]]:
    return [
        (name, value)
        for name, value in sorted(os.environ.items())
        if name in _VARIABLES or name.startswith(_PREFIXES)
    ]


_ITEMS: dict[str, Callable[[], object]] = {
    "Platform": platform.platform,
    "Python": _python,
    "hooktrain": _hooktrain,
    "numpy": lambda: np.__version__,
    "torch": _torch,
    "CUDA": _cuda,
    "cuDNN": torch.backends.cudnn.version,
    "Accelerator": _accelerator,
    "Devices": _devices,
    "CPUs": os.cpu_count,
    "CPU affinity": _affinity,
    "torch threads": torch.get_num_threads,
}
