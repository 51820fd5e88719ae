"""A description of the machine and the software, for bug reports and the log of a run."""

import platform

import numpy as np
import torch

from hooktrain import __version__
from hooktrain.utils.env import device_module


def collect_env_info() -> str:
    """The platform, versions and devices, one on each line, and torch's build settings."""
    lines = [
        f"Platform: {platform.platform()}",
        f"Python: {platform.python_version()}",
        f"hooktrain: {__version__}",
        f"numpy: {np.__version__}",
        f"torch: {torch.__version__}",
        f"Devices: {_devices()}",
        torch.__config__.show(),
    ]
    return "\n".join(lines)


def _devices() -> str:
    """The number of accelerators, and the name of the first."""
    module = device_module()
    if module is None:
        return "none"
    # Some kinds of devices (mps) have no names.
    name_of = getattr(module, "get_device_name", lambda: module.__name__)
    return f"{torch.accelerator.device_count()} x {name_of()}"
