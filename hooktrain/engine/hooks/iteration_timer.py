"""How long the iterations take, how far the run is, and what the hooks cost."""

import logging
import time

from hooktrain.engine.train_loop import HookBase
from hooktrain.utils.logger import pretty_seconds, show_progress

logger = logging.getLogger(__name__)


class IterationTimer(HookBase):
    """Records the seconds of each iteration as ``time``, and logs the speed at the end.

    Where a person watches, it draws the progress bar of the run.

    Register it first: the time between its ``before_step`` and the end of the step then includes
    the other hooks' ``before_step``, and none of their ``after_step``.

    Args:
        warmup_iter: the first iterations of a run are slower (allocation, autotuning,
            compilation); so many are left out, of the speed also after a resume.
    """

    def __init__(self, warmup_iter: int = 3) -> None:
        self._warmup_iter = warmup_iter

    def before_train(self) -> None:
        """Start the clock of the run."""
        self._storage = self.trainer.storage
        self._run_start = self._timed_start = time.perf_counter()
        self._steps_seconds = 0.0
        self._timed = 0
        self._timed_from = self._storage.iter + self._warmup_iter
        self._is_watched = show_progress("Training", self._storage.iter, self.trainer.max_iter)

    def before_step(self) -> None:
        """Start the clock of the step."""
        self._step_start = time.perf_counter()

    def after_step(self) -> None:
        """Record the time of the step, after the warm-up, and move the bar."""
        now = time.perf_counter()
        storage = self._storage
        seconds = now - self._step_start
        # By the absolute number: a resumed run has a time in each line that it would have had.
        if storage.iter >= self._warmup_iter:
            storage.put_scalar("time", seconds)
        if storage.iter < self._timed_from:
            self._timed_start = now
        else:
            self._steps_seconds += seconds
            self._timed += 1
        if self._is_watched:
            left = self.trainer.max_iter - storage.iter - 1
            eta = (now - self._timed_start) / self._timed * left if self._timed else None
            show_progress("Training", storage.iter + 1, self.trainer.max_iter, eta)

    def after_train(self) -> None:
        """Log the speed of the whole run."""
        now = time.perf_counter()
        if self._timed:
            seconds, count = self._steps_seconds, self._timed
            message = "Overall training speed: %d iterations in %s (%.4f s / it)"
            logger.info(message, count, pretty_seconds(seconds), seconds / count)
        total, hooks = now - self._run_start, now - self._timed_start - self._steps_seconds
        spent = pretty_seconds(total), pretty_seconds(hooks)
        logger.info("Total training time: %s (%s on hooks)", *spent)
