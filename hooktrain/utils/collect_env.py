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
    return (
        f"Platform: {platform.platform()}\n"
        f"Python: {platform.python_version()}\n"
        f"hooktrain: {__version__}\n"
        f"numpy: {np.__version__}\n"
        f"torch: {torch.__version__}\n"
        f"Devices: {torch.accelerator.device_count()} x {device}\n"
        f"{torch.__config__.show()}"
    )
