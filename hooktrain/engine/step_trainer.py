"""The trainer of models with a step of their own."""

import logging
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from hooktrain.engine.trainers import ModelTrainer
from hooktrain.solver import OptimWrapper
from hooktrain.solver.optim_wrapper_dict import wrappers_by_name

logger = logging.getLogger(__name__)


class StepTrainer(ModelTrainer):
    """The training of a model with ``train_step(data, optim_wrapper)``.

    An iteration is one call of it with one batch. The model decides what is updated, how
    often and by which optimizer. It returns a dict of values to log, or None.
    ``accumulative_counts`` counts calls of ``update_params``; the hooks'
    ``after_backward`` runs in each update.

    A model that returns both ``loss`` and ``log_vars``, as those for MMCV's runner do,
    leaves the update to the trainer.

    The arguments are those of :class:`ModelTrainer`. Losses are checked after the update,
    and always before a checkpoint. Gradients are not saved: a resumed run is exact if none
    live from one step to the next.

    Attributes:
        last_batch: the batch of the last step, for hooks.
        last_outputs: the values to log that it returned.
    """

    last_batch: Any = None
    last_outputs: Mapping[str, Any] | None = None

    @property
    def can_save(self) -> bool:
        """Whether accumulated gradients are all used up: they are not saved."""
        return all(wrapper.should_update() for wrapper in self._wrappers())

    def run_step(self) -> None:
        """One batch for the model's own step."""
        self._check_mode()
        start = time.perf_counter()
        self.last_batch = next(self._data_loader_iter)
        data_time = time.perf_counter() - start
        outputs = self._call_step(self.last_batch)
        self.last_outputs = outputs
        self._losses.record(
            self.storage.iter,
            outputs,
            data_time,
            total=None,
            check_now=not self.async_write_metrics,
        )

    def _call_step(self, data: Any) -> Mapping[str, Any]:
        outputs = self.model.train_step(data, self.optim_wrapper)  # type: ignore[operator]
        if outputs is None:
            return {}
        if not isinstance(outputs, Mapping):
            raise TypeError(
                f"train_step must return a dict of values to log: {type(outputs)}"
            )
        if "log_vars" not in outputs:
            return outputs
        # What MMCV's runner and its optimizer hook do after a model's train_step.
        log_vars = dict(outputs["log_vars"])
        if "loss" in outputs:
            self.optim_wrapper.update_params(outputs["loss"])
            log_vars.setdefault("loss", outputs["loss"])
        return log_vars

    def begin_steps(self) -> None:
        """Set the wrappers up. What a step that broke off has left is forgotten."""
        super().begin_steps()
        # As in MMEngine, one update_params an iteration is taken for granted, so that the
        # last update may have fewer passes. Of several optimizers it is not known.
        done = getattr(self.optim_wrapper, "inner_count", 0)
        self.optim_wrapper.initialize_count_status(self.model, done, self.max_iter)
        self.optim_wrapper.zero_grad()
        for wrapper in self._wrappers():
            wrapper.after_backward = partial(self._before_update, wrapper)

    def end_steps(self, succeeded: bool) -> None:
        """Let go of the wrappers; say so if accumulated gradients made no update."""
        for wrapper in self._wrappers():
            wrapper.after_backward = None
        if succeeded and not self.can_save:
            logger.warning(
                "The run ended inside gradient accumulation: its last backward passes "
                "made no update, and are lost"
            )

    def _wrappers(self) -> Iterable[OptimWrapper]:
        return wrappers_by_name(self.optim_wrapper).values()

    def _before_update(self, wrapper: OptimWrapper) -> None:
        self.updating = wrapper
        self.after_backward()
