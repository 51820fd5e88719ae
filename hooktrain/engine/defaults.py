"""A trainer that builds itself from a configuration."""

import inspect
import logging
import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from hooktrain.checkpoint import Checkpointer
from hooktrain.config import LazyConfig, instantiate
from hooktrain.engine.default_parts import (
    batch_size_of_a_rank,
    create_ddp_model,
    default_argument_parser,
    default_hooks,
    default_setup,
    default_strategy,
    default_writers,
)
from hooktrain.engine.hooks import EMA, EvalHook
from hooktrain.engine.train_loop import HookBase
from hooktrain.engine.trainers import SimpleTrainer, StepTrainer
from hooktrain.evaluation import (
    DatasetEvaluator,
    inference_on_dataset,
    print_csv_format,
    verify_results,
)
from hooktrain.solver import (
    AmpOptimWrapper,
    OptimWrapper,
    OptimWrapperDict,
    build_optim_wrapper,
    build_param_scheduler,
)
from hooktrain.strategy import BaseStrategy, broadcast_buffers
from hooktrain.utils import comm
from hooktrain.utils.events import EventWriter
from hooktrain.utils.registry import unwrap_model

__all__ = [
    "DefaultTrainer",
    "create_ddp_model",
    "default_argument_parser",
    "default_hooks",
    "default_setup",
    "default_writers",
]

logger = logging.getLogger(__name__)


class DefaultTrainer(StepTrainer, SimpleTrainer):
    """A trainer with the default hooks, built from a lazy configuration.

    It trains models with ``train_step`` as :class:`StepTrainer` does it, and others as
    :class:`SimpleTrainer`.

    The configuration has the keys ``model``, ``optimizer``, ``lr_multiplier``,
    ``dataloader.{train,test,evaluator}`` and ``train``; ``configs/common/train.py`` lists what
    ``train`` can hold. In place of ``optimizer`` and ``lr_multiplier`` it may have
    ``optim_wrapper`` and ``param_scheduler``, as :func:`~hooktrain.solver.build_optim_wrapper` and
    :func:`~hooktrain.solver.build_param_scheduler` take them: for several optimizers, or for
    schedules of anything but the learning rate. ``hooks`` is a list of further hooks, which run
    right before the evaluation. To change one part, override the method that builds it. To change
    more, write the dozen lines yourself: ``tools/plain_train_net.py`` shows the other extreme.

    Attributes:
        cfg: the configuration.
        strategy: where the model lives: device, processes, sharding, compilation.
        checkpointer: saves and loads the model and this trainer.
        ema: the hook with the averaged model, or None.

    Examples::

        trainer = DefaultTrainer(cfg)
        trainer.resume_or_load(resume=args.resume)
        trainer.train()
    """

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg
        self.strategy = self.build_strategy(cfg)
        model = self.strategy.prepare(
            lambda: self.build_model(cfg),
            compile=cfg.train.get("compile", False),
            # As in detectron2, the constructor of the model has initialised its weights.
            dispatch_kwargs={"init_weights_for_test_or_val": False},
        )
        loader = self.build_train_loader(cfg)
        _, optim_wrapper = self.strategy.prepare(
            model,
            optim_wrapper=self.build_optimizer(cfg, unwrap_model(model)),
            dispatch_kwargs={"train_micro_batch_size_per_gpu": batch_size_of_a_rank(loader)},
        )
        owns_step = hasattr(unwrap_model(model), "train_step")
        self._kind = StepTrainer if owns_step else SimpleTrainer
        self._kind.__init__(self, model, loader, optim_wrapper, cfg.train.log_period)
        self.seed = self.strategy.seed
        self.meta = {"config": LazyConfig.to_py(cfg), "seed": self.strategy.seed}
        self.checkpointer = self.build_checkpointer()
        self.max_iter = cfg.train.max_iter
        self.ema = EMA(model, cfg.train.ema.decay) if cfg.train.ema.enabled else None
        self.last_results: dict[str, Any] = {}
        self._evaluator: DatasetEvaluator | None = None
        self.register_hooks(self.build_hooks())

    def run_step(self) -> None:
        """One iteration, by the model's own step if it has one."""
        self._kind.run_step(self)

    @classmethod
    def build_strategy(cls, cfg: Any) -> BaseStrategy:
        """Where the model lives, from ``train.strategy``, ``train.device`` and ``train.ddp``."""
        return default_strategy(cfg.train)

    @classmethod
    def build_model(cls, cfg: Any) -> nn.Module:
        """The model; the strategy brings it to its device and wraps it."""
        model: nn.Module = instantiate(cfg.model)
        logger.info("Model:\n%s", model)
        return model

    @classmethod
    def build_optimizer(cls, cfg: Any, model: nn.Module) -> OptimWrapper | OptimWrapperDict:
        """The optimizer in its wrapper: precision, accumulation and clipping."""
        if "optim_wrapper" in cfg:
            if "optimizer" in cfg:
                raise ValueError("the configuration has both optimizer and optim_wrapper")
            return build_optim_wrapper(model, instantiate(cfg.optim_wrapper))
        cfg.optimizer.params.model = model
        try:
            optimizer = instantiate(cfg.optimizer)
        finally:
            # The configuration stays plain data.
            del cfg.optimizer.params["model"]
        options = {
            "accumulative_counts": cfg.train.accumulative_counts,
            "clip_grad": cfg.train.clip_grad,
        }
        if cfg.train.amp.enabled:
            return AmpOptimWrapper(optimizer, cfg.train.amp.dtype, **options)
        return OptimWrapper(optimizer, **options)

    @classmethod
    def build_lr_scheduler(cls, cfg: Any, optim_wrapper: OptimWrapper | OptimWrapperDict) -> Any:
        """The schedule: a multiplier of the learning rate, or what ``param_scheduler`` lists."""
        if "param_scheduler" not in cfg:
            return instantiate(cfg.lr_multiplier)
        if "lr_multiplier" in cfg:
            raise ValueError("the configuration has both lr_multiplier and param_scheduler")
        run: dict[str, Any] = {"max_iters": cfg.train.max_iter}
        if epoch_length := cfg.train.get("epoch_length"):
            run["epoch_length"] = epoch_length
            run["max_epochs"] = math.ceil(cfg.train.max_iter / epoch_length)
        return build_param_scheduler(instantiate(cfg.param_scheduler), optim_wrapper, run)

    @classmethod
    def build_train_loader(cls, cfg: Any) -> Iterable[Any]:
        """The endless stream of training batches."""
        loader: Iterable[Any] = instantiate(cfg.dataloader.train)
        return loader

    @classmethod
    def build_test_loader(cls, cfg: Any) -> Iterable[Any]:
        """The batches to evaluate on."""
        loader: Iterable[Any] = instantiate(cfg.dataloader.test)
        return loader

    @classmethod
    def build_evaluator(cls, cfg: Any) -> DatasetEvaluator:
        """What judges the model's outputs."""
        evaluator: DatasetEvaluator = instantiate(cfg.dataloader.evaluator)
        return evaluator

    def build_checkpointer(self) -> Checkpointer:
        """What saves and loads the model and this trainer."""
        options = self.cfg.train.checkpointer
        return Checkpointer(
            self.model,
            self.cfg.train.output_dir,
            background=options.get("background", False),
            sharded=options.get("sharded", False) or self.strategy.saves_shards,
            # A proxy: the trainer owns the checkpointer, not the other way round.
            trainer=weakref.proxy(self),
        )

    def build_writers(self) -> list[EventWriter]:
        """Where metrics are written to."""
        return default_writers(self.cfg.train.output_dir, self.max_iter)

    def build_hooks(self) -> list[HookBase]:
        """The default hooks, with the averaged model's if it is asked for."""
        train = self.cfg.train
        # A bound method in a hook of ours would be a cycle, which keeps the model's memory alive.
        me = weakref.proxy(self)
        hooks = default_hooks(
            scheduler=self.build_lr_scheduler(self.cfg, self.optim_wrapper),
            checkpointer=self.checkpointer,
            checkpoint_period=train.checkpointer.period,
            max_to_keep=train.checkpointer.max_to_keep,
            eval_function=lambda: me._evaluate(),
            eval_period=train.eval_period,
            best_metric=train.best_metric,
            best_mode=train.get("best_mode", "max"),
            writers=self.build_writers(),
            log_period=train.log_period,
            epoch_length=train.get("epoch_length"),
            watchdog_s=train.get("watchdog_s", 0),
        )
        place = next(i for i, hook in enumerate(hooks) if isinstance(hook, EvalHook))
        hooks[place:place] = instantiate(self.cfg.get("hooks", []))
        if self.ema is not None:
            hooks.insert(place, self.ema)
        return hooks

    def _evaluate(self) -> dict[str, Any]:
        if self._evaluator is None:  # it may take long to build
            self._evaluator = self.build_evaluator(self.cfg)
        options: dict[str, Any] = {"evaluators": self._evaluator, "step": "val_step"}
        # Overridden as in detectron2, it may take none or one of these.
        known = inspect.signature(self.test).parameters
        options = {name: value for name, value in options.items() if name in known}

        def test() -> dict[str, Any]:
            broadcast_buffers(self.model)  # so that all ranks evaluate what a checkpoint holds
            return self.test(self.cfg, self.model, **options)

        results = test()
        if self.ema is not None:
            logger.info("Evaluating the averaged model")
            with self.ema.swap():
                averaged = test()
            results = {**results, "ema": averaged}
        self.last_results = results
        return results

    @classmethod
    def test(
        cls,
        cfg: Any,
        model: nn.Module,
        evaluators: DatasetEvaluator | Sequence[DatasetEvaluator] | None = None,
        step: str = "test_step",
    ) -> dict[str, Any]:
        """Evaluate a model on ``dataloader.test``. A collective: every rank calls it.

        Args:
            cfg: the configuration.
            model: the model.
            evaluators: one or several; None is that of :meth:`build_evaluator`.
            step: see :func:`~hooktrain.evaluation.inference_on_dataset`.
        """
        loader = cls.build_test_loader(cfg)
        evaluators = cls.build_evaluator(cfg) if evaluators is None else evaluators
        results = inference_on_dataset(model, loader, evaluators, step=step)
        if comm.is_main_process():
            print_csv_format(results)
        return results

    def resume_or_load(self, resume: bool = True) -> None:
        """Continue the run in the output folder, or start from ``train.init_checkpoint``.

        Args:
            resume: whether to continue. With no checkpoint there, the run starts anew, so the
                same command can be submitted again and again.
        """
        self.checkpointer.resume_or_load(
            self.cfg.train.init_checkpoint,
            resume=resume,
            checkpointables=self.cfg.train.resume_parts,
        )

    def train(  # type: ignore[override]
        self, start_iter: int | None = None, max_iter: int | None = None
    ) -> dict[str, Any]:
        """Train up to ``train.max_iter``, unless told otherwise.

        Returns:
            The results of the last evaluation.

        Raises:
            ValueError: if ``train.expected_results`` are given and not reached.
        """
        super().train(start_iter, self.cfg.train.max_iter if max_iter is None else max_iter)
        if self.cfg.train.expected_results and comm.is_main_process():
            verify_results(self.cfg.train.expected_results, self.last_results)
        return self.last_results
