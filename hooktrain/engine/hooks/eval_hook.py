"""Evaluates while training."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from hooktrain.checkpoint.agreement import all_come
from hooktrain.engine.train_loop import HookBase
from hooktrain.evaluation import first_batches, flatten_results_dict
from hooktrain.utils import comm

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
            raise TypeError(f"eval_function, after the period, must be callable: {eval_function!r}")
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
        if failed := [f"rank {rank}: {why}" for rank, (_, why) in enumerate(outcomes) if why]:
            self.trainer.raise_later(error or RuntimeError(f"The evaluation failed on {failed[0]}"))
        if outcomes[0][0]:
            self.evaluated_at = self.trainer.iter + (not self.trainer.succeeded)
        hints = self.trainer.storage.smoothing_hints()
        for name, number in outcomes[0][0].items():
            # A name that training uses too keeps its hint.
            self.trainer.storage.put_scalar(name, number, hints.get(name, False))


def _as_numbers(results: Mapping[str, Any]) -> dict[str, float]:
    if not isinstance(results, Mapping):
        raise TypeError(f"eval_function must return a dict of results, but got {results!r}")
    numbers = {}
    for name, value in flatten_results_dict(results).items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError):
            raise ValueError(f"results must be numbers, but {name!r} is {value!r}") from None
    return numbers
