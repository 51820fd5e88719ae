"""Evaluates while training; keeps the best model, and ends a run in vain."""

import logging
import math
import operator
import os
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist

from hooktrain.checkpoint import Checkpointer, CorruptCheckpointError
from hooktrain.checkpoint.loading import read_checkpoint
from hooktrain.engine.hooks.averaging import EMA
from hooktrain.engine.train_loop import HookBase, TrainerBase
from hooktrain.evaluation import flatten_results_dict
from hooktrain.events.history import Entry
from hooktrain.utils import comm
from hooktrain.utils.background import BackgroundWorker
from hooktrain.utils.names import did_you_mean
from hooktrain.utils.periods import Period

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 5.0

# Names of metrics that say what is better. Not all do: perplexity, wer, fid_score. And MAPE is no
# AP, bf16 no F1, "various" no IoU, "accent" no accuracy.
_LESS = re.compile(r"(?i:loss|error|err(?![a-z]))")
_MORE = re.compile(
    r"(?i:acc(?!e)|auc|dice|f1(?!\d)|iou(?!s)|precision|recall|top.?\d)|(^|[/_m])AP(?!E)"
)


class EvalHook(HookBase):
    """Calls a function every ``eval_period`` iterations and at the end of a complete run.

    The results become metrics. Register it on every rank or on none. The main process's results
    count, and every rank gets them, so that hooks that act on a metric do the same everywhere.

    An error of the function ends the run after the other hooks have seen the iteration, so that
    what was trained is saved where that is due. With several ranks, one that fails waits some
    seconds for the others. If they do not come, they may be waiting for it inside of the function,
    and it ends the run at once.

    Args:
        eval_period: in iterations, or like ``"1 epoch"``; 0 evaluates at the end only.
        eval_function: takes nothing; returns a dict of numbers, possibly nested, or nothing.
        eval_after_train: whether to evaluate at the end.

    Attributes:
        has_results: whether an evaluation has returned metrics.

    Raises:
        TypeError: if ``eval_function`` cannot be called, or returns something else.
    """

    has_results = False
    needs_every_rank = True

    def __init__(
        self,
        eval_period: int | str,
        eval_function: Callable[[], Mapping[str, Any] | None],
        eval_after_train: bool = True,
    ) -> None:
        if not callable(eval_function):
            raise TypeError(
                f"eval_function, after the period, must be callable: {eval_function!r}"
            )
        self._period = Period(eval_period)
        self._func = eval_function
        self._eval_after_train = eval_after_train

    def after_step(self) -> None:
        """Evaluate where a period ends; the last iteration is left to :meth:`after_train`."""
        if self.trainer.is_last and self._eval_after_train:
            return
        if self._period.is_due(self.trainer):
            self._do_eval()

    def after_train(self) -> None:
        """Evaluate a run that came to its end."""
        if self._eval_after_train and self.trainer.succeeded:
            self._do_eval()

    def _do_eval(self) -> None:
        numbers: dict[str, float] = {}
        error: Exception | None = None
        try:
            numbers = _as_numbers(self._func() or {})
        except Exception as raised:
            logger.error(
                "The evaluation failed: the run ends when the other hooks are done"
            )
            error = raised
        # Ranks need very different times to evaluate; they wait here, where it is visible.
        if not _all_come(_PATIENCE_SECONDS if error else None) and error:
            raise error

        def outcome() -> dict[str, float]:
            if error is not None:
                raise error
            return numbers

        try:
            numbers = comm.on_all_ranks(outcome)[0]
        except Exception as of_some_rank:
            self.trainer.raise_later(of_some_rank)
            return
        for name, number in numbers.items():
            self.trainer.storage.put_scalar(name, number, smoothing_hint=False)
        self.has_results |= bool(numbers)


def _all_come(seconds: float | None) -> bool:
    """Whether all ranks come here in time; None is the process group's. Collective."""
    if comm.get_world_size() == 1:
        return True
    group = comm.object_group()
    # Its own limit holds on the main process only.
    worker = BackgroundWorker("meeting")
    worker.submit(lambda: dist.monitored_barrier(group), daemon=True)
    return worker.wait(seconds)


def _as_numbers(results: Mapping[str, Any]) -> dict[str, float]:
    if not isinstance(results, Mapping):
        raise TypeError(
            f"eval_function must return a dict of results, but got {results!r}"
        )
    numbers = {}
    for name, value in flatten_results_dict(results).items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError):
            raise ValueError(
                f"results must be numbers, but {name!r} is {value!r}"
            ) from None
    return numbers


def choose_mode(metric: str, mode: str | None) -> str:
    """Whether less or more of a metric is better, ``"min"`` or ``"max"``.

    Args:
        metric: its name.
        mode: the answer; None takes that of a name which says it.

    Raises:
        ValueError: for another mode, or a name that does not say it.
    """
    if mode is None:
        if _LESS.search(metric):
            mode = "min"
        elif _MORE.search(metric):
            mode = "max"
    if mode not in ("min", "max"):
        raise ValueError(
            f"say by mode, or best_mode, whether the best {metric!r} is its 'max' or its "
            f"'min', not {mode!r}"
        )
    return mode


def is_better(
    value: float, best: float | None, mode: str, min_delta: float = 0.0
) -> bool:
    """Whether a value is finite, and better than the best so far by more than ``min_delta``."""
    if best is None or not math.isfinite(value):
        return math.isfinite(value)
    gain = value - best if mode == "max" else best - value
    return gain > min_delta


def new_value(trainer: TrainerBase, metric: str, since: int) -> Entry | None:
    """The last value of a metric and its iteration, if that is after ``since``.

    None if there is no such value. When each ``EvalHook`` has had results and the metric has
    never come, the run ends by an error.
    """
    storage = trainer.storage
    measured_at = storage.latest_iter(metric)
    if measured_at is None:
        refuse_missing(metric, trainer)
    elif measured_at > since:
        return storage.history(metric).tail(1)[0]
    return None


def refuse_missing(metric: str, trainer: TrainerBase) -> None:
    """End the run by an error if each ``EvalHook`` has had results, but no such metric."""
    evaluations = [hook for hook in trainer._hooks if isinstance(hook, EvalHook)]
    if evaluations and all(hook.has_results for hook in evaluations):
        hint = did_you_mean(metric, trainer.storage.histories())
        trainer.raise_later(ValueError(f"there is no metric {metric!r}{hint}"))


class BestCheckpointer(HookBase):
    """Saves ``model_best.pth`` whenever an evaluation gives the best value so far.

    With a sharded checkpointer that is a folder ``model_best``. Register it after ``EvalHook``, so
    that what was measured is what is saved.

    The file holds its value, so a resumed run never overwrites a better model, not even one saved
    after the checkpoint that it resumes from. No run resumes from the file.

    Args:
        eval_period: that of the ``EvalHook``; 0 looks at the end of training only.
        checkpointer: what saves.
        val_metric: the name of the metric, such as ``"classification/accuracy"``.
        mode: ``"max"`` if more is better, ``"min"`` if less is. None takes ``"min"`` for a name
            with "loss" or "error" in it, and ``"max"`` for one with accuracy, top-5, auc,
            precision, recall, iou, dice, f1 or AP; any other needs the mode.
        file_prefix: the name of the file, without ``.pth``.
        ema: a hook whose averaged weights are saved as the model, where the metric is theirs.

    Attributes:
        best_metric: the best value so far, or None.
        best_iter: the iteration that it was measured at, or None.

    Raises:
        ValueError: without a mode that it needs, or for an impossible ``file_prefix``; in a run,
            when it is due and the metric is not there or older than the weights. What was trained
            is saved first.
    """

    _logger = logger  # detectron2's name, for subclasses
    _default_mode: Any = None
    _ema: EMA | None = None

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
        self._period = Period(eval_period)
        self._checkpointer = checkpointer
        self._val_metric = val_metric
        self._mode = choose_mode(val_metric, mode or self._default_mode)
        # detectron2's name, for subclasses that compare by themselves.
        self._compare: Any = operator.gt if self._mode == "max" else operator.lt
        self._file_prefix = file_prefix
        self.needs_every_rank = checkpointer.sharded  # each writes its shards
        self._file = file_prefix if checkpointer.sharded else f"{file_prefix}.pth"
        self._ema = ema
        self.best_metric: float | None = None
        self.best_iter: int | None = None

    def before_train(self) -> None:
        """Learn from the file which value a resumed run has to exceed."""
        if self.trainer.start_iter > 0:
            self._read_best()

    def _read_best(self) -> None:
        self.best_metric = None
        self.best_iter = None
        saver = self._checkpointer
        path = os.path.join(saver.save_dir, self._file)
        if not (saver.save_to_disk and os.path.exists(path)):
            return
        try:
            best = read_checkpoint(path, "meta").get("best", {})
        except CorruptCheckpointError as error:
            logger.error("The next best model replaces a broken file: %s", error)
            return
        if best.get("metric") == self._val_metric:
            self.best_metric = best["best_metric"]
            self.best_iter = best["best_iter"]

    def after_step(self) -> None:
        """Look at the metric after an evaluation."""
        if not self.trainer.is_last and self._period.is_due(self.trainer):
            self._best_checking()

    def after_train(self) -> None:
        """Look at the metric after the final evaluation; say which model was the best."""
        if not self.trainer.succeeded:
            return
        self._best_checking()
        self._checkpointer.wait()
        if self.best_metric is not None:
            logger.info(
                "The best %s is %.4g, of iteration %d, in %s",
                self._val_metric,
                self.best_metric,
                self.best_iter,
                self._file,
            )

    def _best_checking(self) -> None:
        """Save the model if the latest value is the best one."""
        self._checkpointer.wait()  # to know whether the best so far was saved
        if self.on_every_rank:
            self.trainer.prepare_save()
        name = self._val_metric
        latest = self.trainer.storage.latest().get(name, (math.nan, -1))
        best = (self.best_metric, self.best_iter)
        if self.on_every_rank:
            # The main process may be the only one that knows the metric, and what is in the file.
            latest, best = comm.broadcast((latest, best))
        self.best_metric, self.best_iter = best
        value, measured_at = latest
        iteration = self.trainer.done - 1
        if measured_at < iteration:
            if self.trainer._late_error is None:  # else the evaluation has failed
                self._explain_old(measured_at)
            return
        so_far = "none" if self.best_metric is None else f"{self.best_metric:.4g}"
        logger.info("%s is %.4g; the best so far: %s", name, value, so_far)
        is_best = is_better(value, self.best_metric, self._mode)
        # As in detectron2: a subclass learns of a best value, and may refuse it.
        if is_best and self._update_best(value, measured_at) is not False:
            found = {"metric": name, "best_metric": value, "best_iter": measured_at}
            with self._ema.swap() if self._ema else nullcontext():
                self._checkpointer.save(
                    self._file_prefix,
                    tag=False,
                    on_full=self._go_on,
                    iteration=iteration,
                    best=found,
                )

    def _update_best(self, val: float, iteration: int) -> bool:
        """Keep the best value so far."""
        self.best_metric = val
        self.best_iter = iteration
        return True

    def _explain_old(self, measured_at: int) -> None:
        """Say why there is no value of this iteration; end a run that is set up wrongly."""
        name = self._val_metric
        if measured_at < 0:
            logger.warning("No metric %r so far to choose the best model by", name)
            refuse_missing(name, self.trainer)
        elif not self.trainer.succeeded:  # else there was no evaluation at the end
            error = ValueError(
                f"BestCheckpointer is due at iteration {self.trainer.iter}, but {name!r} was "
                f"measured at {measured_at}: register it behind EvalHook, with its eval_period"
            )
            self.trainer.raise_later(error)

    def _go_on(self, error: OSError) -> None:
        logger.error(
            "NOT SAVED: %s. Training goes on; the next best tries again", error
        )
        self._read_best()


class EarlyStopping(HookBase):
    """Asks for the end of training when a metric has not improved for some evaluations.

    It looks after each iteration that put a new value of the metric, so register it after the
    hook that does. A value that is not finite counts as no improvement.

    Args:
        metric: the metric's name, such as ``"classification/val_loss"``.
        mode: see :class:`BestCheckpointer`.
        patience: how many values in a row without improvement end the run, at least 1.
        min_delta: an improvement must be larger than this.

    Raises:
        ValueError: without a mode that it needs, or for a patience below 1; in a run, if the metric
            is not there after the first evaluation.
    """

    def __init__(
        self,
        metric: str,
        mode: str | None = None,
        patience: int = 5,
        min_delta: float = 0.0,
    ) -> None:
        if patience < 1:
            raise ValueError(f"patience must be at least 1, but got {patience!r}")
        self._metric = metric
        self._mode = choose_mode(metric, mode)
        self._patience = patience
        self._min_delta = min_delta
        self._best: float | None = None
        self._waited = 0
        self._seen_iter = -1

    def before_train(self) -> None:
        """A run that had stopped stops again, unless its patience was raised."""
        self._stop_if_exhausted()

    def after_step(self) -> None:
        """Look at a new value of the metric."""
        found = new_value(self.trainer, self._metric, self._seen_iter)
        if found is None:
            return
        value, self._seen_iter = found
        if is_better(value, self._best, self._mode, self._min_delta):
            self._best = value
            self._waited = 0
        else:
            self._waited += 1
            self._stop_if_exhausted()

    def after_train(self) -> None:
        """Say so if there was nothing to look at."""
        if self._seen_iter < 0:
            logger.warning("EarlyStopping: there was no metric %r", self._metric)

    def _stop_if_exhausted(self) -> None:
        if self._waited >= self._patience:
            self.trainer.request_stop(
                f"{self._metric} has not improved on {self._best} "
                f"in {self._waited} evaluations"
            )

    def state_dict(self) -> dict[str, Any]:
        """The best value and how long ago it was."""
        return {
            "best": self._best,
            "waited": self._waited,
            "seen_iter": self._seen_iter,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned."""
        self._best = state_dict["best"]
        self._waited = state_dict["waited"]
        self._seen_iter = state_dict["seen_iter"]
