"""A description of the machine and the software, for bug reports and the log of a run."""

import platform

import numpy as np
import torch

from hooktrain import __version__
from hooktrain.utils.env import device_module


def collect_env_info() -> str:
    """The platform, versions and devices, one on each line, and torch's build settings."""
    module = device_module()
    device = getattr(module, "get_device_name", lambda: module)()  # mps has no names
    lines = [
        f"Platform: {platform.platform()}",
        f"Python: {platform.python_version()}",
        f"hooktrain: {__version__}",
        f"numpy: {np.__version__}",
        f"torch: {torch.__version__}",
        f"Devices: {torch.accelerator.device_count()} x {device}",
        torch.__config__.show(),
    ]
    return "\n".join(lines)
