"""The names that models, hooks, metrics and scripts import from MMEngine, in one module.

``tools/from_mmengine.sed`` turns ``from mmengine.model import BaseModel`` into
``from hooktrain.compat.mmengine import BaseModel``. A missing name is imported from mmengine, if
it is installed; otherwise there is an ImportError.
"""

import logging
from typing import Any

from hooktrain.engine import *
from hooktrain.model import *
from hooktrain.solver import *
from hooktrain.strategy import *
from hooktrain.strategy.environment import set_random_seed as set_random_seed
from hooktrain.utils.comm import (
    get_rank as get_rank,
    get_world_size as get_world_size,
    is_main_process as is_main_process,
    synchronize as barrier,  # noqa: F401
)

# isort: split
# Last, since these replace objects of the same names above.
from hooktrain.compat.mmengine.build import (
    build_optim_wrapper as build_optim_wrapper,
    build_param_scheduler as build_param_scheduler,
)
from hooktrain.compat.mmengine.checkpoint import (
    from_mmengine as from_mmengine,
    load_checkpoint as load_checkpoint,
    to_mmengine as to_mmengine,
)
from hooktrain.compat.mmengine.evaluation import BaseMetric as BaseMetric
from hooktrain.compat.mmengine.hook import (
    Hook as Hook,
    ParamSchedulerHook as ParamSchedulerHook,
)
from hooktrain.compat.mmengine.lr_scheduler import LRScheduler as LRScheduler
from hooktrain.compat.mmengine.model import (
    BaseAveragedModel as BaseAveragedModel,
    BaseDataPreprocessor as BaseDataPreprocessor,
    BaseModel as BaseModel,
    BaseModule as BaseModule,
    ExponentialMovingAverage as ExponentialMovingAverage,
    MMDistributedDataParallel as MMDistributedDataParallel,
    MMSeparateDistributedDataParallel as MMSeparateDistributedDataParallel,
    ModuleDict as ModuleDict,
    ModuleList as ModuleList,
    Sequential as Sequential,
    StochasticWeightAverage as StochasticWeightAverage,
    detect_anomalous_params as detect_anomalous_params,
)
from hooktrain.compat.mmengine.optim_wrapper import (
    AmpOptimWrapper as AmpOptimWrapper,
    OptimWrapper as OptimWrapper,
    OptimWrapperDict as OptimWrapperDict,
)
from hooktrain.compat.mmengine.param_rules import (
    DefaultOptimWrapperConstructor as DefaultOptimWrapperConstructor,
)
from hooktrain.compat.mmengine.param_scheduler import *  # type: ignore[assignment]  # not fvcore's functions
from hooktrain.compat.mmengine.param_scheduler import (
    _ParamScheduler as _ParamScheduler,
    adapted,
)
from hooktrain.compat.mmengine.registry import get_registry
from hooktrain.compat.mmengine.runner import (
    MessageHub as MessageHub,
    Runner as _Runner,
    StepTrainer as StepTrainer,
)
from hooktrain.compat.mmengine.strategy import (
    BaseStrategy as BaseStrategy,
    DDPStrategy as DDPStrategy,
    FSDPStrategy as FSDPStrategy,
    SingleDeviceStrategy as SingleDeviceStrategy,
)
from hooktrain.compat.peers import import_from_peers

EpochBasedTrainLoop = _Runner  # the class of runner.train_loop

# The modules of mmengine that have the names missing here.
_MODULES = (
    "mmengine",
    "mmengine.registry",
    "mmengine.model",
    "mmengine.model.weight_init",
    "mmengine.runner",
    "mmengine.runner.checkpoint",
    "mmengine.runner.loops",
    "mmengine.hooks",
    "mmengine.hooks.hook",
    "mmengine.dist",
    "mmengine.evaluator",
    "mmengine.evaluator.metric",
    "mmengine.optim",
    "mmengine.optim.scheduler",
    "mmengine.optim.scheduler.momentum_scheduler",
)


def __getattr__(name: str) -> Any:
    if name == "Registry" or name.isupper():
        found = get_registry(name)
        if found is not None:
            return found
    otherwise = (
        f"hooktrain has no {name!r}: see docs/migrating.md for a replacement, or install "
        "mmengine if the name is mmengine's"
    )
    return adapted(import_from_peers(name, _MODULES, otherwise))


class MMLogger:
    """MMEngine's access to the logger, which is this package's."""

    @staticmethod
    def get_instance(*args: Any, **kwargs: Any) -> logging.Logger:
        """The package's logger, whatever the arguments."""
        return logging.getLogger("hooktrain")

    get_current_instance = get_instance


def print_log(message: Any, logger: Any = None, level: int = logging.INFO) -> None:
    """Log a message by the given logger, or by the package's if only a name is given.

    ``"silent"`` logs nothing.
    """
    if logger == "silent":
        return
    if not isinstance(logger, logging.Logger):
        logger = MMLogger.get_current_instance()
    logger.log(level, message)
