"""Evaluates while training."""

import logging
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from hooktrain.engine.train_loop import HookBase, TrainerBase
from hooktrain.evaluation import first_batches, flatten_results_dict
from hooktrain.utils import comm
from hooktrain.utils.comm import all_come
from hooktrain.utils.names import did_you_mean

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 5.0


class EvalHook(HookBase):
    """Calls a function every ``eval_period`` iterations and at the end of a complete run.

    What it returns becomes metrics: a dict, possibly nested, of numbers. Register it on every
    rank or on none; what it returns on the main process counts, and every rank gets that, so that
    hooks that act on a metric do the same everywhere.

    An error of the function ends the run after the other hooks have seen the iteration, so that
    what was trained is saved where that is due. With several ranks, one that fails waits some
    seconds for the others. If they do not come, they may be waiting for it inside of the function,
    and it ends the run at once.

    Args:
        eval_period: in iterations, or like ``"1 epoch"``; 0 or less evaluates at the end only.
        eval_function: takes nothing; returns a dict of results, or nothing.
        eval_after_train: whether to evaluate at the end.
        sanity_batches: evaluate on so many batches before the first step, to see that it works.
            Nobody sees the results.

    Attributes:
        evaluated_at: the number of finished iterations at the last evaluation that had results; -1
            before the first.

    Raises:
        TypeError: if ``eval_function`` cannot be called, or returns something else.
    """

    evaluated_at = -1

    def __init__(
        self,
        eval_period: int | str,
        eval_function: Callable[[], Mapping[str, Any] | None],
        eval_after_train: bool = True,
        sanity_batches: int = 0,
    ) -> None:
        if not callable(eval_function):
            raise TypeError(
                f"eval_function, after the period, must be callable: {eval_function!r}"
            )
        self._period = eval_period
        self._func = eval_function
        self._eval_after_train = eval_after_train
        self._sanity_batches = sanity_batches

    def before_train(self) -> None:
        """See that an evaluation works."""
        if self._sanity_batches:
            logger.info("Trying the evaluation on %d batches", self._sanity_batches)
            with first_batches(self._sanity_batches):
                _as_numbers(self._func() or {})

    def after_step(self) -> None:
        """Evaluate where a period ends; the last iteration is left to :meth:`after_train`."""
        if self.is_due(self._period, at_end=False if self._eval_after_train else None):
            self._evaluate()

    def after_train(self) -> None:
        """Evaluate a run that came to its end."""
        if self._eval_after_train and self.trainer.succeeded:
            self._evaluate()

    def _evaluate(self) -> None:
        numbers: dict[str, float] = {}
        error: Exception | None = None
        try:
            numbers = _as_numbers(self._func() or {})
        except Exception as raised:
            logger.exception("The evaluation failed:")
            error = raised
        # Ranks need very different times to evaluate; they wait here, where it is visible.
        if not all_come(_PATIENCE_SECONDS if error else None) and error:
            raise error
        outcomes = comm.all_gather((numbers, repr(error) if error else None))
        if failed := [
            f"rank {rank}: {why}" for rank, (_, why) in enumerate(outcomes) if why
        ]:
            self.trainer.raise_later(
                error or RuntimeError(f"The evaluation failed on {failed[0]}")
            )
        if outcomes[0][0]:
            self.evaluated_at = self.trainer.iter + (not self.trainer.succeeded)
        hints = self.trainer.storage.smoothing_hints()
        for name, number in outcomes[0][0].items():
            # A name that training uses too keeps its hint.
            self.trainer.storage.put_scalar(name, number, hints.get(name, False))


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


_LESS = "loss losses error err mse rmse mae nll perplexity ppl wer cer fid"
_MORE = "acc accuracy ap map ar auc iou miou dice f recall precision psnr ssim bleu"


def better_by_name(metric: str) -> str | None:
    """``"min"`` for a loss or an error, ``"max"`` for a well-known score, None for any other name.

    >>> better_by_name("classification/val_loss"), better_by_name("bbox/AP50")
    ('min', 'max')
    """
    words = set(re.findall("[a-z]+", metric.lower()))
    less, more = (not words.isdisjoint(known.split()) for known in (_LESS, _MORE))
    return None if less == more else "min" if less else "max"


def sign_of(metric: str, mode: str | None) -> int:
    """1 if more of a metric is better, -1 if less is.

    Args:
        metric: its name.
        mode: ``"max"`` or ``"min"``; None asks the name.

    Raises:
        ValueError: for another mode, or if the name does not tell.
    """
    mode = mode or better_by_name(metric)
    if mode not in ("max", "min"):
        raise ValueError(
            f"mode must be 'max' or 'min' for the metric {metric!r}, but got {mode!r}"
        )
    return 1 if mode == "max" else -1


def evaluated_at(trainer: TrainerBase) -> list[int]:
    """When each ``EvalHook`` of a trainer has evaluated last; see its ``evaluated_at``."""
    return [hook.evaluated_at for hook in trainer._hooks if isinstance(hook, EvalHook)]


def check_comes(hook: Any, metric: str) -> None:
    """End the run by an error if each ``EvalHook`` has evaluated, and a metric has not come.

    At the end of a run without an evaluation a warning says so.

    Args:
        hook: the one that watches it; it calls this in ``after_step`` where the period of metrics
            ends, and in ``after_train``.
        metric: its name.
    """
    trainer = hook.trainer
    measured_at, start = trainer.storage.latest_iter(metric), trainer.start_iter
    if measured_at is not None and measured_at >= start:
        return
    hint = did_you_mean(metric, trainer.storage.histories())
    text = f"{type(hook).__name__} watches the metric {metric!r}, which nothing has put{hint}"
    evaluations = evaluated_at(trainer)
    # Hooks may put metrics later in the iteration of an evaluation.
    if evaluations and all(start < at <= trainer.iter for at in evaluations):
        trainer.raise_later(ValueError(text))
    elif trainer.succeeded:
        logger.warning(text)


class EarlyStopping(HookBase):
    """Asks for the end of training when a metric has not improved for some evaluations.

    It looks after each iteration that put a new value of the metric, so register it after the
    hook that does. A value that is not finite counts as no improvement. A metric that has not come
    when all evaluations were made once ends the run with an error.

    Args:
        metric: the metric's name, such as ``"classification/val_loss"``.
        mode: ``"min"`` if less is better, ``"max"`` if more is. None asks the name: that of a loss
            or an error means ``"min"``, that of a well-known score (accuracy, AP, mIoU) ``"max"``.
        patience: how many values in a row without improvement end the run, at least 1.
        min_delta: an improvement must be larger than this.

    Raises:
        ValueError: for another mode, for None where the name does not tell, or a patience below 1.
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
        self._sign = sign_of(metric, mode)
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
        if self.is_due(self.trainer.sync_period):
            check_comes(self, self._metric)
        storage = self.trainer.storage
        measured_at = storage.latest_iter(self._metric)
        if measured_at is None or measured_at <= self._seen_iter:
            return
        self._seen_iter = measured_at
        value = storage.history(self._metric).latest()
        best = self._best
        if math.isfinite(value) and (
            best is None or (value - best) * self._sign > self._min_delta
        ):
            self._best = value
            self._waited = 0
        else:
            self._waited += 1
        self._stop_if_exhausted()

    def after_train(self) -> None:
        """Refuse a metric that was never there."""
        check_comes(self, self._metric)

    def _stop_if_exhausted(self) -> None:
        if self._waited >= self._patience:
            reason = f"{self._metric} has not improved on {self._best} "
            reason += f"in {self._waited} evaluations"
            self.trainer.request_stop(reason)

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
