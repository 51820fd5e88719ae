"""Where a model lives, and in which order it is built: one device, or data parallel."""

from hooktrain.strategy.base import BaseStrategy, broadcast_buffers
from hooktrain.strategy.build import build_strategy
from hooktrain.strategy.ddp import DDPStrategy, wrap_in_ddp, wrapper_for
from hooktrain.strategy.environment import Environment
from hooktrain.strategy.fsdp import FSDPStrategy
from hooktrain.strategy.single_device import SingleDeviceStrategy

__all__ = [
    "BaseStrategy",
    "DDPStrategy",
    "Environment",
    "FSDPStrategy",
    "SingleDeviceStrategy",
    "broadcast_buffers",
    "build_strategy",
    "wrap_in_ddp",
    "wrapper_for",
]
