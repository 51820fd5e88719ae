"""Evaluates while training."""

from collections.abc import Callable, Mapping
from typing import Any

from hooktrain.engine.train_loop import HookBase
from hooktrain.evaluation import flatten_results_dict
from hooktrain.utils import comm


class EvalHook(HookBase):
    """Calls a function every ``eval_period`` iterations and at the end of a complete run.

    What it returns becomes metrics: a dict, possibly nested, of numbers. Register it on every
    rank or on none; what it returns on the main process counts, and every rank gets that, so that
    hooks that act on a metric do the same everywhere.

    Args:
        eval_period: in iterations; 0 or less evaluates at the end only.
        eval_function: takes nothing; returns a dict of results, or nothing.
        eval_after_train: whether to evaluate at the end.
    """

    def __init__(
        self,
        eval_period: int,
        eval_function: Callable[[], Mapping[str, Any] | None],
        eval_after_train: bool = True,
    ) -> None:
        self._period = eval_period
        self._func = eval_function
        self._eval_after_train = eval_after_train

    def after_step(self) -> None:
        """Evaluate where a period ends; the last iteration is left to :meth:`after_train`."""
        if self.is_due(self._period, at_end=False if self._eval_after_train else None):
            self._evaluate()

    def after_train(self) -> None:
        """Evaluate a run that came to its end."""
        if self._eval_after_train and self.trainer.succeeded:
            self._evaluate()

    def _evaluate(self) -> None:
        numbers = {}
        for name, value in flatten_results_dict(self._func() or {}).items():
            try:
                numbers[name] = float(value)
            except (TypeError, ValueError):
                raise ValueError(
                    f"results of an evaluation must be numbers, but {name!r} is {value!r}"
                ) from None
        # Ranks need very different times to evaluate; they wait here, where it is visible.
        for name, number in comm.broadcast(numbers).items():
            self.trainer.storage.put_scalar(name, number, smoothing_hint=False)
