"""The trainer: the loop, the step, the hooks, and how a script is started."""

from hooktrain.engine import hooks
from hooktrain.engine.defaults import (
    DefaultTrainer,
    create_ddp_model,
    default_argument_parser,
    default_hooks,
    default_setup,
    default_writers,
)
from hooktrain.engine.launch import DEFAULT_TIMEOUT, launch
from hooktrain.engine.train_loop import HookBase, TrainerBase
from hooktrain.engine.trainers import AMPTrainer, SimpleTrainer, StepTrainer

__all__ = [
    "DEFAULT_TIMEOUT",
    "AMPTrainer",
    "DefaultTrainer",
    "HookBase",
    "SimpleTrainer",
    "StepTrainer",
    "TrainerBase",
    "create_ddp_model",
    "default_argument_parser",
    "default_hooks",
    "default_setup",
    "default_writers",
    "hooks",
    "launch",
]
