"""Evaluates while training, and ends a run that no longer improves."""

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from hooktrain.engine.train_loop import HookBase, TrainerBase
from hooktrain.evaluation import first_batches, flatten_results_dict
from hooktrain.utils.comm import all_come, on_all_ranks
from hooktrain.utils.names import did_you_mean

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 5.0


class EvalHook(HookBase):
    """Calls a function every ``eval_period`` iterations and at the end of a complete run.

    The results become metrics. Register it on every rank or on none. The main process's results
    count, and every rank gets them, so that hooks that act on a metric do the same everywhere.

    An error of the function ends the run after the other hooks have seen the iteration, so that
    what was trained is saved where that is due. With several ranks, one that fails waits some
    seconds for the others. If they do not come, they may be waiting for it inside of the function,
    and it ends the run at once.

    Args:
        eval_period: in iterations, or like ``"1 epoch"``; 0 or less evaluates at the end only.
        eval_function: takes nothing; returns a dict of numbers, possibly nested, or nothing.
        eval_after_train: whether to evaluate at the end.
        sanity_batches: evaluate on this many batches before the first step, to see that it works.
            The results are not recorded.

    Attributes:
        has_results: whether an evaluation has returned metrics.

    Raises:
        TypeError: if ``eval_function`` cannot be called, or returns something else.
    """

    has_results = False

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
            logger.exception("The evaluation failed:")
            error = raised
        # Ranks need very different times to evaluate; they wait here, where it is visible.
        if not all_come(_PATIENCE_SECONDS if error else None) and error:
            raise error

        def outcome() -> dict[str, float]:
            if error is not None:
                raise error
            return numbers

        try:
            numbers = on_all_ranks(outcome)[0]
        except Exception as of_some_rank:
            self.trainer.raise_later(of_some_rank)
            return
        storage = self.trainer.storage
        hints = storage.smoothing_hints()
        for name, number in numbers.items():
            # A name that training uses too keeps its hint.
            storage.put_scalar(name, number, hints.get(name, False))
        self.has_results |= bool(numbers)


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
        mode: the answer; None takes ``"min"`` for a name with "loss" or "error" in it, else
            ``"max"``.

    Raises:
        ValueError: for another mode.
    """
    if mode is None:
        mode = "min" if "loss" in metric or "error" in metric else "max"
        logger.info("The best %s is the %simum; if not, give the mode", metric, mode)
    if mode not in ("min", "max"):
        raise ValueError(
            f"mode must be 'max' or 'min' for the metric {metric!r}, but got {mode!r}"
        )
    return mode


def refuse_missing(metric: str, trainer: TrainerBase) -> None:
    """End the run by an error if each ``EvalHook`` has had results and a metric has not come.

    Args:
        metric: its name; nothing has put it yet.
        trainer: the trainer.
    """
    evaluations = [hook for hook in trainer._hooks if isinstance(hook, EvalHook)]
    if evaluations and all(hook.has_results for hook in evaluations):
        hint = did_you_mean(metric, trainer.storage.histories())
        trainer.raise_later(ValueError(f"there is no metric {metric!r}{hint}"))


class EarlyStopping(HookBase):
    """Asks for the end of training when a metric has not improved for some evaluations.

    It looks after each iteration that put a new value of the metric, so register it after the
    hook that does. A value that is not finite counts as no improvement.

    Args:
        metric: the metric's name, such as ``"classification/val_loss"``.
        mode: ``"min"`` if less is better, ``"max"`` if more is. None takes ``"min"`` for a name
            with "loss" or "error" in it, else ``"max"``.
        patience: how many values in a row without improvement end the run, at least 1.
        min_delta: an improvement must be larger than this.

    Raises:
        ValueError: for another mode or a patience below 1; in a run, if the metric is not there
            after the first evaluation.
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
        self._sign = 1 if choose_mode(metric, mode) == "max" else -1
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
        storage = self.trainer.storage
        measured_at = storage.latest_iter(self._metric)
        if measured_at is None:
            refuse_missing(self._metric, self.trainer)
            return
        if measured_at <= self._seen_iter:
            return
        self._seen_iter = measured_at
        value = storage.history(self._metric).latest()
        if self._is_better(value):
            self._best = value
            self._waited = 0
        else:
            self._waited += 1
        self._stop_if_exhausted()

    def _is_better(self, value: float) -> bool:
        if self._best is None or not math.isfinite(value):
            return math.isfinite(value)
        return (value - self._best) * self._sign > self._min_delta

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
