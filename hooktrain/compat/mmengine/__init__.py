"""What models, hooks, metrics and scripts import from MMEngine, in one place.

``tools/from_mmengine.sed`` makes ``from mmengine.model import BaseModel`` into
``from hooktrain.compat.mmengine import BaseModel``. A name that is not here comes from mmengine,
where that is installed; else it is an ImportError.
"""

import logging
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from torch import nn

from hooktrain import model as models
from hooktrain.checkpoint import load_checkpoint as load_weights
from hooktrain.engine import *
from hooktrain.model import *
from hooktrain.solver import *
from hooktrain.strategy import *
from hooktrain.strategy.environment import set_random_seed as set_random_seed
from hooktrain.utils import comm
from hooktrain.utils.comm import (
    get_rank as get_rank,
    get_world_size as get_world_size,
    is_main_process as is_main_process,
    synchronize as barrier,  # noqa: F401
)

# isort: split
# Last, since they replace what has the same name above.
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
    BatchNormXd as BatchNormXd,
    ExponentialMovingAverage as ExponentialMovingAverage,
    ImgDataPreprocessor as ImgDataPreprocessor,
    MMDistributedDataParallel as MMDistributedDataParallel,
    MomentumAnnealingEMA as MomentumAnnealingEMA,
    StochasticWeightAverage as StochasticWeightAverage,
    convert_sync_batchnorm as convert_sync_batchnorm,
    detect_anomalous_params as detect_anomalous_params,
    revert_sync_batchnorm as revert_sync_batchnorm,
)
from hooktrain.compat.mmengine.optim_wrapper import (
    AmpOptimWrapper as AmpOptimWrapper,
    OptimWrapper as OptimWrapper,
    OptimWrapperDict as OptimWrapperDict,
)
from hooktrain.compat.mmengine.param_rules import (  # type: ignore[assignment]
    DefaultOptimWrapperConstructor as DefaultOptimWrapperConstructor,
)
from hooktrain.compat.mmengine.param_scheduler import *  # type: ignore[assignment]  # not fvcore's functions
from hooktrain.compat.mmengine.param_scheduler import _ParamScheduler as _ParamScheduler
from hooktrain.compat.mmengine.registry import of_registries
from hooktrain.compat.mmengine.runner import MessageHub as MessageHub, Runner as _Runner
from hooktrain.compat.mmengine.schedulers import *
from hooktrain.compat.mmengine.strategy import (
    BaseStrategy as BaseStrategy,
    DDPStrategy as DDPStrategy,
    FSDPStrategy as FSDPStrategy,
    SingleDeviceStrategy as SingleDeviceStrategy,
)
from hooktrain.compat.peers import of_peers

EpochBasedTrainLoop = _Runner  # what runner.train_loop is
MMSeparateDistributedDataParallel = SeparateDistributedDataParallel

# Where mmengine has the names that are not here.
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
)


def __getattr__(name: str) -> Any:
    if name == "Registry" or name.isupper():
        found = of_registries(name)
        if found is not None:
            return found
    return of_peers(
        name,
        _MODULES,
        f"hooktrain has no {name!r}: docs/migrating.md says what takes its place, if anything "
        "does; or it comes from mmengine, where that is installed",
    )


class BaseModule(nn.Module):
    """A module whose children's ``init_weights`` are called by its own.

    Args:
        init_cfg: None, or ``dict(type="Pretrained", checkpoint=..., prefix=...)``; where
            mmengine is installed any of its initialisers, or a list of such.
        args: of the next base class.
        kwargs: of the next base class.

    Attributes:
        is_init: whether weights were initialised or loaded. If not, trainers initialise them.
    """

    def __init__(self, init_cfg: Any = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.init_cfg = init_cfg
        self.is_init = False
        self.register_load_state_dict_post_hook(_is_loaded)  # type: ignore[no-untyped-call]

    def init_weights(self) -> None:
        """Initialise as ``init_cfg`` says, then the children, then load what it names."""
        configs = self.init_cfg or []
        if isinstance(configs, Mapping):
            configs = [configs]
        # The type is a name or mmengine's class.
        pretrained = [each for each in configs if "Pretrained" in str(each["type"])]
        drawn = [each for each in configs if each not in pretrained]
        if drawn:
            otherwise = (
                f"initialise weights in init_weights(), or install mmengine for {drawn}"
            )
            of_peers("initialize", ["mmengine.model"], otherwise)(self, drawn)
        for child in self.children():
            if hasattr(child, "init_weights") and not getattr(child, "is_init", False):
                child.init_weights()  # type: ignore[operator]
        for each in pretrained:
            prefix = each.get("prefix") or ""
            load_weights(self, each["checkpoint"], prefix=prefix)
        self.is_init = True


def _is_loaded(module: Any, _: Any) -> None:
    module.is_init = True


class BaseModel(BaseModule, models.BaseModel):  # type: ignore[no-redef]
    """:class:`hooktrain.model.BaseModel` with ``init_cfg`` and ``init_weights``."""

    def __init__(self, data_preprocessor: Any = None, init_cfg: Any = None) -> None:
        super().__init__(init_cfg, data_preprocessor)


class _Container(BaseModule):
    def __init__(self, *args: Any, init_cfg: Any = None, **kwargs: Any) -> None:
        super().__init__(init_cfg, *args, **kwargs)


class Sequential(_Container, nn.Sequential):
    """:class:`torch.nn.Sequential` as a :class:`BaseModule`."""


class ModuleList(_Container, nn.ModuleList):
    """:class:`torch.nn.ModuleList` as a :class:`BaseModule`."""


class ModuleDict(_Container, nn.ModuleDict):
    """:class:`torch.nn.ModuleDict` as a :class:`BaseModule`."""


def get_dist_info(group: Any = None) -> tuple[int, int]:
    """The rank and the number of ranks."""
    return comm.get_rank(), comm.get_world_size()


def master_only(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is called on the main process only, and gives None on the others."""

    @wraps(function)
    def on_main(*args: Any, **kwargs: Any) -> Any:
        if comm.is_main_process():
            return function(*args, **kwargs)
        return None

    return on_main


class MMLogger:
    """Gives the logger of the package."""

    @staticmethod
    def get_instance(*args: Any, **kwargs: Any) -> logging.Logger:
        """The logger, whatever name is asked for."""
        return logging.getLogger("hooktrain")

    get_current_instance = get_instance


def print_log(message: Any, logger: Any = None, level: int = logging.INFO) -> None:
    """Log a message, whichever logger is named, or by the logger that is given.

    ``"silent"`` logs nothing.
    """
    if logger == "silent":
        return
    if not isinstance(logger, logging.Logger):
        logger = MMLogger.get_current_instance()
    logger.log(level, message)
