"""The default writers and hooks, and the trainer that a configuration describes."""

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from hooktrain import events, solver
from hooktrain.checkpoint import Checkpointer
from hooktrain.config import ConfigDict, LazyConfig, instantiate, resolve
from hooktrain.engine import hooks
from hooktrain.engine.preflight import end_of_run
from hooktrain.engine.step_trainer import StepTrainer
from hooktrain.engine.train_loop import TrainerBase
from hooktrain.engine.trainers import SimpleTrainer
from hooktrain.evaluation import inference_on_dataset
from hooktrain.events import EventWriter
from hooktrain.model import init_weights_once
from hooktrain.model.wrappers import unwrap_model
from hooktrain.solver import OptimWrapper, OptimWrapperDict
from hooktrain.strategy import BaseStrategy, broadcast_buffers, build_strategy
from hooktrain.utils import comm
from hooktrain.utils.file_io import on_disk
from hooktrain.utils.periods import in_iterations

logger = logging.getLogger(__name__)

# What `train` can hold, as in configs/common/train.py.
_TRAIN_KEYS = """
    output_dir init_checkpoint resume_parts max_iter max_epochs epoch_length seed strategy device
    compile activation_checkpointing cudnn_benchmark amp accumulative_counts clip_grad ddp sync_bn
    auto_scale_lr ema checkpointer eval_period best_metric best_mode expected_results log_period
    watchdog_s
"""


def default_writers(output_dir: str, max_iter: int | None = None) -> list[EventWriter]:
    """Writers to the console, to ``metrics.json`` and to TensorBoard.

    The last one is left out where ``tensorboard`` is not installed.

    Args:
        output_dir: the folder to write to; the first write makes it.
        max_iter: see :class:`hooktrain.events.CommonMetricPrinter`.

    Raises:
        ValueError: if ``output_dir`` is empty, or an address such as ``s3://...``.
    """
    if not output_dir:
        raise ValueError("output_dir is empty: give a folder, such as './output'")
    output_dir = on_disk(output_dir)
    metrics = events.JSONWriter(Path(output_dir, "metrics.json"))
    writers: list[EventWriter] = [events.CommonMetricPrinter(max_iter), metrics]
    if find_spec("tensorboard") is not None:
        writers.append(events.TensorboardXWriter(output_dir))
    return writers


def default_hooks(
    *,
    scheduler: Any = None,
    checkpointer: Checkpointer,
    checkpoint_period: int | str,
    max_to_keep: int | None = None,
    eval_function: Callable[[], Mapping[str, Any] | None] | None = None,
    eval_period: int | str = 0,
    best_metric: str | None = None,
    best_mode: str | None = None,
    best_ema: hooks.EMA | None = None,
    writers: Sequence[EventWriter] = (),
    log_period: int | str = 20,
    watchdog_s: float = 0,
) -> list[hooks.HookBase]:
    """The usual hooks in the order that makes resuming exact.

    Evaluate, then write, then save: a checkpoint then holds what happened up to it, and the
    metric files are complete up to it. Last come those that end a run before its time, and what
    sums it up.

    Args:
        scheduler: see :class:`hooktrain.engine.hooks.LRScheduler`; or such a hook. Without any the
            rate is only recorded.
        checkpointer: what saves.
        checkpoint_period: in iterations, or a text such as ``"1 epoch"``, as the other periods.
        max_to_keep: how many periodic checkpoints to keep; None keeps all.
        eval_function: see :class:`hooktrain.engine.hooks.EvalHook`; None never evaluates.
        eval_period: 0 evaluates at the end only.
        best_metric: the metric that chooses ``model_best.pth``; None keeps no best one.
        best_mode: whether its ``"max"`` or ``"min"`` is best; see
            :class:`hooktrain.engine.hooks.BestCheckpointer`.
        best_ema: the average whose weights ``model_best.pth`` holds; None saves the raw
            ones.
        writers: see :class:`hooktrain.engine.hooks.PeriodicWriter`.
        log_period: of the writers.
        watchdog_s: see :class:`hooktrain.engine.hooks.Watchdog`. 0 watches nothing.
    """
    if not isinstance(scheduler, hooks.LRScheduler):
        scheduler = hooks.LRScheduler(scheduler=scheduler or [])
    found: list[hooks.HookBase] = [hooks.IterationTimer(), scheduler]
    if eval_function is not None:
        found.append(hooks.EvalHook(eval_period, eval_function))
        if best_metric is not None:
            found.append(
                hooks.BestCheckpointer(
                    eval_period, checkpointer, best_metric, best_mode, ema=best_ema
                )
            )
    found += [
        hooks.PeriodicWriter(writers, period=log_period),
        hooks.PeriodicCheckpointer(
            checkpointer, checkpoint_period, max_to_keep=max_to_keep
        ),
        hooks.Preemption(checkpointer),
    ]
    if watchdog_s > 0:
        found.append(hooks.Watchdog(watchdog_s))
    found.append(hooks.RunSummary(checkpointer.save_dir))
    return found


def of_inner_trainer(name: str) -> Any:
    """A property that is that of the trainer inside, which may also be set."""
    return property(
        lambda self: getattr(self._trainer, name),
        lambda self, value: setattr(self._trainer, name, value),
        doc=f"``{name}`` of the trainer inside.",
    )


class _InnerTrainer(SimpleTrainer):
    def compute_loss(self, data: Any) -> Any:
        return self._outer.compute_loss(data)


class DefaultTrainer(TrainerBase):
    """A trainer with the default hooks, built from a lazy configuration.

    The trainer inside, ``_trainer``, makes the steps: a
    :class:`hooktrain.engine.StepTrainer` for models with ``train_step``, a
    :class:`hooktrain.engine.SimpleTrainer` for others.

    The configuration has the keys ``model``, ``optimizer``, ``lr_multiplier``,
    ``dataloader.{train,test,evaluator}`` and ``train``; ``train`` has all keys of
    ``configs/common/train.py``. Without ``lr_multiplier`` the rate stays as it is, and without
    test data or an evaluator nothing is evaluated. With a dict of several test loaders the
    results are by their names, as in ``val/classification/accuracy``. For several optimizers see
    :meth:`build_optimizer`; ``lr_multiplier`` is one for all, or a dict by name. ``hooks`` is a
    list of further hooks, which run right before the evaluation; ``writers`` is a list of further
    writers.

    To change one part, override the method that builds it. To change more, write the dozen
    lines yourself: ``tools/plain_train_net.py`` shows the other extreme.

    Attributes:
        cfg: the configuration.
        strategy: where the model lives: device, processes, sharding, compilation.
        checkpointer: saves and loads the model and this trainer.
        ema: the hook with the averaged model, or None.
        last_results: of the last evaluation.

    Examples::

        trainer = DefaultTrainer(cfg)
        trainer.resume_or_load(resume=args.resume)
        trainer.train()
    """

    model = of_inner_trainer("model")
    data_loader = of_inner_trainer("data_loader")
    optimizer = of_inner_trainer("optimizer")
    optim_wrapper = of_inner_trainer("optim_wrapper")
    updating = of_inner_trainer("updating")
    last_batch = of_inner_trainer("last_batch")
    last_outputs = of_inner_trainer("last_outputs")

    def __init__(self, cfg: Any) -> None:
        super().__init__()
        _check_keys(cfg)
        self.cfg = resolve(cfg)  # what refers to what a script has changed
        train = cfg.train
        self.strategy = self.build_strategy(cfg)
        self._trainer = self._build_inner_trainer(cfg)
        self.epoch_length = train.epoch_length or self._trainer.epoch_length
        self.seed = self.strategy.seed
        self.checkpointer = self.build_checkpointer()
        if train.max_epochs is not None:
            train.max_iter = end_of_run(
                0, train.max_iter, train.max_epochs, self.epoch_length
            )
            resolve(cfg)
        self.max_iter = train.max_iter
        self.ema: hooks.EMA | None = None
        if train.ema.enabled:
            self.ema = hooks.EMA(self.model, train.ema.decay)
        self.meta = {"config": LazyConfig.to_py(cfg)}
        self.last_results: dict[str, Any] = {}
        self.register_hooks(self.build_hooks())

    def _build_inner_trainer(self, cfg: Any) -> SimpleTrainer | StepTrainer:
        model = self.strategy.prepare(
            lambda: init_weights_once(self.build_model(cfg)),
            compile=cfg.train.compile,
            # As in detectron2, the constructor of other models has initialised them.
            dispatch_kwargs={"init_weights_for_test_or_val": False},
        )
        bare = unwrap_model(model)
        loader = self.build_train_loader(cfg)
        _, optim_wrapper = self.strategy.prepare(
            model,
            optim_wrapper=self.build_optimizer(cfg, bare),
            dispatch_kwargs={"train_micro_batch_size_per_gpu": _batch_size(loader)},
        )
        period = cfg.train.log_period
        if cfg.train.epoch_length:
            period = in_iterations(period, cfg.train.epoch_length)
        kind = StepTrainer if hasattr(bare, "train_step") else _InnerTrainer
        return kind(model, loader, optim_wrapper, period)

    def run_step(self) -> None:
        """One iteration, by the trainer inside."""
        self._trainer.iter = self.iter
        self._trainer.run_step()

    def compute_loss(self, data: Any) -> Any:
        """See :meth:`SimpleTrainer.compute_loss`; a model with ``train_step`` has its own."""
        return SimpleTrainer.compute_loss(self._trainer, data)

    @classmethod
    def build_strategy(cls, cfg: Any) -> BaseStrategy:
        """Where the model lives, from ``train.strategy``, ``train.device`` and ``train.ddp``.

        Raises:
            TypeError: if ``train.strategy`` is an object, which ``train`` could not change.
            KeyError: for an unknown strategy or wrapper.
        """
        train = cfg.train
        strategy = instantiate(train.strategy)
        if isinstance(strategy, BaseStrategy):
            raise TypeError(
                f"train.strategy must be a name, or a dict with type: {strategy!r}"
            )
        return build_strategy(
            strategy,
            model_wrapper=train.ddp,
            sync_bn=train.sync_bn,
            work_dir=train.output_dir,
            device=train.device,
            activation_checkpointing=train.get("activation_checkpointing") or (),
            auto_scale_lr=train.auto_scale_lr,
            env_kwargs={"seed": train.seed, "diff_rank_seed": True},
        )

    @classmethod
    def build_model(cls, cfg: Any) -> nn.Module:
        """The model; the strategy brings it to its device and wraps it."""
        return instantiate(cfg.model)  # type: ignore[no-any-return]

    @classmethod
    def build_optimizer(
        cls, cfg: Any, model: nn.Module
    ) -> OptimWrapper | OptimWrapperDict:
        """The optimizer of a model in its wrapper: precision, accumulation, clipping.

        ``cfg.optimizer`` is one of

        - a ``LazyCall`` of an optimizer, whose ``params`` is a call that gets the ``model``, such
          as :func:`hooktrain.solver.get_default_optimizer_params`;
        - a dict of these by name: each is for the submodule of that name;
        - a ``LazyCall`` without ``params``: a function that gets the ``model``, and returns an
          optimizer, or several by name. It may return wrappers, which are used as they are.
        """
        described = cfg.optimizer
        if "_target_" in described:
            optimizer = _instantiate_for(described, model)
        else:
            optimizer = {
                name: _instantiate_for(each, model.get_submodule(name))
                for name, each in described.items()
            }
        if isinstance(optimizer, OptimWrapperDict):
            return optimizer
        if isinstance(optimizer, Mapping):
            wrappers = {
                name: _wrap(cfg.train, each) for name, each in optimizer.items()
            }
            return OptimWrapperDict(**wrappers)
        return _wrap(cfg.train, optimizer)

    @classmethod
    def build_lr_scheduler(
        cls, cfg: Any, optim_wrapper: OptimWrapper | OptimWrapperDict
    ) -> Any:
        """The multiplier of the learning rate; of several optimizers, one for all or by name."""
        return instantiate(cfg.get("lr_multiplier", []))

    @classmethod
    def build_train_loader(cls, cfg: Any) -> Iterable[Any]:
        """The endless stream of training batches."""
        return instantiate(cfg.dataloader.train)  # type: ignore[no-any-return]

    @classmethod
    def build_test_loader(cls, cfg: Any) -> Iterable[Any] | None:
        """The batches to evaluate on, or several such by name; None evaluates nothing."""
        return instantiate(cfg.dataloader.get("test"))  # type: ignore[no-any-return]

    @classmethod
    def build_evaluator(cls, cfg: Any) -> Any:
        """What judges the model's outputs, for all test loaders or by their names."""
        return instantiate(cfg.dataloader.get("evaluator"))

    def build_checkpointer(self) -> Checkpointer:
        """What saves and loads the model and this trainer."""
        options = self.cfg.train.checkpointer
        return Checkpointer(
            self.model,
            self.cfg.train.output_dir,
            background=options.background,
            sharded=options.sharded or self.strategy.saves_shards,
            # A proxy: the trainer owns the checkpointer, not the other way round.
            trainer=weakref.proxy(self),
        )

    def build_writers(self) -> list[EventWriter]:
        """Where metrics are written to: the default writers, and those of the configuration."""
        writers = default_writers(self.cfg.train.output_dir)
        return [*writers, *instantiate(self.cfg.get("writers", []))]

    def build_hooks(self) -> list[hooks.HookBase | None]:
        """The default hooks, with the averaged model's if it is asked for."""
        train = self.cfg.train
        # A proxy: a cycle of strong references would keep the model alive.
        me = weakref.proxy(self)
        known = ConfigDict(self.cfg, train={**train, "epoch_length": self.epoch_length})
        is_of_average = str(train.best_metric).startswith("ema/")  # see _evaluate
        found = default_hooks(
            scheduler=self.build_lr_scheduler(known, self.optim_wrapper),
            checkpointer=self.checkpointer,
            checkpoint_period=train.checkpointer.period,
            max_to_keep=train.checkpointer.max_to_keep,
            eval_function=lambda: me._evaluate(),
            eval_period=train.eval_period,
            best_metric=train.best_metric,
            best_mode=train.best_mode,
            best_ema=self.ema if is_of_average else None,
            writers=self.build_writers(),
            log_period=train.log_period,
            watchdog_s=train.watchdog_s,
        )
        more = instantiate(self.cfg.get("hooks", []))
        # Behind the timer and the schedule, right before the evaluation.
        return [*found[:2], self.ema, *more, *found[2:]]

    @cached_property
    def _evaluator(self) -> Any:
        """Built by the first evaluation, since it may take long."""
        return self.build_evaluator(self.cfg)

    def _evaluate(self) -> dict[str, Any]:
        results = self._test_now()
        if self.ema is not None:
            logger.info("Evaluating the averaged model")
            with self.ema.swap():
                results = {**results, "ema": self._test_now()}
        self.last_results = results
        return results

    def _test_now(self) -> dict[str, Any]:
        # So that all ranks evaluate what a checkpoint holds.
        broadcast_buffers(self.model)
        return self.test(self.cfg, self.model, self._evaluator)

    @classmethod
    def test(cls, cfg: Any, model: nn.Module, evaluators: Any = None) -> dict[str, Any]:
        """Evaluate a model on ``dataloader.test``. A collective: every rank calls it.

        Args:
            cfg: the configuration.
            model: the model.
            evaluators: as :func:`hooktrain.evaluation.inference_on_dataset` takes them.
                As while training, a model that owns its steps has its ``val_step`` called.
                None takes that of :meth:`build_evaluator`, and calls ``test_step``.
        """
        step = "val_step"
        if evaluators is None:
            evaluators = cls.build_evaluator(cfg)
            step = "test_step"
        loader = cls.build_test_loader(cfg)
        if loader is None or evaluators is None:
            return {}
        return inference_on_dataset(model, loader, evaluators, step=step)

    def resume_or_load(self, resume: bool = True) -> None:
        """Continue the run in the output folder, or start from ``train.init_checkpoint``.

        Args:
            resume: whether to continue. Without a checkpoint the run starts from the
                beginning, so the same command can be submitted again and again.
        """
        self.checkpointer.resume_or_load(
            self.cfg.train.init_checkpoint,
            resume=resume,
            checkpointables=self.cfg.train.resume_parts,
        )

    def train(  # type: ignore[override]
        self, start_iter: int | None = None, max_iter: int | None = None
    ) -> dict[str, Any]:
        """Train up to ``train.max_iter``, or to ``max_iter`` if given.

        Returns:
            The results of the last evaluation.
        """
        if max_iter is None:
            max_iter = self.cfg.train.max_iter
        super().train(start_iter, max_iter)
        return self.last_results


def _check_keys(cfg: Any) -> None:
    unknown = [key for key in cfg.train if key not in _TRAIN_KEYS.split()]
    if unknown:
        logger.warning(
            "Nothing here reads %s of train; configs/common/train.py has what it can hold",
            unknown,
        )


def _instantiate_for(described: Mapping[str, Any], model: nn.Module) -> Any:
    """The optimizer of a model. The configuration stays plain data: a copy gets the model."""
    if "params" not in described:
        return instantiate({**described, "model": model})
    params = {**described["params"], "model": model}
    return instantiate({**described, "params": params})


def _wrap(train: Any, optimizer: Any) -> OptimWrapper:
    if isinstance(optimizer, OptimWrapper):
        return optimizer
    options = {
        "accumulative_counts": train.accumulative_counts,
        "clip_grad": train.clip_grad,
    }
    if train.amp.enabled:
        dtype = instantiate(train.amp.dtype)  # in a saved file, a call
        return solver.AmpOptimWrapper(optimizer, dtype, **options)
    return OptimWrapper(optimizer, **options)


def _batch_size(loader: Any) -> int | None:
    """Of one rank, as far as the loader says."""
    total = getattr(loader, "total_batch_size", None)
    if total:
        return int(total) // comm.data_parallel_size()
    return getattr(loader, "batch_size", None)
