"""The trainer: the loop, the step, the hooks, and how a script is started."""

from hooktrain.engine import hooks as hooks
from hooktrain.engine.build import build_trainer as build_trainer
from hooktrain.engine.defaults import (
    create_ddp_model as create_ddp_model,
    default_argument_parser as default_argument_parser,
    default_hooks as default_hooks,
    default_setup as default_setup,
    default_writers as default_writers,
)
from hooktrain.engine.hook_base import HookBase as HookBase
from hooktrain.engine.launch import DEFAULT_TIMEOUT as DEFAULT_TIMEOUT, launch as launch
from hooktrain.engine.settings import train_settings as train_settings
from hooktrain.engine.train_loop import TrainerBase as TrainerBase
from hooktrain.engine.trainers import (
    AMPTrainer as AMPTrainer,
    SimpleTrainer as SimpleTrainer,
    StepTrainer as StepTrainer,
)
