"""Writes metrics to the console and to files."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack

from hooktrain.engine.train_loop import HookBase
from hooktrain.utils import comm
from hooktrain.utils.epochs import in_iterations
from hooktrain.utils.events import CommonMetricPrinter, EventWriter
from hooktrain.utils.file_io import is_disk_full

logger = logging.getLogger(__name__)


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
        printers = [writer for writer in self._writers if isinstance(writer, CommonMetricPrinter)]
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
        with self.trainer.storage.writing():
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
        with self.trainer.storage.writing(), ExitStack() as last_first:
            for writer in reversed(self._writers):
                last_first.callback(writer.close)
                if self.trainer.succeeded:
                    last_first.callback(writer.write)
