"""The trainer: the loop, the step, the hooks, and how a script is started."""

from hooktrain.engine import hooks as hooks
from hooktrain.engine.amp_trainer import AMPTrainer as AMPTrainer
from hooktrain.engine.default_trainer import (
    DefaultTrainer as DefaultTrainer,
    default_hooks as default_hooks,
    default_writers as default_writers,
)
from hooktrain.engine.defaults import (
    create_ddp_model as create_ddp_model,
    default_argument_parser as default_argument_parser,
    default_setup as default_setup,
)
from hooktrain.engine.launch import DEFAULT_TIMEOUT as DEFAULT_TIMEOUT, launch as launch
from hooktrain.engine.step_trainer import StepTrainer as StepTrainer
from hooktrain.engine.train_loop import HookBase as HookBase, TrainerBase as TrainerBase
from hooktrain.engine.trainers import SimpleTrainer as SimpleTrainer
