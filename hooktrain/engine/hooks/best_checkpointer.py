"""Keeps the checkpoint with the best value of a metric."""

import logging
import math
import os
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

from hooktrain.checkpoint import Checkpointer, CorruptCheckpointError
from hooktrain.checkpoint.formats import read_checkpoint
from hooktrain.checkpoint.resume import checkpoint_names
from hooktrain.engine.hooks.ema import EMA
from hooktrain.engine.hooks.watching import better_by_name, check_comes, evaluated_at, sign_of
from hooktrain.engine.train_loop import HookBase
from hooktrain.utils import comm
from hooktrain.utils.registry import did_you_mean

logger = logging.getLogger(__name__)


class BestCheckpointer(HookBase):
    """Saves ``model_best.pth`` whenever an evaluation gives the best value so far.

    With a sharded checkpointer that is a folder ``model_best``.

    The best value is part of the trainer's state and of the file, so a resumed run never overwrites
    a better model, not even one saved after the checkpoint that it resumes from. No run resumes
    from the file. Before the first step a trainer puts the hook behind ``EvalHook``, so that what
    was measured is what is saved.

    Args:
        eval_period: that of the ``EvalHook``; 0 looks at the end of training only.
            Where it is due, there must be a new value.
        checkpointer: what saves.
        val_metric: the name of the metric, such as ``"classification/accuracy"``. One that begins
            with ``ema/`` is of the average of the hook ``EMA``: the file has that as the model.
        mode: ``"max"`` if more is better, ``"min"`` if less is. None asks the name: ``"min"`` for
            that of a loss or an error, and ``"max"``, as in detectron2, for all others.
        file_prefix: the name of the file, without ``.pth``.

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
    ) -> None:
        checkpointer.check_name(file_prefix)
        self._period = eval_period
        self._checkpointer = checkpointer
        self.needs_every_rank = checkpointer.sharded  # every rank writes its part
        self._val_metric = val_metric
        self._sign = sign_of(val_metric, mode or better_by_name(val_metric) or "max")
        self._file_prefix = file_prefix
        self.best_metric: float | None = None
        self.best_iter: int | None = None

    def before_train(self) -> None:
        """Learn of a better model that was saved after the checkpoint that the run resumes from."""
        if not self.trainer.start_iter:
            self._checkpointer.begin_anew()
        if not self.trainer.start_iter or not self._checkpointer.save_to_disk:
            return
        folder = self._checkpointer.save_dir
        for name in checkpoint_names(folder):
            if name.removesuffix(".pth") != self._file_prefix:
                continue
            try:
                best = read_checkpoint(os.path.join(folder, name), "meta").get("best")
            except CorruptCheckpointError as error:
                logger.error("The next best model replaces a broken file: %s", error)
                continue
            if best and best["metric"] == self._val_metric and self._is_better(best["best_metric"]):
                self.load_state_dict(best)

    def _is_better(self, value: float) -> bool:
        best = self.best_metric
        return math.isfinite(value) and (best is None or (value - best) * self._sign > 0)

    def after_step(self) -> None:
        """Compare after an evaluation."""
        if self.is_due(self._period, at_end=False):
            self._compare(self.trainer.iter)

    def after_train(self) -> None:
        """Compare after the final evaluation."""
        if self.trainer.succeeded and self.trainer.max_iter > 0:
            self._compare(self.trainer.max_iter - 1, at_end=True)
            check_comes(self, self._val_metric)
            self._checkpointer.wait()

    def _compare(self, iteration: int, at_end: bool = False) -> None:
        self._checkpointer.wait()  # to know whether the best so far was saved
        self.trainer.prepare_save(self.on_every_rank)
        name = self._val_metric
        latest = self.trainer.storage.latest().get(name)
        if self.on_every_rank:
            # The main process may be the only one that knows the metric, and what is in the file.
            latest, state = comm.broadcast((latest, self.state_dict()))
            self.load_state_dict(state)
        value, measured_at = latest or (math.nan, -1)
        if measured_at < iteration:
            if not at_end:
                self._refuse(iteration, measured_at)
            return
        is_better, before = self._is_better(value), self.state_dict()
        best = "the first" if self.best_metric is None else f"the best was {self.best_metric:.4g}"
        verdict = "saving it" if is_better else "not saving it"
        logger.info("%s is %.4g at iteration %d, %s: %s", name, value, measured_at, best, verdict)
        if not is_better:
            return
        self.best_metric, self.best_iter = value, measured_at
        averages = [h for h in self.trainer._hooks if isinstance(h, EMA) and name[:4] == "ema/"]
        with averages[0].swap() if averages else nullcontext():
            self._checkpointer.save(
                self._file_prefix,
                tag=False,
                on_full=partial(self._go_on, before),
                iteration=iteration,
                best={"metric": name, **self.state_dict()},
            )

    def _refuse(self, iteration: int, measured_at: int) -> None:
        name = self._val_metric
        text = f"BestCheckpointer is due at iteration {iteration}, but {name!r} was measured "
        text += f"at {measured_at}: give it the eval_period of EvalHook"
        if measured_at < 0:
            text = f"there is no metric {name!r} to choose the best checkpoint by"
            text += did_you_mean(name, self.trainer.storage.histories())
        if max(evaluated_at(self.trainer), default=0) >= 0:
            self.trainer.raise_later(ValueError(text))
        else:  # an evaluation without results is no mistake
            logger.warning(text)

    def _go_on(self, before: Mapping[str, Any], error: OSError) -> None:
        self.load_state_dict(before)
        logger.error("NOT SAVED: %s. Training goes on; the next best tries again", error)

    def state_dict(self) -> dict[str, Any]:
        """The best value, and when it was measured."""
        return {"best_metric": self.best_metric, "best_iter": self.best_iter}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned."""
        self.best_metric = state_dict["best_metric"]
        self.best_iter = state_dict["best_iter"]
