"""A trainer for models that own their training step."""

import logging
import time
import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from hooktrain.engine.trainers import SimpleTrainer
from hooktrain.solver import OptimWrapper, OptimWrapperDict

__all__ = ["StepTrainer"]

logger = logging.getLogger(__name__)


class StepTrainer(SimpleTrainer):
    """A :class:`SimpleTrainer` for models with ``train_step(data, optim_wrapper)``.

    An iteration is one call of it with one batch. The model decides what is updated, how often and
    by which optimizer; it returns a dict of values to log. ``accumulative_counts`` counts calls of
    ``update_params``, and the hooks' ``after_backward`` runs in each update. A model without
    ``train_step`` is trained as ``SimpleTrainer`` does it.

    A model that returns both ``loss`` and ``log_vars``, as those for MMCV's runner do, has left the
    update to the trainer.

    Args:
        model: the model. It is put into training mode.
        data_loader: see :class:`SimpleTrainer`.
        optimizer: a torch optimizer, an :class:`~hooktrain.solver.OptimWrapper`, or for models
            with several an :class:`~hooktrain.solver.OptimWrapperDict`.
        gather_metric_period: see :class:`SimpleTrainer`.
        zero_grad_before_forward: see :class:`SimpleTrainer`; for models without ``train_step``.
        async_write_metrics: see :class:`SimpleTrainer`. The check for losses that are not finite
            comes after the update here, and always before a checkpoint.
    """

    optim_wrapper: OptimWrapper | OptimWrapperDict  # type: ignore[assignment]
    _updating: OptimWrapper

    def __init__(
        self,
        model: nn.Module,
        data_loader: Iterable[Any],
        optimizer: torch.optim.Optimizer | OptimWrapper | OptimWrapperDict,
        gather_metric_period: int = 20,
        zero_grad_before_forward: bool = False,
        async_write_metrics: bool = False,
    ) -> None:
        options = (gather_metric_period, zero_grad_before_forward, async_write_metrics)
        super().__init__(model, data_loader, optimizer, *options)  # type: ignore[arg-type]
        self._owns_step = hasattr(model, "train_step")
        if not self._owns_step and hasattr(getattr(model, "module", None), "train_step"):
            raise TypeError(
                f"{type(model).__name__} hides the train_step of the model in it; wrap it in "
                f"StepDistributedDataParallel, which has one too"
            )
        if isinstance(optimizer, OptimWrapperDict) and not self._owns_step:
            raise TypeError(
                f"several optimizers, {list(optimizer)}, need a model with "
                f"train_step(data, optim_wrapper), which {type(model).__name__} does not have"
            )
        self._step_broke_off = False

    def before_train(self) -> None:
        """Tell the wrappers where the run ends, then call the hooks."""
        if self._owns_step:
            me = weakref.proxy(self)
            for wrapper in self._wrappers().values():
                wrapper.after_backward = partial(_before_update, me, wrapper)
            self._counts = {name: w.inner_count for name, w in self._wrappers().items()}
            self._expect_updates(dict.fromkeys(self._counts, 1), self.max_iter - self.start_iter)
        super().before_train()

    def run_step(self) -> None:
        """One batch for the model's own step."""
        if not self._owns_step:
            super().run_step()
            return
        self._check_mode()
        wrapper = self.optim_wrapper
        if self._step_broke_off:
            logger.warning("The last step was broken off: accumulation begins anew")
            wrapper.start_window()
            wrapper.zero_grad()
        start = time.perf_counter()
        data = next(self._batches)
        data_time = time.perf_counter() - start
        self._step_broke_off = True
        outputs = self.model.train_step(data, wrapper)  # type: ignore[operator]
        if not isinstance(outputs, Mapping):
            raise TypeError(f"train_step must return a dict of values to log, not {outputs!r}")
        if "log_vars" in outputs:
            outputs = self._finish_mmcv_step(outputs)
        self._step_broke_off = False
        self._losses.record(self.storage, self.iter, outputs, data_time, add_up=False)
        if self.iter == self.start_iter:
            self._learn_updates()

    @property
    def updating(self) -> OptimWrapper:
        """In ``after_backward``: the wrapper whose update comes next."""
        return self._updating if self._owns_step else super().updating

    def after_train(self) -> None:
        """Call the hooks; say so if the last window of accumulation made no update."""
        try:
            super().after_train()
        finally:
            for wrapper in self._wrappers().values():
                wrapper.after_backward = None
        for name, wrapper in self._wrappers().items():
            if self.iter == self.max_iter and self._owns_step and not wrapper.should_update():
                logger.warning(
                    "The run ended inside of a window of accumulation%s: its last backward passes "
                    "made no update. They are saved, and a longer run goes on from there.",
                    f" of {name!r}" if name else "",
                )

    def prepare_checkpoint(self) -> None:
        """Also bring the gradients of an open window of accumulation together."""
        super().prepare_checkpoint()
        self.optim_wrapper.prepare_state()

    def _wrappers(self) -> Mapping[str, OptimWrapper]:
        wrapper = self.optim_wrapper
        return wrapper if isinstance(wrapper, OptimWrapperDict) else {"": wrapper}

    def _finish_mmcv_step(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """What MMCV's runner and its optimizer hook do after a model's ``train_step``."""
        log_vars = dict(outputs["log_vars"])
        if "loss" in outputs:
            self.optim_wrapper.update_params(outputs["loss"])
            log_vars.setdefault("loss", outputs["loss"])
        return log_vars

    def _learn_updates(self) -> None:
        """After the first step: it shows how often the model calls ``update_params``."""
        made = {name: w.inner_count - self._counts[name] for name, w in self._wrappers().items()}
        if any(count != 1 for count in made.values()):
            self._expect_updates(made, self.max_iter - self.iter - 1)

    def _expect_updates(self, each: Mapping[str, int], iterations: int) -> None:
        """Tell the wrappers that accumulate how many backward passes are still to come."""
        for name, wrapper in self._wrappers().items():
            if wrapper.accumulative_counts > 1:
                done = wrapper.inner_count
                wrapper.initialize_count_status(self.model, done, done + each[name] * iterations)


def _before_update(trainer: StepTrainer, wrapper: OptimWrapper) -> None:
    trainer._updating = wrapper
    trainer.after_backward()
