"""Records how long the iterations take, and writes metrics in periods."""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from hooktrain.engine.hook_base import HookBase
from hooktrain.engine.preflight import log_parts
from hooktrain.events import EventWriter
from hooktrain.utils.file_io import AnyPath, is_disk_full
from hooktrain.utils.logger import pretty_seconds
from hooktrain.utils.names import as_list
from hooktrain.utils.periods import Period, PeriodLike

logger = logging.getLogger(__name__)

_NOT_WRITTEN = "%s: NOT WRITTEN: %r. It is tried again, at the latest by a resumed run"


class IterationTimer(HookBase):
    """Records the seconds of each iteration as ``time``, and logs at the end where the time went.

    It logs the trainer's clock: the seconds in steps, evaluations and saves, including those before
    the run was killed and resumed.

    Args:
        warmup_iter: the number of first iterations that are not recorded, since they are slower.
    """

    phase = "time"

    def __init__(self, warmup_iter: int = 3) -> None:
        self._warmup_iter = warmup_iter

    def after_step(self) -> None:
        """Record the time of the step."""
        trainer = self.trainer
        if trainer.done > self._warmup_iter:
            clock = trainer.clock
            trainer.storage.put_scalar(
                "time", clock.own - clock.begun, reproducible=False
            )

    def after_train(self) -> None:
        """Log where the time went."""
        clock = self.trainer.clock
        parts = {"steps": clock.own, **clock.pauses}
        texts = [f"{name} {pretty_seconds(each)}" for name, each in parts.items()]
        logger.info(
            "Total training time: %s for %d iterations (%s)",
            pretty_seconds(sum(parts.values())),
            self.trainer.done,
            ", ".join(texts),
        )


class PeriodicWriter(HookBase):
    """Calls writers every ``period`` iterations, in the last one, and after a successful run.

    It runs before a checkpoint is saved, so the files are complete up to each checkpoint. A run
    that fails does not write an unfinished period: the resumed run writes it whole. A full disk
    ends the run only if it is still full at the end. A writer that may fail
    (``EventWriter.may_fail``), such as a tracker's, never ends the run: each failure is logged,
    also at the end.

    Args:
        writers: the writers, called in order.
        period: in iterations, or like ``"1 epoch"``; 0 writes in the last iteration only. With
            several ranks, use a multiple of the trainer's ``gather_metric_period``, after which
            losses are known.

    Attributes:
        writers: the writers.
    """

    phase = "write"

    def __init__(self, writers: Sequence[EventWriter], period: PeriodLike = 20) -> None:
        self.writers = as_list(writers, EventWriter, "writers")
        self._period = Period(period)

    def before_train(self) -> None:
        """Log the parts of the model; rewind the writers to where the run starts."""
        if hasattr(self.trainer, "model"):
            log_parts(self.trainer.model)
        for writer in self.writers:
            writer.rewind(self.trainer.start_iter)

    def after_step(self) -> None:
        """Write if a period ends."""
        if self._period.is_due_or_last(self.trainer):
            for writer in self.writers:
                self._call(writer, writer.write)
            self.trainer.storage.written = self.trainer.iter

    def _call(self, writer: EventWriter, method: Callable[[], None]) -> None:
        """Call a method of a writer; log an error that does not end the run."""
        try:
            method()
        except Exception as error:
            is_fatal = self.trainer.succeeded or not is_disk_full(error)
            if is_fatal and not writer.may_fail:
                raise
            logger.error(_NOT_WRITTEN, type(writer).__name__, error)

    def run_files(self) -> list[AnyPath]:
        """The files of all writers."""
        return [path for writer in self.writers for path in writer.run_files()]

    def after_train(self) -> None:
        """Close all writers; after a successful run they first write the latest metrics."""
        # All are called even if one fails.
        with ExitStack() as stack:
            for writer in reversed(self.writers):
                stack.callback(self._call, writer, writer.close)
                if self.trainer.succeeded:
                    stack.callback(self._call, writer, writer.write)
