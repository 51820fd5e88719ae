"""What a bug report or a run's log should say about the machine and the software."""

import os
import platform
from pathlib import Path

import numpy as np
import torch
from tabulate import tabulate

from hooktrain import __version__
from hooktrain.utils.env import device_module

# How the variables begin that torchrun and users set to change what is imported here.
_PREFIXES = (
    "CUBLAS_",
    "CUDA_",
    "GLOO_",
    "LOCAL_",
    "MASTER_",
    "MKL_",
    "NCCL_",
    "OMP_",
    "PYTORCH_",
    "RANK",
    "TORCH",
    "WORLD_SIZE",
)


def collect_env_info() -> str:
    """Platform, versions, devices and variables as a table, and how torch was built.

    Names of environment variables begin with ``$``.
    """
    items = {
        "Platform": platform.platform(),
        "Python": platform.python_version(),
        "hooktrain": f"{__version__} ({Path(__file__).parent.parent})",
        "numpy": np.__version__,
        "torch": torch.__version__,
        "Devices": _devices(),
        "CPUs": os.cpu_count(),
    }
    for name, value in sorted(os.environ.items()):
        if name.startswith(_PREFIXES):
            items[f"${name}"] = value
    table = tabulate(items.items(), disable_numparse=True)
    return f"{table}\n{torch.__config__.show()}"


def _devices() -> str:
    """The number of accelerators, and the name of the first."""
    module = device_module()
    if module is None:
        return "none"
    # Not every kind of device has names (mps).
    name_of = getattr(module, "get_device_name", lambda: module.__name__)
    return f"{torch.accelerator.device_count()} x {name_of()}"
