"""What models, hooks, metrics and scripts import from MMEngine, in one place.

``tools/from_mmengine.sed`` makes ``from mmengine.model import BaseModel`` into
``from hooktrain.compat.mmengine import BaseModel``. A name that is not here is an ImportError
which says what takes its place.
"""

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hooktrain import checkpoint, model as models
from hooktrain.engine import *
from hooktrain.evaluation import DatasetEvaluator
from hooktrain.model import *
from hooktrain.solver import *
from hooktrain.solver.param_scheduler import *  # type: ignore[assignment]  # not fvcore's functions
from hooktrain.solver.param_scheduler import _ParamScheduler as _ParamScheduler
from hooktrain.strategy import *
from hooktrain.strategy.environment import set_random_seed as set_random_seed
from hooktrain.utils import comm, names, registry
from hooktrain.utils.comm import on_main_process
from hooktrain.utils.file_io import AnyPath

# isort: split
# Last, since they replace what has the same name above.
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
    "MessageHub": "get_event_storage() of hooktrain.events: iter, history(name)",
    "NaiveVisualizationHook": "trainer.storage.put_image",
    "ParamSchedulerHook": "hooks.LRScheduler",
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


class _Runner:
    """A trainer under the names of a runner."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.logger = logging.getLogger("hooktrain")
        self.epoch_length = trainer.epoch_length or trainer.max_iter

    @property
    def epoch(self) -> int:
        return int(self.trainer.iter // self.epoch_length)

    def __getattr__(self, name: str) -> Any:
        ours = {"max_iters": "max_iter", "train_dataloader": "data_loader"}
        return getattr(self.trainer, ours.get(name, name))


_ELSEWHERE = {
    "before_save_checkpoint": "return what is to be saved from state_dict()",
    "after_load_checkpoint": "take what was saved in load_state_dict(state)",
}
for _when in ("before", "after"):
    for _what in ("val", "test", "val_epoch", "test_epoch", "val_iter", "test_iter"):
        _ELSEWHERE[f"{_when}_{_what}"] = (
            "give inference_on_dataset callbacks, as after_inference"
        )
    for _what in ("epoch", "iter"):
        _ELSEWHERE[f"_{_when}_{_what}"] = f"override {_when}_train_{_what}"


def _with_runner(method: Callable[..., Any]) -> Callable[..., Any]:
    """An event that the trainer calls without a runner, with that of the whole run around it."""

    @wraps(method)
    def event(self: Any, runner: Any = None) -> None:
        if runner is not None:  # called by a subclass
            method(self, runner)
            return
        runner = _Runner(self.trainer)
        if method.__name__ == "before_train":
            self.before_run(runner)
        method(self, runner)
        if method.__name__ == "after_train":
            self.after_run(runner)

    return event


class Hook(HookBase):
    """A hook with the events of MMEngine's training; the trainer is under a runner's names.

    Hooks run in the order of their registration, whatever their priority.

    Raises:
        TypeError: when a subclass is defined that has other events.
    """

    priority = "NORMAL"

    def __init_subclass__(cls) -> None:
        names.refuse_overrides(cls, _ELSEWHERE)
        for name in ("before_train", "after_train"):
            if name in vars(cls):
                setattr(cls, name, _with_runner(vars(cls)[name]))

    @_with_runner
    def before_train(self, runner: Any) -> None:
        """Called before the first iteration."""

    @_with_runner
    def after_train(self, runner: Any) -> None:
        """Called after the last iteration."""

    def before_run(self, runner: Any) -> None:
        """Called before :meth:`before_train`."""

    def after_run(self, runner: Any) -> None:
        """Called after :meth:`after_train`."""

    def before_train_epoch(self, runner: Any) -> None:
        """Called before the first iteration of an epoch, which has ``len(loader)``."""

    def after_train_epoch(self, runner: Any) -> None:
        """Called after the last iteration of an epoch."""

    def before_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None
    ) -> None:
        """Called before each iteration; the batch is not there yet, and None."""

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Called after each iteration, with its batch and what ``train_step`` returned."""

    def before_step(self) -> None:
        """Call the events before an iteration."""
        runner = _Runner(self.trainer)
        place = runner.iter % runner.epoch_length
        if place == 0:
            self.before_train_epoch(runner)
        self.before_train_iter(runner, place)

    def after_step(self) -> None:
        """Call the events after an iteration."""
        runner = _Runner(self.trainer)
        place = runner.iter % runner.epoch_length
        self.after_train_iter(runner, place, runner.last_batch, runner.last_outputs)
        if place + 1 == runner.epoch_length:
            self.after_train_epoch(runner)

    def every_n_train_iters(self, runner: Any, n: int, start: int = 0) -> bool:
        """Whether this is one of every ``n`` iterations after ``start``."""
        done = runner.iter - start
        return done >= 0 and self.every_n_inner_iters(done, n)

    def every_n_epochs(self, runner: Any, n: int, start: int = 0) -> bool:
        """Whether this is one of every ``n`` epochs after ``start``."""
        done = runner.epoch - start
        return done >= 0 and self.every_n_inner_iters(done, n)

    def every_n_inner_iters(self, batch_idx: int, n: int) -> bool:
        """Whether this is one of every ``n`` iterations of an epoch."""
        return n > 0 and (batch_idx + 1) % n == 0

    def end_of_epoch(self, dataloader: Any, batch_idx: int) -> bool:
        """Whether this is the last iteration of an epoch."""
        return bool(batch_idx + 1 == len(dataloader))

    def is_last_train_epoch(self, runner: Any) -> bool:
        """Whether this is the last epoch, which may be shorter."""
        end = (runner.epoch + 1) * runner.epoch_length
        return bool(end >= runner.max_iters)

    def is_last_train_iter(self, runner: Any) -> bool:
        """Whether this is the last iteration."""
        return bool(runner.iter + 1 == runner.max_iters)


class BaseMetric(DatasetEvaluator):
    """An evaluator that computes metrics from ``results``, a list for all samples of all ranks.

    Args:
        collect_device: ``"cpu"`` or ``"gpu"``: results are always brought together on the CPU.
        prefix: put before the names of the metrics; None is ``default_prefix``.
        collect_dir: not used.

    Attributes:
        results: what :meth:`process` has appended.
        dataset_meta: set it, if the metric needs it.
    """

    default_prefix: str | None = None

    def __init__(
        self,
        collect_device: str = "cpu",
        prefix: str | None = None,
        collect_dir: Any = None,
    ) -> None:
        self.results: list[Any] = []
        self.prefix = prefix or self.default_prefix
        self.dataset_meta: Any = None

    def reset(self) -> None:
        """Forget everything: a new evaluation begins."""
        self.results.clear()

    @abstractmethod
    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        """The metrics by name, from the results of all ranks; called on the main process."""

    def evaluate(self, size: int | None = None) -> dict[str, Any]:
        """The metrics, on every rank. A collective.

        Args:
            size: of the data set: what is beyond is left out, as padding.
        """
        mine = tree_map_only(Tensor, lambda tensor: tensor.cpu(), self.results)
        of_ranks = comm.all_gather(mine)
        results = [*chain.from_iterable(of_ranks)][:size]
        metrics = on_main_process(lambda: self.compute_metrics(results))
        self.results.clear()
        if self.prefix:
            return {self.prefix: metrics}
        return metrics


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


def load_checkpoint(
    model: nn.Module,
    filename: AnyPath,
    map_location: Any = None,
    strict: bool = False,
    logger: Any = None,
    revise_keys: Sequence[tuple[str, str]] = (),
) -> dict[str, Any]:
    """:func:`hooktrain.checkpoint.load_checkpoint` with MMEngine's arguments.

    Args:
        model: see there.
        filename: see there.
        map_location: see there; None is where each tensor was.
        strict: see there.
        logger: not used. This package's logger warns of what does not fit.
        revise_keys: see there.
    """
    return checkpoint.load_checkpoint(
        model, filename, map_location, strict, revise_keys
    )


def from_mmengine(state: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint of MMEngine, or of a strategy, as a trainer's.

    Save the result, and ``checkpointer.load(path)`` goes on with the run. What pickles
    other objects (``"message_hub"``, most of ``"meta"``) is left out. Where MMEngine's
    EMAHook has saved the average as the model, the result has the raw weights as the
    model, and the average in the state of the hook ``EMA``.

    Args:
        state: is not changed. Its ``meta["iter"]`` is the number of finished iterations.

    Raises:
        KeyError: if it lacks the model, the optimizer or ``meta["iter"]``.
    """
    key = "model" if "model" in state else "state_dict"
    model = dict(state[key])
    hooks: dict[str, Any] = {}
    if "ema_state_dict" in state:
        average = dict(state["ema_state_dict"])
        for name, averaged in model.items():
            key = f"module.{name}"
            model[name] = average[key]
            average[key] = averaged
        hooks["EMA"] = average
    schedulers = state.get("param_schedulers")
    if isinstance(schedulers, list):
        schedulers = {"": schedulers}
    if schedulers:
        hooks["LRScheduler"] = {"schedulers": schedulers}
    meta = state["meta"]
    last = meta["iter"] - 1
    trainer = {
        "iteration": last,
        "optimizer": state["optimizer"],
        "hooks": hooks,
        "seed": meta.get("seed"),
    }
    return {"model": model, "trainer": trainer, "iteration": last}


def to_mmengine(state: Mapping[str, Any]) -> dict[str, Any]:
    """A trainer's checkpoint as MMEngine's, which strategies load too.

    Args:
        state: is not changed.
    """
    trainer = state["trainer"]
    hook = trainer["hooks"].get("LRScheduler", {})
    schedulers = hook.get("schedulers", {})
    return {
        "state_dict": state["model"],
        "optimizer": trainer["optimizer"],
        "param_schedulers": schedulers.get("", schedulers),
        "meta": {"iter": trainer["iteration"] + 1, "seed": trainer.get("seed")},
    }
