"""Placing a model on one device or many, and the order of building it."""

from hooktrain.strategy.base import BaseStrategy as BaseStrategy
from hooktrain.strategy.ddp import (
    DDPStrategy as DDPStrategy,
    SingleDeviceStrategy as SingleDeviceStrategy,
    build_strategy as build_strategy,
    create_ddp_model as create_ddp_model,
)
from hooktrain.strategy.environment import (
    Environment as Environment,
    choose_device as choose_device,
)
from hooktrain.strategy.fsdp import FSDPStrategy as FSDPStrategy
