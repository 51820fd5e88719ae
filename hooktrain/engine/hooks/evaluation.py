"""Evaluates while training, keeps the best model, and stops a run that no longer improves."""

import logging
import math
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch.distributed as dist

from hooktrain.checkpoint import Checkpointer, CorruptCheckpointError
from hooktrain.checkpoint.loading import read_checkpoint
from hooktrain.checkpoint.resume import delete_replaced
from hooktrain.engine.hook_base import HookBase
from hooktrain.engine.hooks.averaging import EMA
from hooktrain.engine.hooks.checkpointing import check_saver
from hooktrain.engine.hooks.hours import spent
from hooktrain.engine.train_loop import TrainerBase
from hooktrain.evaluation.testing import as_numbers
from hooktrain.events.history import Entry
from hooktrain.utils import comm
from hooktrain.utils.background import BackgroundWorker
from hooktrain.utils.env import seed_step
from hooktrain.utils.names import check_count, did_you_mean
from hooktrain.utils.periods import Period

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 5.0


class EvalHook(HookBase):
    """Calls a function every ``eval_period`` iterations and at the end of a complete run.

    Each call is seeded by the seed, the iteration and the rank. The results become metrics.
    Register it on every rank or on none. Every rank takes the results of the main process, so that
    hooks that act on a metric do the same everywhere.

    An error of the function ends the run after the other hooks have seen the iteration, so that
    what was trained is saved where that is due. A rank that fails among several waits some
    seconds for the others. If they do not come, they may be waiting for it inside of the function,
    and it ends the run at once.

    Args:
        eval_period: in iterations, or like ``"1 epoch"`` or ``"1 hour"``; 0 evaluates at the end
            only.
        eval_function: takes no argument, and returns a dict of numbers, possibly nested, or None.
            Other values in it, such as torchmetrics' list of classes, are named in the log and
            left out.
        eval_after_train: whether to evaluate at the end.

    Attributes:
        has_results: whether an evaluation has returned metrics.
        last_results: what the function returned last on this rank.

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
        self.last_results: Mapping[str, Any] = {}

    def after_step(self) -> None:
        """Evaluate where a period ends; the last iteration is left to :meth:`after_train`."""
        if self.trainer.is_last and self._eval_after_train:
            return
        if self._period.is_due(self.trainer):
            self._do_eval()
            self.trainer.synchronize()  # a signal may have come meanwhile

    def after_train(self) -> None:
        """Evaluate a run that came to its end."""
        if self._eval_after_train and self.trainer.succeeded:
            self._do_eval()

    def _do_eval(self) -> None:
        with spent(self.trainer, "evaluation_time"):
            self._evaluate()

    def _evaluate(self) -> None:
        numbers: dict[str, float] = {}
        error: Exception | None = None
        done = self.trainer.done
        seed_step(self.trainer.seed, done, comm.data_parallel_rank(), "evaluation")
        try:
            self.last_results = self._func() or {}
            numbers = as_numbers(self.last_results)
        except Exception as raised:
            logger.error(
                "The evaluation failed: the run ends when the other hooks are done"
            )
            error = raised
        # Ranks need very different times to evaluate. They wait for each other here, so that a
        # stack of a rank that waits shows what it is waiting for.
        if not _wait_for_all_ranks(_PATIENCE_SECONDS if error else None) and error:
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


def _wait_for_all_ranks(seconds: float | None) -> bool:
    """Wait until all ranks are here, for so many seconds at most. Collective.

    Args:
        seconds: None waits as long as the process group does.

    Returns:
        Whether all ranks came in time.
    """
    if comm.get_world_size() == 1:
        return True
    group = comm.object_group()
    # A limit given to monitored_barrier would hold on the main process only.
    worker = BackgroundWorker("meeting")
    worker.submit(lambda: dist.monitored_barrier(group), daemon=True)
    return worker.wait(seconds)


def check_mode(mode: str | None, metric: str) -> str:
    """The mode itself, if it says whether more or less of a metric is better.

    Raises:
        ValueError: for anything but ``"max"`` and ``"min"``.
    """
    if mode not in ("max", "min"):
        raise ValueError(
            f"mode must say whether more or less of {metric!r} is better: give 'max' or "
            f"'min' (train.best_mode in a configuration), not {mode!r}"
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

    None if there is no such value. If each ``EvalHook`` has had results, but there never was such
    a metric, the run ends with an error.
    """
    storage = trainer.storage
    measured_at = storage.latest_iter(metric)
    if measured_at is None:
        refuse_missing(metric, trainer)
    elif measured_at > since:
        return storage.history(metric).tail(1)[0]
    return None


def refuse_missing(metric: str, trainer: TrainerBase) -> None:
    """End the run with an error if each ``EvalHook`` has had results, but none of that name."""
    evaluations = [hook for hook in trainer.hooks if isinstance(hook, EvalHook)]
    if evaluations and all(hook.has_results for hook in evaluations):
        hint = did_you_mean(metric, trainer.storage.histories())
        trainer.raise_later(ValueError(f"there is no metric {metric!r}{hint}"))


class BestCheckpointer(HookBase):
    """Saves ``model_best.pth`` whenever an evaluation gives the best value so far.

    With a sharded checkpointer that is a folder ``model_best``. Register it after ``EvalHook``, so
    that what was measured is what is saved, and before ``PeriodicCheckpointer``, since the best
    value so far is state of this hook.

    A resumed run never overwrites a better model, not even one that was saved after the
    checkpoint it resumes from, or as a folder where it saves files. No run resumes from the file.

    Args:
        eval_period: that of the ``EvalHook``; 0 looks at the end of training only.
        checkpointer: what saves.
        val_metric: the name of the metric, such as ``"classification/accuracy"``.
        mode: ``"max"`` if more is better, ``"min"`` if less is.
        file_prefix: the name of the file, without ``.pth``.
        ema: a hook whose averaged weights are saved as the model, where the metric is theirs.

    Attributes:
        best_metric: the best value so far, or None.
        best_iter: the iteration that it was measured at, or None.

    Raises:
        ValueError: for another mode, or an impossible ``file_prefix``; in a run, when it is due
            and the metric is not there or older than the weights. What was trained is saved first.
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
        check_saver(checkpointer, file_prefix)
        self._period = Period(eval_period)
        self._checkpointer = checkpointer
        self._val_metric = val_metric
        self._mode = check_mode(mode, val_metric)
        self._file_prefix = file_prefix
        self.needs_every_rank = checkpointer.sharded  # each writes its shards
        names = [f"{file_prefix}.pth", file_prefix]
        self._file, self._other = reversed(names) if checkpointer.sharded else names
        self._ema = ema
        self.best_metric: float | None = None
        self.best_iter: int | None = None

    def before_train(self) -> None:
        """Learn from the file of a resumed run which value has to be exceeded."""
        if self.trainer.start_iter > 0:
            self._follow_file()

    def _follow_file(self) -> None:
        """Take the best value from the file or folder, where that has one.

        The state of the checkpoint is not enough: the file may have been saved after it, and an
        accelerator may compute other numbers the second time. A file that is broken or gone is to
        be replaced, whatever was in it.
        """
        saver = self._checkpointer
        if not saver.save_to_disk:
            return  # the main process tells its value
        path = os.path.join(saver.save_dir, self._file)
        if not os.path.exists(path):
            path = os.path.join(saver.save_dir, self._other)
        content = None
        if os.path.exists(path):
            try:
                content = read_checkpoint(path, "meta")
            except CorruptCheckpointError as error:
                logger.error("The next best model replaces a broken file: %s", error)
        if content is None:
            self.best_metric = self.best_iter = None
        else:
            self.load_state_dict(content.get("best", {}))

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
        trainer = self.trainer
        if self.on_every_rank:
            trainer.synchronize()  # the metric may be the mean over the ranks
        name = self._val_metric
        latest = trainer.storage.latest().get(name, (math.nan, -1))
        best = (self.best_metric, self.best_iter)
        if self.on_every_rank:
            # The main process may be the only one that knows the metric, and what is in the file.
            latest, best = comm.broadcast((latest, best))
        self.best_metric, self.best_iter = best
        value, measured_at = latest
        iteration = trainer.done - 1
        if measured_at < iteration:
            if trainer._late_error is None:  # or else the evaluation has failed
                self._explain_old(measured_at)
            return
        so_far = "none" if self.best_metric is None else f"{self.best_metric:.4g}"
        logger.info("%s is %.4g; the best so far: %s", name, value, so_far)
        if not is_better(value, self.best_metric, self._mode):
            return
        if self.on_every_rank:
            trainer.prepare_save()
        # As in detectron2: a subclass learns of a best value, and may refuse it.
        if self._update_best(value, measured_at) is False:
            return
        averaged = self._ema.swap() if self._ema else nullcontext()
        with spent(trainer, "save_time"), averaged:
            self._checkpointer.save(
                self._file_prefix,
                tag=False,
                on_saved=partial(delete_replaced, names=[self._other]),
                on_full=self._go_on,
                iteration=iteration,
                best=self.state_dict(),
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
        elif not self.trainer.succeeded:  # at the end there may have been no evaluation
            error = ValueError(
                f"BestCheckpointer is due at iteration {self.trainer.iter}, but {name!r} was "
                f"measured at {measured_at}: register it behind EvalHook, with its eval_period"
            )
            self.trainer.raise_later(error)

    def _go_on(self, error: OSError) -> None:
        logger.error(
            "NOT SAVED: %s. Training goes on; the next best tries again", error
        )
        self.best_metric = self.best_iter = None
        self._follow_file()

    def state_dict(self) -> dict[str, Any]:
        """The best value so far, of which metric and iteration; nothing before the first."""
        if self.best_metric is None:
            return {}
        return {
            "metric": self._val_metric,
            "best_metric": self.best_metric,
            "best_iter": self.best_iter,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned, unless it is of another metric."""
        if state_dict.get("metric") == self._val_metric:
            self.best_metric = state_dict["best_metric"]
            self.best_iter = state_dict["best_iter"]


class EarlyStopping(HookBase):
    """Asks for the end of training when a metric has not improved for some evaluations.

    It looks after each iteration that put a new value of the metric, so register it after the
    hook that does. A value that is not finite counts as no improvement.

    Args:
        metric: the name of the metric, such as ``"classification/val_loss"``.
        mode: ``"max"`` if more is better, ``"min"`` if less is.
        patience: how many values in a row without improvement end the run, at least 1.
        min_delta: an improvement must be larger than this.

    Raises:
        ValueError: for another mode, or a patience below 1; in a run, if the metric is not there
            after the first evaluation.
    """

    def __init__(
        self,
        metric: str,
        mode: str | None = None,
        patience: int = 5,
        min_delta: float = 0.0,
    ) -> None:
        check_count("patience", patience)
        self._metric = metric
        self._mode = check_mode(mode, metric)
        self._patience = patience
        self._min_delta = min_delta
        self._best: float | None = None
        self._waited = 0
        self._seen_iter = -1

    def before_train(self) -> None:
        """Stop a resumed run that had stopped, unless its patience was raised."""
        if not any(isinstance(hook, EvalHook) for hook in self.trainer.hooks):
            logger.warning(
                "EarlyStopping: there is no EvalHook, so another hook or the model has to "
                "record the metric %r",
                self._metric,
            )
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
