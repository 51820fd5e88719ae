"""The trainer of models that own their step."""

import logging
import time
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from hooktrain.engine.trainers import ModelTrainer
from hooktrain.solver import OptimWrapper
from hooktrain.solver.optim_state import parameter_names
from hooktrain.solver.optim_wrapper_dict import wrappers_by_name
from hooktrain.utils.dtensor import shard_like

logger = logging.getLogger(__name__)


class StepTrainer(ModelTrainer):
    """The training of a model with ``train_step(data, optim_wrapper)``.

    An iteration is one call of it with one batch. The model decides what is updated, how often and
    by which optimizer; it returns a dict of values to log, or None. ``accumulative_counts`` counts
    calls of ``update_params``, and the hooks' ``after_backward`` runs in each update.

    A model that returns both ``loss`` and ``log_vars``, as those for MMCV's runner do, has left the
    update to the trainer.

    The arguments are those of :class:`ModelTrainer`. The check for losses that are not finite comes
    after the update, and always before a checkpoint.

    Attributes:
        last_batch: the batch of the last step, for hooks.
        last_outputs: the values to log that it returned.
    """

    last_batch: Any = None
    last_outputs: Mapping[str, Any] | None = None
    _gradients: Mapping[str, Tensor] | None = None  # of a checkpoint, for the first step

    def _wrappers(self) -> Mapping[str, OptimWrapper]:
        return wrappers_by_name(self.optim_wrapper)

    @property
    def can_save(self) -> bool:
        """Whether no window of accumulation is open: its gradients are not saved."""
        return all(wrapper.should_update() for wrapper in self._wrappers().values())

    def state_dict(self) -> dict[str, Any]:
        """That of :class:`ModelTrainer`, and the gradients that live on after ``train_step``.

        The next backward passes add to them, unless it begins with ``optim_wrapper.zero_grad()``.
        To keep them out of checkpoints, end ``train_step`` with that.
        """
        state = super().state_dict()
        # Their after_backward is set while this trainer makes the steps.
        if self.can_save and any(wrapper.after_backward for wrapper in self._wrappers().values()):
            names = parameter_names(self.model)
            state["gradients"] = {n: p.grad for p, n in names.items() if p.grad is not None}
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], *, only: Collection[str] | None = None
    ) -> None:
        """Load what :meth:`state_dict` returned; see :class:`ModelTrainer`."""
        super().load_state_dict(state_dict, only=only)
        if only is None or "optimizer" in only:
            self._gradients = state_dict.get("gradients")

    def run_step(self) -> None:
        """One batch for the model's own step."""
        self._check_mode()
        is_first = self.iter == self.start_iter
        if is_first:
            self._begin_run()
            counts = {name: w.inner_count for name, w in self._wrappers().items()}
            # How often the model calls update_params in an iteration: as it did so far, else once.
            each = {name: max(1, count // max(1, self.iter)) for name, count in counts.items()}
            self._expect_updates(each, self.max_iter - self.iter)
        start = time.perf_counter()
        self.last_batch = data = next(self._batches)
        data_time = time.perf_counter() - start
        self.last_outputs = outputs = self._call_step(data)
        if is_first:  # it has shown how often the model calls update_params
            made = {name: w.inner_count - counts[name] for name, w in self._wrappers().items()}
            if made != each:
                self._expect_updates(made, self.max_iter - self.iter - 1)
            if not any(made.values()):
                logger.warning("train_step has not called update_params: nothing may be trained")
        self._losses.record(self.storage, self.iter, outputs, data_time, total=None)

    def _begin_run(self) -> None:
        """Set the wrappers up. What a step that broke off has left is forgotten."""
        self.optim_wrapper.start_window()
        self.optim_wrapper.zero_grad()
        loaded, self._gradients = self._gradients or {}, None
        for parameter, name in parameter_names(self.model).items():
            if name in loaded:
                parameter.grad = shard_like(loaded[name].to(parameter.device), parameter)
        for wrapper in self._wrappers().values():
            wrapper.after_backward = partial(self._before_update, wrapper)

    def _call_step(self, data: Any) -> Mapping[str, Any]:
        outputs = self.model.train_step(data, self.optim_wrapper)  # type: ignore[operator]
        if outputs is None:
            return {}
        if not isinstance(outputs, Mapping):
            raise TypeError(f"train_step must return a dict of values to log: {type(outputs)}")
        if "log_vars" not in outputs:
            return outputs
        # What MMCV's runner and its optimizer hook do after a model's train_step.
        log_vars = dict(outputs["log_vars"])
        if "loss" in outputs:
            self.optim_wrapper.update_params(outputs["loss"])
            log_vars.setdefault("loss", outputs["loss"])
        return log_vars

    def _before_update(self, wrapper: OptimWrapper) -> None:
        self.updating = wrapper
        self.after_backward()

    def _expect_updates(self, each: Mapping[str, int], iterations: int) -> None:
        """Tell the wrappers how many backward passes are still to come."""
        for name, wrapper in self._wrappers().items():
            done = wrapper.inner_count
            wrapper.initialize_count_status(self.model, done, done + each[name] * iterations)

    def after_train(self) -> None:
        """Call the hooks; say so if the last window of accumulation made no update."""
        try:
            super().after_train()
        finally:
            for wrapper in self._wrappers().values():
                wrapper.after_backward = None
        if self.succeeded and not self.can_save:
            logger.warning(
                "The run ended inside of a window of accumulation: its last backward passes "
                "made no update, and are lost"
            )
