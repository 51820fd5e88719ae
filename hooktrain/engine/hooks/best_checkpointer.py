"""Saves the best model."""

import logging
import math
import operator
import os
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

from hooktrain.checkpoint import Checkpointer, CorruptCheckpointError
from hooktrain.checkpoint.loading import read_checkpoint
from hooktrain.engine.hooks.averaging import EMA
from hooktrain.engine.hooks.evaluation import choose_mode, refuse_missing
from hooktrain.engine.train_loop import HookBase
from hooktrain.utils import comm

logger = logging.getLogger(__name__)


class BestCheckpointer(HookBase):
    """Saves ``model_best.pth`` whenever an evaluation gives the best value so far.

    With a sharded checkpointer that is a folder ``model_best``. Register it after ``EvalHook``, so
    that what was measured is what is saved.

    The best value is part of the trainer's state and of the file, so a resumed run never overwrites
    a better model, not even one saved after the checkpoint that it resumes from. No run resumes
    from the file.

    Args:
        eval_period: that of the ``EvalHook``; 0 looks at the end of training only.
        checkpointer: what saves.
        val_metric: the name of the metric, such as ``"classification/accuracy"``.
        mode: ``"max"`` if more is better, ``"min"`` if less is. None takes ``"min"`` for a name
            with "loss" or "error" in it, else ``"max"``.
        file_prefix: the name of the file, without ``.pth``.
        ema: a hook whose averaged weights are saved as the model, where the metric is theirs.

    Attributes:
        best_metric: the best value so far, or None.
        best_iter: the iteration that it was measured at, or None.

    Raises:
        ValueError: for another mode or an impossible ``file_prefix``; in a run, when it is due and
            the metric is not there or older than the weights. What was trained is saved first.
    """

    def __init__(
        self,
        eval_period: int | str,
        checkpointer: Checkpointer,
        val_metric: str,
        mode: str | None = None,
        file_prefix: str = "model_best",
        *,
        ema: EMA | None = None,
    ) -> None:
        checkpointer.check_name(file_prefix)
        self._period = eval_period
        self._checkpointer = checkpointer
        self._val_metric = val_metric
        is_max = choose_mode(val_metric, mode) == "max"
        self._compare = operator.gt if is_max else operator.lt
        self._file_prefix = file_prefix
        self._ema = ema
        self.best_metric: float | None = None
        self.best_iter: int | None = None

    def before_train(self) -> None:
        """Learn of a better model that was saved after the checkpoint that the run resumes from."""
        saver = self._checkpointer
        name = self._file_prefix if saver.sharded else f"{self._file_prefix}.pth"
        path = os.path.join(saver.save_dir, name)
        is_resumed = self.trainer.start_iter > 0
        if not (is_resumed and saver.save_to_disk and os.path.exists(path)):
            return
        try:
            best = read_checkpoint(path, "meta").get("best", {})
        except CorruptCheckpointError as error:
            logger.error("The next best model replaces a broken file: %s", error)
            return
        if best.get("metric") == self._val_metric:
            self._update_best(best["best_metric"], best["best_iter"])

    def after_step(self) -> None:
        """Look at the metric after an evaluation."""
        if self.is_due(self._period, at_end=False):
            self._best_checking()

    def after_train(self) -> None:
        """Look at the metric after the final evaluation."""
        if self.trainer.succeeded:
            self._best_checking()
            self._checkpointer.wait()

    def _best_checking(self) -> None:
        """Save the model if the latest value is the best one."""
        self._checkpointer.wait()  # to know whether the best so far was saved
        self.trainer.prepare_save(self.on_every_rank)
        name = self._val_metric
        latest = self.trainer.storage.latest().get(name, (math.nan, -1))
        before = self.state_dict()
        if self.on_every_rank:
            # The main process may be the only one that knows the metric, and what is in the file.
            latest, before = comm.broadcast((latest, before))
            self.load_state_dict(before)
        value, measured_at = latest
        iteration = min(self.trainer.iter, self.trainer.max_iter - 1)
        if measured_at < 0:
            logger.warning("No metric %r to choose the best checkpoint by", name)
            refuse_missing(name, self.trainer)
            return
        if measured_at < iteration:
            self._refuse_old(iteration, measured_at)
            return
        is_better = self._update_best(value, measured_at)
        logger.info(
            "%s is %.4g at iteration %d: %s (the best was %.4g)",
            name,
            value,
            measured_at,
            "saving the best model" if is_better else "not saving",
            math.nan if before["best_metric"] is None else before["best_metric"],
        )
        if is_better:
            with self._ema.swap() if self._ema else nullcontext():
                self._checkpointer.save(
                    self._file_prefix,
                    tag=False,
                    on_full=partial(self._go_on, before),
                    iteration=iteration,
                    best={"metric": name, **self.state_dict()},
                )

    def _update_best(self, value: float, iteration: int) -> bool:
        """Keep a value if it is the best one; whether it is."""
        if not math.isfinite(value):
            return False
        if self.best_metric is not None and not self._compare(value, self.best_metric):
            return False
        self.best_metric = value
        self.best_iter = iteration
        return True

    def _refuse_old(self, iteration: int, measured_at: int) -> None:
        if self.trainer.succeeded:  # there was no evaluation at the end
            return
        self.trainer.raise_later(
            ValueError(
                f"BestCheckpointer is due at iteration {iteration}, but {self._val_metric!r} was "
                f"measured at {measured_at}: register it behind EvalHook, with its eval_period"
            )
        )

    def _go_on(self, before: Mapping[str, Any], error: OSError) -> None:
        self.load_state_dict(before)
        logger.error(
            "NOT SAVED: %s. Training goes on; the next best tries again", error
        )

    def state_dict(self) -> dict[str, Any]:
        """The best value, and when it was measured."""
        return {"best_metric": self.best_metric, "best_iter": self.best_iter}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned."""
        self.best_metric = state_dict["best_metric"]
        self.best_iter = state_dict["best_iter"]
