"""How long the iterations take, how far the run is, and what the hooks cost."""

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack

from hooktrain.engine.train_loop import HookBase
from hooktrain.events import CommonMetricPrinter, EventWriter
from hooktrain.utils import comm
from hooktrain.utils.epochs import in_iterations
from hooktrain.utils.file_io import is_disk_full
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
        self._is_watched = show_progress(
            "Training", self._storage.iter, self.trainer.max_iter
        )

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
            eta = (
                (now - self._timed_start) / self._timed * left if self._timed else None
            )
            show_progress("Training", storage.iter + 1, self.trainer.max_iter, eta)

    def after_train(self) -> None:
        """Log the speed of the whole run."""
        now = time.perf_counter()
        if self._timed:
            seconds, count = self._steps_seconds, self._timed
            message = "Overall training speed: %d iterations in %s (%.4f s / it)"
            logger.info(message, count, pretty_seconds(seconds), seconds / count)
        total, hooks = (
            now - self._run_start,
            now - self._timed_start - self._steps_seconds,
        )
        spent = pretty_seconds(total), pretty_seconds(hooks)
        logger.info("Total training time: %s (%s on hooks)", *spent)


class PeriodicWriter(HookBase):
    """Lets writers write every ``period`` iterations, at the last one, and at a good end.

    Register it after the hooks whose metrics it writes, and before the checkpointer: then
    the files are complete up to each checkpoint, and a resumed run continues them seamlessly. A
    run that fails or is preempted writes no part of a period: the one that goes on writes it whole.

    A full disk is logged and does not end the run, unless it is still full at the end.

    Args:
        writers: the writers, called in order.
        period: in iterations, or like ``"1 epoch"``; 0 or less writes at the last one only. With
            several ranks a multiple of the trainer's ``gather_metric_period``, since losses cannot
            be read in between.
    """

    def __init__(self, writers: Sequence[EventWriter], period: int | str = 20) -> None:
        self._writers = list(writers)
        self._period = period
        printers = [
            writer
            for writer in self._writers
            if isinstance(writer, CommonMetricPrinter)
        ]
        self._printers = [printer for printer in printers if printer.max_iter is None]

    def before_train(self) -> None:
        """Make the writers forget what lies after the state that the run starts from."""
        for printer in self._printers:
            printer.max_iter = self.trainer.max_iter
        for writer in self._writers:
            writer.rewind(self.trainer.start_iter)
        period = in_iterations(self._period, self.trainer.epoch_length)
        if comm.get_world_size() > 1 and period % self.trainer.sync_period:
            text = "Metrics are written every %d iterations, but the ranks bring theirs together "
            text += "every %d: the lines in between have no losses. Set gather_metric_period"
            logger.warning(text, period, self.trainer.sync_period)

    def after_step(self) -> None:
        """Write where a period ends."""
        if not self.is_due(self._period):
            return
        for writer in self._writers:
            try:
                writer.write()
            except OSError as error:
                if not is_disk_full(error):
                    raise
                text = "%s: NOT WRITTEN: %s. Training goes on and tries again"
                logger.error(text, type(writer).__name__, error)

    def after_train(self) -> None:
        """Close every writer; after a good end write what came last, as the final evaluation."""
        # Calls them all, whatever they raise.
        with ExitStack() as last_first:
            for writer in reversed(self._writers):
                last_first.callback(writer.close)
                if self.trainer.succeeded:
                    last_first.callback(writer.write)
