"""Periods in iterations, in epochs (``"1 epoch"``) or in time (``"10 minutes"``)."""

import logging
import math
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, SupportsIndex

from hooktrain.utils.names import check_count

logger = logging.getLogger(__name__)

# Iterations, or a string such as "1 epoch" or "10 minutes".
PeriodLike = int | str
# A period as a string.
PERIOD = re.compile(r"(\d+|\d*\.\d+) (epoch|second|minute|hour)s?")

_SECONDS = {"epoch": 0, "second": 1, "minute": 60, "hour": 3600}


@dataclass(frozen=True)
class Period:
    """The period of an action such as a checkpoint.

    Example::

        class Save(HookBase):
            period = Period("1 epoch")

            def after_step(self):
                if self.period.is_due_or_last(self.trainer):
                    ...

    Args:
        every: a number of iterations, or a string such as ``"1 epoch"``, ``"0.5 epochs"``,
            ``"10 minutes"``, ``"30 seconds"`` or ``"1 hour"``. Only the time of the trainer's steps
            counts; see :class:`hooktrain.engine.clock.Clock`. 0 is never due.

    Raises:
        ValueError: for a negative number, a fraction of an iteration, ``"0 minutes"``, or any other
            string.
    """

    every: PeriodLike

    def __post_init__(self) -> None:
        if isinstance(self.every, str):
            _parse(self.every)
        else:
            check_count("a period in iterations", self.every, 0)

    def is_due(self, trainer: Any) -> bool:
        """Whether a period ends with the trainer's current iteration.

        Raises:
            ValueError: if the period is in epochs, and the length of an epoch is unknown.
        """
        iterations = self.every
        if isinstance(iterations, str):
            _, seconds = _parse(iterations)
            if seconds:
                return bool(trainer.clock.has_passed(seconds))
            iterations = in_iterations(iterations, trainer.epoch_length)
        return iterations > 0 and trainer.done % iterations == 0

    def is_due_or_last(self, trainer: Any) -> bool:
        """Like :meth:`is_due`, but also True in the last iteration of the run."""
        return self.is_due(trainer) or trainer.is_last


def in_iterations(number: PeriodLike, epoch_length: int | None) -> int:
    """Convert a number of iterations, or a string such as ``"0.5 epochs"``, to iterations.

    >>> in_iterations(20, None), in_iterations("1 epoch", 23), in_iterations("0.5 epochs", 23)
    (20, 23, 12)

    Args:
        number: iterations, or epochs as a string.
        epoch_length: the number of iterations of an epoch; None if unknown.

    Raises:
        ValueError: for any other string, for a time, or for epochs of unknown length.
    """
    if not isinstance(number, str):
        return number
    epochs, seconds = _parse(number)
    if seconds:
        raise ValueError(f"use iterations or epochs here, not a time: {number!r}")
    if epoch_length is None:
        raise ValueError(
            f"cannot convert {number!r} to iterations, since the loader has no length: use "
            "iterations, or set trainer.epoch_length"
        )
    return math.ceil(epochs * epoch_length)


@lru_cache  # it is called after each iteration
def _parse(text: str) -> tuple[Fraction, Fraction]:
    """The number in a string, and the seconds of its unit, which is 0 for epochs."""
    match = PERIOD.fullmatch(text)
    if match is None or float(match[1]) == 0:
        raise ValueError(
            "pass a number of iterations, or a string like '1 epoch' or '10 minutes', not "
            f"{text!r}"
        )
    number = Fraction(match[1])
    return number, number * _SECONDS[match[2]]


def end_of_run(
    start: int, max_iter: int | None, max_epochs: float | None, epoch_length: int | None
) -> int:
    """The iteration at which a run ends, exclusive.

    Args:
        start: the first iteration.
        max_iter: the end, or None.
        max_epochs: the end in epochs, counted from iteration 0, or None.
        epoch_length: the number of iterations of an epoch; None if unknown.

    Raises:
        ValueError: if there is no end, if it lies before the start, if the two ends differ, or for
            epochs of unknown length.
    """
    if max_epochs is not None:
        end = in_iterations(f"{max_epochs} epochs", epoch_length)
        if max_iter not in (None, end):
            raise ValueError(
                f"a run has only one end: pass {max_iter=} or {max_epochs=}, and None for the "
                "other"
            )
        max_iter = end
    if not isinstance(max_iter, SupportsIndex) or not 0 <= start <= max_iter:
        raise ValueError(
            f"a run from start_iter={start!r} (by default the number of finished iterations) "
            f"cannot end at {max_iter=}: pass a whole number that is not smaller"
        )
    if start == max_iter:
        logger.info(
            "Nothing is left to train: max_iter=%d is reached. Like max_epochs, it counts from "
            "iteration 0: raise it to continue. A new run, such as the next fold, needs its own "
            "folder; load_checkpoint() loads the weights of this run",
            max_iter,
        )
    return max_iter
