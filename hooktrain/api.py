"""The names that scripts import from hooktrain itself, which loads them on first use."""

from hooktrain.checkpoint import (
    Checkpointer as Checkpointer,
    load_checkpoint as load_checkpoint,
)
from hooktrain.config import LazyCall as LazyCall
from hooktrain.data import (
    build_test_loader as build_test_loader,
    build_train_loader as build_train_loader,
)
from hooktrain.engine import (
    HookBase as HookBase,
    SimpleTrainer as SimpleTrainer,
    StepTrainer as StepTrainer,
    build_trainer as build_trainer,
    default_hooks as default_hooks,
    default_writers as default_writers,
    hooks as hooks,
    launch as launch,
)
from hooktrain.evaluation import (
    DatasetEvaluator as DatasetEvaluator,
    MetricEvaluator as MetricEvaluator,
    inference_on_dataset as inference_on_dataset,
)
from hooktrain.solver import (
    AmpOptimWrapper as AmpOptimWrapper,
    CosineParamScheduler as CosineParamScheduler,
    OptimWrapper as OptimWrapper,
    WarmupParamScheduler as WarmupParamScheduler,
)
from hooktrain.strategy import build_strategy as build_strategy
from hooktrain.utils import comm as comm
from hooktrain.utils.logger import setup_logger as setup_logger
