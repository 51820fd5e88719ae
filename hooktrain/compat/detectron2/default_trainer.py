"""detectron2's DefaultTrainer, which takes trees such as yacs's CfgNode."""

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
from hooktrain.compat.detectron2.functions import of_detectron2, verify_results
from hooktrain.compat.detectron2.solver import build_lr_scheduler, build_optimizer
from hooktrain.compat.detectron2.trainers import (
    AMPTrainer as AMPTrainer,
    SimpleTrainer as SimpleTrainer,
    TrainerBase as TrainerBase,
    of_inner_trainer,
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
    """A :class:`hooktrain.engine.hooks.BestCheckpointer` that finds its metric in the storage.

    It looks there where ``eval_period`` ends and at the end, whoever has put the metric. It has the
    names that subclasses read and override.
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
        """The results are in the storage."""

    def after_step(self) -> None:
        """Look at the metric where a period ends; at the last one :meth:`after_train` does."""
        if not self.trainer.is_last and self._period.is_due(self.trainer):
            self._best_checking()

    def after_train(self) -> None:
        """Look at the metric of the final evaluation."""
        if self.trainer.succeeded:
            self._best_checking()
        super().after_train()

    def _best_checking(self) -> None:
        """Save the model if the latest value is of these weights, and the best one."""
        storage, name = self.trainer.storage, self._val_metric
        # A result of an evaluation goes before a metric of the training that has its name.
        known = storage.histories() | storage.results()
        latest = known[name].tail(1)[0] if name in known else (0.0, -1)
        if self.on_every_rank:  # perhaps the main process alone knows the metric
            latest = comm.broadcast(latest)
        value, measured_at = latest
        if measured_at < self.trainer.done - 1:
            logger.warning("%r has no value of this iteration", name)
        else:
            self._judge(value)


class EvalHook(hooks.EvalHook):
    """A :class:`hooktrain.engine.hooks.EvalHook` whose function must give numbers, nested or not.

    As in detectron2 the final evaluation comes behind the last iteration, and so behind a
    checkpoint that is saved in it, wherever the hook is registered.

    Raises:
        ValueError: in a run, for another result.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._func = partial(_only_numbers, self._func)

    def after_step(self) -> None:
        """Evaluate where a period ends; the last iteration is left to :meth:`after_train`."""
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
        """Find what was not given; see the base class."""
        super().before_train()
        # With several optimizers there is none of these.
        if self._optimizer is None:
            self._optimizer = getattr(self.trainer, "optimizer", None)
        if isinstance(self._optimizer, Optimizer):
            self._best_param_group_id = self.get_best_param_group_id(self._optimizer)


class DefaultTrainer(TrainerBase):
    """A trainer with detectron2's default hooks, built from its tree of configuration.

    Subclasses override what they override there: the ``build_...`` methods, ``test``, ``run_step``,
    ``train``, ``resume_or_load``, or the constructor. A model and data that no method builds are
    detectron2's own, where that is installed.

    Behind its hooks come those that save on SIGTERM and SIGINT, and sum the run up.

    Of the configuration, these are looked at: what :func:`build_optimizer` and
    :func:`build_lr_scheduler` read, ``OUTPUT_DIR``, ``MODEL.WEIGHTS``,
    ``SOLVER.{MAX_ITER,CHECKPOINT_PERIOD,AMP.ENABLED,REFERENCE_WORLD_SIZE}``, ``DATASETS.TEST`` and
    ``TEST.{EVAL_PERIOD,EXPECTED_RESULTS,PRECISE_BN}``.

    Args:
        cfg: a tree with attributes, ``clone`` and ``defrost``, such as fvcore's CfgNode.

    Attributes:
        cfg: the configuration.
        scheduler: what :meth:`build_lr_scheduler` has built.
        checkpointer: saves and loads the model and this trainer. To start from a pickled file
            of a model zoo, set its ``trusted`` first.
    """

    model = of_inner_trainer("model")
    data_loader = of_inner_trainer("data_loader")
    optimizer = of_inner_trainer("optimizer")
    optim_wrapper = of_inner_trainer("optim_wrapper")
    updating = of_inner_trainer("updating")
    _data_loader_iter = of_inner_trainer("_data_loader_iter")
    _write_metrics = of_inner_trainer("_write_metrics")
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
        # A proxy: the trainer owns the checkpointer, not the other way round.
        self.checkpointer = DetectionCheckpointer(
            model, cfg.OUTPUT_DIR, trainer=weakref.proxy(self)
        )
        self.max_iter = cfg.SOLVER.MAX_ITER
        self.cfg = cfg
        self.register_hooks([*self.build_hooks(), hooks.Preemption(self.checkpointer)])

    def run_step(self) -> None:
        """One iteration, by the ``_trainer``."""
        self._trainer.iter = self.iter
        self._trainer.run_step()

    def resume_or_load(self, resume: bool = True) -> None:
        """Go on from the last checkpoint in ``OUTPUT_DIR``, or load ``MODEL.WEIGHTS``."""
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
        """Where metrics are written to."""
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
        model: nn.Module = of_detectron2("build_model")(cfg)
        logger.info("Model:\n%s", model)
        return model

    @classmethod
    def build_optimizer(cls, cfg: Any, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer, or a wrapper around it."""
        return build_optimizer(cfg, model)

    @classmethod
    def build_lr_scheduler(cls, cfg: Any, optimizer: torch.optim.Optimizer) -> Any:
        """The schedule of a torch optimizer, as :class:`hooks.LRScheduler` takes it."""
        return build_lr_scheduler(cfg, optimizer)

    @classmethod
    def build_train_loader(cls, cfg: Any) -> Any:
        """The batches to train on."""
        return of_detectron2("build_detection_train_loader")(cfg)

    @classmethod
    def build_test_loader(cls, cfg: Any, dataset_name: str) -> Any:
        """The batches of a data set to evaluate on."""
        return of_detectron2("build_detection_test_loader")(cfg, dataset_name)

    @classmethod
    def build_evaluator(cls, cfg: Any, dataset_name: str) -> DatasetEvaluator:
        """What judges the outputs for a data set; without it there is no evaluation."""
        raise NotImplementedError("override build_evaluator to evaluate")

    @classmethod
    def test(cls, cfg: Any, model: nn.Module, evaluators: Any = None) -> dict[str, Any]:
        """Evaluate a model on each of ``DATASETS.TEST``. A collective: every rank calls it.

        Args:
            cfg: the configuration.
            model: the model.
            evaluators: one for each data set, or one for all; None takes those of
                :meth:`build_evaluator`.

        Returns:
            The results by data set; of a single one, its results.
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
        """The configuration for ``num_workers`` ranks, if it says for how many it was written.

        detectron2 itself scales it, where that is installed.

        Args:
            cfg: with ``SOLVER.REFERENCE_WORLD_SIZE``; 0 leaves everything as it is.
            num_workers: the number of ranks.
        """
        if cfg.SOLVER.REFERENCE_WORLD_SIZE in (0, num_workers):
            return cfg
        return of_detectron2("DefaultTrainer").auto_scale_workers(cfg, num_workers)
