"""detectron2's DefaultTrainer, configured by a tree such as yacs's CfgNode."""

import logging
import operator
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hooktrain.compat.detectron2.checkpoint import (
    DetectionCheckpointer,
    PeriodicCheckpointer,
)
from hooktrain.compat.detectron2.functions import import_from_detectron2, verify_results
from hooktrain.compat.detectron2.solver import build_lr_scheduler, build_optimizer
from hooktrain.compat.detectron2.trainers import (
    AMPTrainer as AMPTrainer,
    SimpleTrainer as SimpleTrainer,
    TrainerBase as TrainerBase,
    inner_attribute,
)
from hooktrain.engine import hooks
from hooktrain.engine.defaults import create_ddp_model, default_writers
from hooktrain.evaluation import (
    DatasetEvaluator,
    flatten_results_dict,
    inference_on_dataset,
    print_csv_format,
)
from hooktrain.events import EventWriter
from hooktrain.model import get_bn_modules
from hooktrain.utils import comm
from hooktrain.utils.logger import setup_logger
from hooktrain.utils.periods import Period

logger = logging.getLogger(__name__)


class BestCheckpointer(hooks.BestCheckpointer):
    """A :class:`hooktrain.engine.hooks.BestCheckpointer` that reads its metric from the storage.

    It reads the metric at the end of each ``eval_period`` and of the run, whichever hook has put
    it. It has the names that subclasses read and override.
    """

    _logger = logger

    def __init__(
        self,
        eval_period: int | str,
        checkpointer: Any,
        val_metric: str,
        mode: str = "max",
        file_prefix: str = "model_best",
        **kwargs: Any,
    ) -> None:
        super().__init__(checkpointer, val_metric, mode, file_prefix, **kwargs)
        self._period = Period(eval_period)
        self._compare = operator.gt if mode == "max" else operator.lt

    def after_evaluation(self, results: Any) -> None:
        """Do nothing: the results are read from the storage."""

    def after_step(self) -> None:
        """Check the metric at the end of a period; the last one is left to :meth:`after_train`."""
        if not self.trainer.is_last and self._period.is_due(self.trainer):
            self._best_checking()

    def after_train(self) -> None:
        """Check the metric of the final evaluation."""
        if self.trainer.succeeded:
            self._best_checking()
        super().after_train()

    def _best_checking(self) -> None:
        """Save the model if the latest value belongs to these weights and is the best so far."""
        storage, name = self.trainer.storage, self._val_metric
        # An evaluation result takes precedence over a training metric of the same name.
        known = storage.histories() | storage.results()
        latest = known[name].tail(1)[0] if name in known else (0.0, -1)
        if self.on_every_rank:  # perhaps only the main process has the metric
            latest = comm.broadcast(latest)
        value, measured_at = latest
        if measured_at < self.trainer.done - 1:
            logger.warning("%r has no value from this iteration", name)
        else:
            self._judge(value)


class EvalHook(hooks.EvalHook):
    """An :class:`hooktrain.engine.hooks.EvalHook` whose function must return (nested) numbers.

    As in detectron2 the final evaluation comes after the last iteration, and so after a
    checkpoint that is saved in it, wherever the hook is registered.

    Raises:
        ValueError: during a run, if a result is not a number.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._func = partial(_only_numbers, self._func)

    def after_step(self) -> None:
        """Evaluate at the end of a period; the last iteration is left to :meth:`after_train`."""
        if not (self.trainer.is_last and self._eval_after_train):
            super().after_step()


def _only_numbers(evaluate: Callable[[], Any]) -> Any:
    results = evaluate()
    for name, value in flatten_results_dict(results or {}).items():
        try:
            float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                "[EvalHook] eval_function should return a nested dict of float. "
                f"Got '{name}: {value}' instead."
            ) from error
    return results


class LRScheduler(hooks.LRScheduler):
    """A :class:`hooktrain.engine.hooks.LRScheduler` with the names that subclasses read."""

    def before_train(self) -> None:
        """Find the arguments that were not given; see the base class."""
        super().before_train()
        # With several optimizers these attributes do not exist.
        if self._optimizer is None:
            self._optimizer = getattr(self.trainer, "optimizer", None)
        if isinstance(self._optimizer, Optimizer):
            self._best_param_group_id = self.get_best_param_group_id(self._optimizer)


class DefaultTrainer(TrainerBase):
    """A trainer with detectron2's default hooks, built from detectron2's configuration tree.

    Subclasses override the same methods as in detectron2: ``build_...``, ``test``, ``run_step``,
    ``train``, ``resume_or_load``, or the constructor. If no method builds the model or the data,
    detectron2 does, if it is installed.

    The default hooks are followed by those that save on SIGTERM and SIGINT, and summarise the run.

    It reads these keys of the configuration: those of :func:`build_optimizer` and
    :func:`build_lr_scheduler`, ``OUTPUT_DIR``, ``MODEL.WEIGHTS``,
    ``SOLVER.{MAX_ITER,CHECKPOINT_PERIOD,AMP.ENABLED,REFERENCE_WORLD_SIZE}``, ``DATASETS.TEST`` and
    ``TEST.{EVAL_PERIOD,EXPECTED_RESULTS,PRECISE_BN}``.

    Args:
        cfg: a tree with attributes, ``clone`` and ``defrost``, such as fvcore's CfgNode.

    Attributes:
        cfg: the configuration.
        scheduler: the schedule that :meth:`build_lr_scheduler` has built.
        checkpointer: the Checkpointer of the model and this trainer. To start from a pickled file
            of a model zoo, set its ``trusted`` first.
    """

    model = inner_attribute("model")
    data_loader = inner_attribute("data_loader")
    optimizer = inner_attribute("optimizer")
    optim_wrapper = inner_attribute("optim_wrapper")
    updating = inner_attribute("updating")
    _data_loader_iter = inner_attribute("_data_loader_iter")
    _write_metrics = inner_attribute("_write_metrics")
    _last_eval_results: Any

    def __init__(self, cfg: Any) -> None:
        super().__init__()
        if not logging.getLogger("hooktrain").isEnabledFor(logging.INFO):
            setup_logger()
        cfg = self.auto_scale_workers(cfg, comm.get_world_size())
        model = self.build_model(cfg)
        optimizer = self.build_optimizer(cfg, model)
        loader = self.build_train_loader(cfg)
        model = create_ddp_model(model, broadcast_buffers=False)
        kind = AMPTrainer if cfg.SOLVER.AMP.ENABLED else SimpleTrainer
        self._trainer = kind(model, loader, optimizer)
        self.scheduler = self.build_lr_scheduler(cfg, self.optimizer)
        # A proxy, since the trainer owns the checkpointer, not vice versa.
        self.checkpointer = DetectionCheckpointer(
            model, cfg.OUTPUT_DIR, trainer=weakref.proxy(self)
        )
        self.max_iter = cfg.SOLVER.MAX_ITER
        self.cfg = cfg
        self.register_hooks([*self.build_hooks(), hooks.Preemption(self.checkpointer)])

    def run_step(self) -> None:
        """Run one iteration of the ``_trainer``."""
        self._trainer.iter = self.iter
        self._trainer.run_step()

    def resume_or_load(self, resume: bool = True) -> None:
        """Resume from the last checkpoint in ``OUTPUT_DIR``, or load ``MODEL.WEIGHTS``."""
        self.checkpointer.resume_or_load(self.cfg.MODEL.WEIGHTS, resume=resume)
        if resume and self.checkpointer.has_checkpoint():
            self.start_iter = self.iter + 1

    def build_hooks(self) -> list[hooks.HookBase | None]:
        """The default hooks in detectron2's order, on every rank. The last one writes."""
        cfg = self.cfg.clone()
        cfg.defrost()
        cfg.DATALOADER.NUM_WORKERS = 0
        period = cfg.TEST.EVAL_PERIOD
        # A cycle of strong references would keep the model alive.
        me = weakref.proxy(self)

        def test_and_save_results() -> Any:
            me._last_eval_results = me.test(me.cfg, me.model)
            return me._last_eval_results

        precise = None
        if cfg.TEST.PRECISE_BN.ENABLED and get_bn_modules(self.model):
            precise = hooks.PreciseBN(
                period,
                self.model,
                self.build_train_loader(cfg),
                cfg.TEST.PRECISE_BN.NUM_ITER,
            )
        return [
            hooks.IterationTimer(),
            LRScheduler(),
            precise,
            PeriodicCheckpointer(self.checkpointer, cfg.SOLVER.CHECKPOINT_PERIOD),
            EvalHook(period, test_and_save_results),
            hooks.PeriodicWriter(self.build_writers(), period=20),
        ]

    def build_writers(self) -> list[EventWriter]:
        """The writers of metrics."""
        return default_writers(self.cfg.OUTPUT_DIR, self.max_iter)

    def train(  # type: ignore[override]
        self, start_iter: int | None = None, max_iter: int | None = None
    ) -> Any:
        """Train from ``start_iter`` to ``max_iter``, by default those of this trainer.

        Returns:
            The results of the last evaluation on the main process, if ``TEST.EXPECTED_RESULTS``
            are given.
        """
        if start_iter is None:
            start_iter = self.start_iter
        if max_iter is None:
            max_iter = self.max_iter
        super().train(start_iter, max_iter)
        if self.cfg.TEST.EXPECTED_RESULTS and comm.is_main_process():
            verify_results(self.cfg, self._last_eval_results)
            return self._last_eval_results
        return None

    @classmethod
    def build_model(cls, cfg: Any) -> nn.Module:
        """The model, on its device."""
        model: nn.Module = import_from_detectron2("build_model")(cfg)
        logger.info("Model:\n%s", model)
        return model

    @classmethod
    def build_optimizer(cls, cfg: Any, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer, or a wrapper around it."""
        return build_optimizer(cfg, model)

    @classmethod
    def build_lr_scheduler(cls, cfg: Any, optimizer: torch.optim.Optimizer) -> Any:
        """The schedule of a torch optimizer, for :class:`hooks.LRScheduler`."""
        return build_lr_scheduler(cfg, optimizer)

    @classmethod
    def build_train_loader(cls, cfg: Any) -> Any:
        """The loader of training batches."""
        return import_from_detectron2("build_detection_train_loader")(cfg)

    @classmethod
    def build_test_loader(cls, cfg: Any, dataset_name: str) -> Any:
        """The loader of a data set's batches to evaluate on."""
        return import_from_detectron2("build_detection_test_loader")(cfg, dataset_name)

    @classmethod
    def build_evaluator(cls, cfg: Any, dataset_name: str) -> DatasetEvaluator:
        """The evaluator for a data set; without it there is no evaluation."""
        raise NotImplementedError("override build_evaluator to evaluate")

    @classmethod
    def test(cls, cfg: Any, model: nn.Module, evaluators: Any = None) -> dict[str, Any]:
        """Evaluate a model on each of ``DATASETS.TEST``. A collective: every rank calls it.

        Args:
            cfg: the configuration.
            model: the model.
            evaluators: an evaluator for each data set, or one for all; None takes those of
                :meth:`build_evaluator`.

        Returns:
            The results by data set, or the bare results if there is only one data set.
        """
        names = list(cfg.DATASETS.TEST)
        if not isinstance(evaluators, Sequence):
            evaluators = [evaluators] * len(names)
        results: dict[str, Any] = {}
        for name, judge in list(zip(names, evaluators, strict=True)):
            loader = cls.build_test_loader(cfg, name)
            try:
                if judge is None:
                    judge = cls.build_evaluator(cfg, name)
            except NotImplementedError:
                logger.warning(
                    "There is no evaluator for %s: override build_evaluator", name
                )
                results[name] = {}
                continue
            results[name] = inference_on_dataset(model, loader, judge)
            if comm.is_main_process():
                print_csv_format(results[name])
        if len(names) == 1:
            return results[names[0]]  # type: ignore[no-any-return]
        return results

    @staticmethod
    def auto_scale_workers(cfg: Any, num_workers: int) -> Any:
        """Scale a configuration to ``num_workers`` ranks, if it says for how many it was written.

        This requires detectron2.

        Args:
            cfg: the configuration, with ``SOLVER.REFERENCE_WORLD_SIZE``; 0 changes nothing.
            num_workers: the number of ranks.
        """
        if cfg.SOLVER.REFERENCE_WORLD_SIZE in (0, num_workers):
            return cfg
        return import_from_detectron2("DefaultTrainer").auto_scale_workers(
            cfg, num_workers
        )
