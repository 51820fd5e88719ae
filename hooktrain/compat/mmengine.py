"""What models, hooks, metrics and scripts import from MMEngine, in one place.

``tools/from_mmengine.sed`` makes ``from mmengine.model import BaseModel`` into
``from hooktrain.compat.mmengine import BaseModel``. A name that is not here is an ImportError
which says what takes its place.
"""

import logging
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from torch import nn

from hooktrain import checkpoint, model as models
from hooktrain.engine import *
from hooktrain.model import *
from hooktrain.solver import *
from hooktrain.solver.param_scheduler import *  # type: ignore[assignment]  # not fvcore's functions
from hooktrain.solver.param_scheduler import _ParamScheduler as _ParamScheduler
from hooktrain.strategy import *
from hooktrain.strategy.environment import set_random_seed as set_random_seed
from hooktrain.utils import comm, names, registry

# isort: split
# Last, since they replace what has the same name above.
from hooktrain.compat.mmengine_checkpoint import (
    from_mmengine as from_mmengine,
    load_checkpoint as load_checkpoint,
    to_mmengine as to_mmengine,
)
from hooktrain.compat.mmengine_evaluation import BaseMetric as BaseMetric
from hooktrain.compat.mmengine_hooks import (
    Hook as Hook,
    ParamSchedulerHook as ParamSchedulerHook,
)
from hooktrain.compat.mmengine_model import (
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
from hooktrain.compat.mmengine_runner import MessageHub as MessageHub, Runner as _Runner
from hooktrain.compat.mmengine_strategy import (
    BaseStrategy as BaseStrategy,
    DDPStrategy as DDPStrategy,
    FSDPStrategy as FSDPStrategy,
    SingleDeviceStrategy as SingleDeviceStrategy,
)
from hooktrain.compat.param_rules import (
    DefaultOptimWrapperConstructor as DefaultOptimWrapperConstructor,
)
from hooktrain.compat.schedulers import *

barrier = comm.synchronize
get_rank = comm.get_rank
get_world_size = comm.get_world_size
is_main_process = comm.is_main_process
EpochBasedTrainLoop = _Runner  # what runner.train_loop is
MMSeparateDistributedDataParallel = SeparateDistributedDataParallel

_INSTEAD = {
    "CheckpointHook": "hooks.PeriodicCheckpointer and hooks.BestCheckpointer",
    "Config": "LazyConfig of hooktrain.config",
    "DistSamplerSeedHook": "nothing: the trainer calls set_epoch",
    "EMAHook": "hooks.EMA(model, decay=1 - momentum, warmup=False)",
    "EarlyStoppingHook": "hooks.EarlyStopping",
    "EmptyCacheHook": "hooks.CallbackHook(after_step=lambda trainer: torch.cuda.empty_cache())",
    "IterTimerHook": "hooks.IterationTimer",
    "LoggerHook": "hooks.PeriodicWriter(default_writers(folder))",
    "NaiveVisualizationHook": "trainer.storage.put_image",
    "ProfilerHook": "hooks.TorchProfiler",
    "Runner": "StepTrainer(model, data_loader, optim_wrapper), with hooks",
    "RuntimeInfoHook": "nothing: the trainer and hooks.LRScheduler record it",
    "SyncBuffersHook": "create_ddp_model(model, broadcast_buffers=True)",
}


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    instead = _INSTEAD.get(
        name, "nothing, or torch.nn.init; for collectives hooktrain.utils.comm"
    )
    raise ImportError(f"in place of MMEngine's {name}: {instead} (docs/migrating.md)")


class Registry(registry.Registry):
    """A registry with MMEngine's arguments.

    Args:
        name: see :class:`hooktrain.utils.registry.Registry`.
        build_func: called as ``build_func(cfg, ..., registry=self)`` in place of :meth:`build`.
        parent: shares its objects with this one, whatever their scopes.
        ignored: such as ``scope`` and ``locations``: import the modules that register.
    """

    def __init__(
        self, name: str, build_func: Any = None, parent: Any = None, **ignored: Any
    ) -> None:
        super().__init__(name)
        self.build_func = build_func
        if parent is not None:
            self._objects = parent._objects

    def get(self, name: str) -> Any:
        """What is registered under a name, with or without a scope; None if nothing is."""
        _, _, without_scope = name.partition(".")
        found = self._objects.get(without_scope)
        return self._objects.get(name, found)

    def find(self, kind: Any) -> Any:
        """As the base class does; ``"mmengine.SGD"`` is also what is ``"SGD"`` here."""
        found = self.get(kind) if isinstance(kind, str) else kind
        if found is not None:
            return found
        return names.locate(kind) if "." in kind else super().get(kind)

    def build(self, cfg: Any, /, **kwargs: Any) -> Any:
        """As the base class does, with ``default_args`` for keys that ``cfg`` lacks."""
        if self.build_func is not None:
            return self.build_func(cfg, registry=self, **kwargs)
        defaults = kwargs.pop("default_args", None) or {}
        return super().build(cfg, **{**defaults, **kwargs})


for _name in (
    "DATASETS",
    "DATA_SAMPLERS",
    "FUNCTIONS",
    "HOOKS",
    "METRICS",
    "TASK_UTILS",
    "TRANSFORMS",
):
    globals()[_name] = Registry(_name.lower())
for _name, _registry in vars(registry).items():
    if isinstance(_registry, registry.Registry):
        globals()[_name] = Registry(_registry.name, parent=_registry)


class BaseModule(nn.Module):
    """A module whose children's ``init_weights`` are called by its own.

    Args:
        init_cfg: None, or ``dict(type="Pretrained", checkpoint=..., prefix=...)``.
        args: of the next base class.
        kwargs: of the next base class.

    Attributes:
        is_init: whether weights were initialised or loaded. If not, trainers initialise them.

    Raises:
        ValueError: for another ``init_cfg``.
    """

    def __init__(
        self, init_cfg: Mapping[str, Any] | None = None, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        pretrained = (
            isinstance(init_cfg, Mapping) and init_cfg.get("type") == "Pretrained"
        )
        if init_cfg and not pretrained:
            raise ValueError(
                f"initialise weights in init_weights(), not by init_cfg={init_cfg!r}"
            )
        self.init_cfg = init_cfg
        self.is_init = False
        self.register_load_state_dict_post_hook(_is_loaded)  # type: ignore[no-untyped-call]

    def init_weights(self) -> None:
        """Initialise the children, then load what ``init_cfg`` names."""
        for child in self.children():
            if hasattr(child, "init_weights") and not getattr(child, "is_init", False):
                child.init_weights()  # type: ignore[operator]
        if self.init_cfg:
            prefix = self.init_cfg.get("prefix") or ""
            path = self.init_cfg["checkpoint"]
            checkpoint.load_checkpoint(self, path, prefix=prefix)
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
    def get_current_instance() -> logging.Logger:
        """The logger."""
        return logging.getLogger("hooktrain")


def print_log(message: Any, logger: Any = None, level: int = logging.INFO) -> None:
    """Log a message, whichever logger is named, or by the logger that is given."""
    if not isinstance(logger, logging.Logger):
        logger = MMLogger.get_current_instance()
    logger.log(level, message)
