"""Evaluates while training, keeps the best model, and stops a run that no longer improves."""

import logging
import math
import os
import re
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from typing import Any

from hooktrain.checkpoint import Checkpointer, CorruptCheckpointError
from hooktrain.checkpoint.loading import read_checkpoint
from hooktrain.checkpoint.resume import checkpoint_names, put_aside
from hooktrain.engine.hook_base import HookBase
from hooktrain.engine.hook_list import named_hooks
from hooktrain.engine.hooks.averaging import EMA
from hooktrain.engine.hooks.callback import CallbackHook
from hooktrain.engine.hooks.checkpointing import check_saver
from hooktrain.engine.preflight import names_that_differ
from hooktrain.evaluation.evaluator import as_module, inference_context
from hooktrain.evaluation.testing import EvalFunction, Results, as_numbers
from hooktrain.utils import comm
from hooktrain.utils.background import BackgroundWorker
from hooktrain.utils.logger import log_once
from hooktrain.utils.names import Numbers, State, check_count, did_you_mean
from hooktrain.utils.periods import Period, PeriodLike, in_iterations

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 5.0
# By mode, the names of metrics (in lower case) for which it is a mistake.
_MISTAKEN = {
    "min": r"\b([a-z0-9]+_)*(acc|accuracy|auc|f1|miou|m?ap\d*)$",
    "max": r"^(?!.*neg).*\b([a-z0-9]+_)*(loss|error|mae|mse|rmse)$",
}


class EvalHook(HookBase):
    """Evaluates every ``eval_period`` iterations and at the end of a complete run.

    ``eval_function`` is called with the trainer's model in evaluation mode. Afterwards each layer
    is back in its previous mode, whatever the function has called.

    The generators are seeded for each call by the trainer's seed, the iteration and the rank. The
    results go to ``trainer.after_evaluation``, which records them and calls the hooks. The same
    weights are evaluated only once: neither a run that is stopped right after an evaluation nor a
    complete run that is started again is evaluated a second time.

    If the function raises an error, the run ends after the other hooks have seen the iteration, so
    a checkpoint that is due is still saved. If it fails on some ranks only, these wait a few
    seconds for the others. If the others do not arrive, they may be waiting inside the function, so
    the failed ranks end the run at once.

    Args:
        eval_period: in iterations, or like ``"1 epoch"`` or ``"1 hour"``; 0 evaluates only at the
            end.
        eval_function: takes no argument, and returns a dict of numbers, possibly nested, or None.
            Other values in it, such as torchmetrics' list of classes, are skipped, and named in the
            log.
        eval_after_train: whether to evaluate at the end: in the last iteration, or after it if
            the run was stopped early.

    Attributes:
        last_results: the function's latest results on this rank.

    Raises:
        TypeError: if ``eval_function`` is not callable, or does not return such a dict.
    """

    needs_every_rank = True
    phase = "evaluate"

    def __init__(
        self,
        eval_period: PeriodLike,
        eval_function: EvalFunction,
        eval_after_train: bool = True,
    ) -> None:
        if not callable(eval_function):
            raise TypeError(
                f"eval_function (the second argument) must be callable: {eval_function!r}"
            )
        self._period = Period(eval_period)
        self._func = eval_function
        self._eval_after_train = eval_after_train
        self.last_results: Results = {}

    def before_train(self) -> None:
        """Log the period; find the results of a complete run that is started again."""
        logger.info(
            "eval_period=%r (a number counts iterations, 0 is never); also at the end: %s",
            self._period.every,
            self._eval_after_train,
        )
        self.last_results = self._last().get("results", {})

    def _last(self) -> Results:
        """The last evaluation: ``done``, the number of finished iterations, and ``results``."""
        named = named_hooks(self.trainer.hooks)
        name = next(name for name in named if named[name] is self)
        info: Any = self.trainer.storage.info  # saved in checkpoints
        return info.setdefault(f"evaluation by {name}", {})  # type: ignore[no-any-return]

    def times_before_end(self) -> float:
        """The number of evaluations before the last iteration; infinite for a period in time."""
        try:
            every = in_iterations(self._period.every, self.trainer.epoch_length)
        except ValueError:  # a time, or epochs of unknown length
            return math.inf
        return (self.trainer.max_iter - 1) // every if every else 0

    def after_step(self) -> None:
        """Evaluate at the end of a period, and in the last iteration."""
        at_end = self._eval_after_train and self.trainer.is_last
        if at_end or self._period.is_due(self.trainer):
            self._do_eval()

    def after_train(self) -> None:
        """Evaluate after an early stop, or if a complete run has no results yet."""
        is_new = self._last().get("done") != self.trainer.done
        if self._eval_after_train and self.trainer.succeeded and is_new:
            self._do_eval()

    def announce(self) -> None:
        """Called right before the function."""

    def _do_eval(self) -> None:
        self.announce()
        self.trainer.seed_generators(self.trainer.done, "evaluation")
        outcome: Future[Numbers] = Future()
        with self.trainer.clock.pause("evaluation"):
            try:
                outcome.set_result(self._evaluate())
            except Exception as error:
                logger.error(
                    "The evaluation failed: the run ends once the other hooks have run"
                )
                outcome.set_exception(error)
            # Ranks may take very different times to evaluate. They wait for each other here, so
            # that the stack of a waiting rank shows the reason.
            _meet_other_ranks(outcome)
        try:
            results, *others = comm.on_all_ranks(outcome.result)
        except Exception as of_some_rank:
            self.trainer.raise_later(of_some_rank)
            return
        different = names_that_differ(results, others)
        # Times differ between ranks; metrics of one model do not.
        if any(map(self.trainer.storage.is_reproducible, different)):
            log_once(
                logger.warning,
                "The ranks returned different results, so those of the main process are used: an "
                "evaluator must gather from all ranks, for example by comm.all_gather()",
            )
        self._last().update(done=self.trainer.done, results=results)
        self.trainer.after_evaluation(results)

    def _evaluate(self) -> Numbers:
        with inference_context(as_module(getattr(self.trainer, "model", None))):
            results = self._func()
        if results is None:
            log_once(
                logger.info,
                "eval_function returned None, so there are no results: is a `return "
                "inference_on_dataset(...)` missing?",
            )
        self.last_results = results or {}
        return as_numbers(self.last_results)


def _meet_other_ranks(outcome: Future[Numbers]) -> None:
    """Wait for the other ranks at the end of ``eval_function``. Collective.

    Raises:
        Exception: the error of this rank, if the others do not arrive within a few seconds.
        RuntimeError: if they are elsewhere; see :func:`hooktrain.utils.comm.meet`.
    """
    worker = BackgroundWorker("meeting")
    worker.submit(partial(comm.meet, "the end of eval_function"), daemon=True)
    try:
        if not worker.wait(_PATIENCE_SECONDS if outcome.exception() else None):
            outcome.result()
    except RuntimeError:
        outcome.result()  # an error of this rank comes first
        raise


def check_mode(mode: str | None, metric: str) -> str:
    """Return a mode after checking it; warn if the name of the metric suggests the other one.

    Raises:
        ValueError: if it is not ``"max"`` or ``"min"``.
    """
    if mode not in _MISTAKEN:
        raise ValueError(
            f"mode for {metric!r} must be 'max' or 'min' (train.best_mode in a configuration), "
            f"not {mode!r}"
        )
    if re.search(_MISTAKEN[mode], metric.lower()):
        logger.warning(
            "mode=%r would take the worst %r for the best: use the other mode",
            mode,
            metric,
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


def log_missing_evaluations(hook: HookBase, metric: str, patience: float = -1) -> None:
    """Log that a hook waits for results that are missing, or fewer than its patience.

    Args:
        hook: the hook.
        metric: the metric it waits for. Without an ``EvalHook`` a hook of the user must return it.
        patience: the number of results without improvement after which the hook acts.
    """
    evaluations = [each for each in hook.trainer.hooks if isinstance(each, EvalHook)]
    kind = type(hook).__name__
    if not evaluations:
        logger.info(
            "%s waits for trainer.after_evaluation({%r: ...}), which your own hook must call: "
            "there is no EvalHook",
            kind,
            metric,
        )
    elif all(each.times_before_end() <= patience for each in evaluations):
        logger.info(
            "The run has too few evaluations for %s, with its patience of %d, to act",
            kind,
            patience,
        )


def find_result(hook: HookBase, metric: str, results: Numbers) -> float | None:
    """The value of the metric that a hook waits for; None if these results lack it.

    If every ``EvalHook`` has had results without the metric, this is an error, which ends the run
    after the other hooks have seen the iteration. If one of the user's hooks may still return the
    metric, it is only logged.
    """
    hooks = hook.trainer.hooks
    if metric in results or metric in hook.trainer.storage.results():
        return results.get(metric)
    given = [e._last().get("results") for e in hooks if isinstance(e, EvalHook)]
    if given and all(given):
        problem = (
            f"no EvalHook has returned {metric!r} so far{did_you_mean(metric, results)} (if only "
            "some evaluations return it, let the first one return math.nan)"
        )
        if any(map(_is_user_hook, hooks)):
            logger.info(problem)
        else:
            hook.trainer.raise_later(ValueError(problem))
    return None


def _is_user_hook(hook: HookBase) -> bool:
    kind = type(hook)
    return kind is CallbackHook or not kind.__module__.startswith("hooktrain.")


def find_average(metric: str, hooks: Iterable[HookBase]) -> EMA | None:
    """The hook EMA whose weights a metric ``"ema/..."`` measures; None for other metrics.

    Raises:
        ValueError: if there is no such hook, or if there are several.
    """
    if not metric.startswith("ema/"):
        return None
    averages = [hook for hook in hooks if isinstance(hook, EMA)]
    if len(averages) != 1:
        raise ValueError(
            f"{metric!r} is a metric of averaged weights, which needs one registered hook EMA "
            f"(train.ema.enabled in a configuration), not {len(averages)}"
        )
    return averages[0]


class BestCheckpointer(HookBase):
    """Saves ``model_best.pth`` whenever an evaluation returns the best value so far.

    With a sharded checkpointer it is a folder ``model_best``. It is saved as soon as the hooks of
    earlier phases have seen the results, so it holds the weights that were measured. A run that
    starts from it continues with the same iteration as from a checkpoint.

    A resumed run never overwrites a better model, not even one that was saved after the
    checkpoint it resumes from. A resume never chooses this file.

    Args:
        checkpointer: the Checkpointer to save with.
        val_metric: the name of a result, such as ``"classification/accuracy"``. If it begins with
            ``"ema/"``, the averaged weights of the registered hook ``EMA`` are saved as the model.
        mode: ``"max"`` if higher is better, ``"min"`` if lower is.
        file_prefix: the name of the file, without ``.pth``.

    Attributes:
        best_metric: the best value so far, or None.
        best_iter: the iteration of the best value, or None.
        ema: the hook whose averaged weights are saved, or None; found when a run begins.

    Raises:
        TypeError: if ``checkpointer`` is not a Checkpointer.
        ValueError: if ``mode`` or ``file_prefix`` is invalid; when a run begins, if the metric is
            ``"ema/..."`` and not exactly one hook ``EMA`` is registered; during a run, after the
            saves that are due, if the first results lack the metric.
    """

    phase = "save"

    def __init__(
        self,
        checkpointer: Checkpointer,
        val_metric: str,
        mode: str | None = None,
        file_prefix: str = "model_best",
    ) -> None:
        check_saver(checkpointer, file_prefix)
        self._checkpointer = checkpointer
        self._val_metric = val_metric
        self._mode = check_mode(mode, val_metric)
        self._file_prefix = file_prefix
        self._name = file_prefix if checkpointer.sharded else f"{file_prefix}.pth"
        self.needs_every_rank = checkpointer.sharded  # each rank writes its shards
        self.ema: EMA | None = None
        self.best_metric: float | None = None
        self.best_iter: int | None = None

    def before_train(self) -> None:
        """Read the best value so far, if the run is resumed.

        The best model of an earlier run, a file or a folder, is renamed.
        """
        log_missing_evaluations(self, self._val_metric)
        self.ema = find_average(self._val_metric, self.trainer.hooks)
        if self._checkpointer.save_to_disk and self.trainer.start_iter == 0:
            earlier = [self._file_prefix, f"{self._file_prefix}.pth"]
            put_aside(self._checkpointer.save_dir, earlier)
        self.read_best()

    def read_best(self) -> None:
        """Read the best value from the file or folder, if it has one.

        This hook's state in a checkpoint is not enough: the best model may have been saved after
        it, and an accelerator may compute other numbers the second time. If the file is broken or
        missing, the next model replaces it, whatever the earlier value was.
        """
        saver = self._checkpointer
        if not saver.save_to_disk:
            return  # the main process broadcasts its value
        try:
            if self._name in checkpoint_names(saver.save_dir):
                content = read_checkpoint(self.run_files()[0], "meta")
                self.load_state_dict(content.get("best", {}))
                return
        except CorruptCheckpointError as error:
            logger.error("The next best model replaces a broken one: %s", error)
        self.best_metric = self.best_iter = None

    def after_evaluation(self, results: Numbers) -> None:
        """Save the model if the metric is the best so far."""
        value = find_result(self, self._val_metric, results)
        if value is not None:
            self._judge(value)

    def _judge(self, value: float) -> None:
        trainer = self.trainer
        self._checkpointer.wait()  # to know whether the best so far was saved
        if self.on_every_rank:  # the main process knows what is in the file
            self.best_metric, self.best_iter = comm.broadcast(
                (self.best_metric, self.best_iter)
            )
        if not self.is_best(value):
            return
        if self.on_every_rank:
            trainer.prepare_save()
        iteration = trainer.done - 1
        # As in detectron2, a subclass may override this to learn of a best value, or to refuse it.
        if self._update_best(value, iteration) is False:
            return
        with trainer.clock.pause("save"):
            self.save(iteration=iteration, on_full=self._log_disk_full)

    def is_best(self, value: float) -> bool:
        """Log a value, and return whether it is better than the best so far."""
        better = is_better(value, self.best_metric, self._mode)
        best = value if better or self.best_metric is None else self.best_metric
        logger.info("%s is %.4g; the best so far: %.4g", self._val_metric, value, best)
        return better

    def save(self, **content: Any) -> None:
        """Save the model as the best one; ``content`` is passed to ``Checkpointer.save``."""
        with self.ema.swap() if self.ema else nullcontext():
            self._checkpointer.save(
                self._file_prefix, tag=False, best=self.state_dict(), **content
            )

    def after_train(self) -> None:
        """Log which model was the best."""
        if not self.trainer.succeeded:
            return
        self._checkpointer.wait()
        if self.best_metric is None:
            logger.warning(
                "No evaluation returned a finite %r, so no best model was saved",
                self._val_metric,
            )
        else:
            logger.info(
                "The best %s is %.4g, from iteration %d, in %s; the model has the last weights",
                self._val_metric,
                self.best_metric,
                self.best_iter,
                self._name,
            )

    def run_files(self) -> list[str]:
        """The best model, a file or a folder."""
        return [os.path.join(self._checkpointer.save_dir, self._name)]

    def _update_best(self, val: float, iteration: int) -> bool:
        """Set the best value so far."""
        self.best_metric = val
        self.best_iter = iteration
        return True

    def _log_disk_full(self, error: OSError) -> None:
        logger.error(
            "NOT SAVED: %s. Training continues; the next better model is saved", error
        )
        self.best_metric = self.best_iter = None
        self.read_best()

    def state_dict(self) -> State:
        """The metric, its best value so far and the iteration of that; None before the first."""
        return {
            "metric": self._val_metric,
            "best_metric": self.best_metric,
            "best_iter": self.best_iter,
        }

    def load_state_dict(self, state_dict: State) -> None:
        """Load what ``state_dict`` returned, unless it is about another metric."""
        if state_dict.get("metric") == self._val_metric:
            self.best_metric = state_dict["best_metric"]
            self.best_iter = state_dict["best_iter"]


class EarlyStopping(HookBase):
    """Stops the run when a result has not improved for some evaluations.

    A value that is not finite counts as no improvement. To stop by a training metric, let your own
    hook call ``trainer.after_evaluation({"my_loss": value})`` each time it should be judged.

    Args:
        metric: the name of a result, such as ``"classification/val_loss"``.
        mode: ``"max"`` if higher is better, ``"min"`` if lower is.
        patience: the number of evaluations in a row without improvement that ends the run, at
            least 1.
        min_delta: an improvement must be larger than this.

    Raises:
        ValueError: if ``mode`` is invalid, or ``patience`` below 1; during a run, if the first
            results lack the metric.
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

    def before_train(self) -> None:
        """Stop a resumed run that was stopped before, unless ``patience`` was raised."""
        log_missing_evaluations(self, self._metric, self._patience)
        self._stop_if_exhausted()

    def after_evaluation(self, results: Numbers) -> None:
        """Compare the result with the best so far."""
        value = find_result(self, self._metric, results)
        if value is None:
            return
        if is_better(value, self._best, self._mode, self._min_delta):
            self._best = value
            self._waited = 0
        else:
            self._waited += 1
            self._stop_if_exhausted()

    def _stop_if_exhausted(self) -> None:
        if self._waited >= self._patience:
            self.trainer.request_stop(
                f"{self._metric} has not improved on {self._best} by more than "
                f"min_delta={self._min_delta} in {self._waited} evaluations"
            )

    def state_dict(self) -> State:
        """The best value, and the number of evaluations since."""
        return {"best": self._best, "waited": self._waited}

    def load_state_dict(self, state_dict: State) -> None:
        """Load what ``state_dict`` returned."""
        self._best = state_dict["best"]
        self._waited = state_dict["waited"]
