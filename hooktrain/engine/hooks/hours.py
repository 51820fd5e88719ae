"""Where the hours of a run went."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hooktrain.engine.train_loop import HookBase
from hooktrain.events import JSONWriter
from hooktrain.utils.logger import pretty_seconds

logger = logging.getLogger(__name__)


class Hours(HookBase):
    """Logs at the end on what a run has spent its time, also before it was killed and resumed.

    The parts are sums of metrics, so each checkpoint has them:

    - ``time`` of the steps, by :class:`IterationTimer`, and ``data_time`` within it;
    - ``evaluation_time`` and ``save_time``, which other hooks record if this one is registered;
    - ``again_time`` of iterations that kills have taken back: those that ``metrics.json`` had rows
      of when the run was resumed, at the mean time of a step.

    A start that is killed before its first checkpoint leaves no trace. Register it last.
    """

    def before_train(self) -> None:
        """Record the time of the steps that are computed again."""
        storage = self.trainer.storage
        steps = storage.histories().get("time")
        for writer in storage.writers.values():
            if steps and isinstance(writer, JSONWriter) and writer.cut:
                again = writer.cut[-1]["iteration"] + 1 - self.trainer.start_iter
                storage.put_scalar("again_time", again * steps.global_avg())
                return

    def after_train(self) -> None:
        """Log the parts."""
        histories = self.trainer.storage.histories()
        sums = {
            name: each.global_avg() * each.count for name, each in histories.items()
        }
        parts = ("time", "evaluation_time", "save_time", "again_time")
        total = sum(sums.get(name, 0.0) for name in parts)
        for name in (*parts, "data_time"):
            if total and name in sums:
                seconds = sums[name]
                text = pretty_seconds(seconds)
                logger.info("%s: %s, %.1f %%", name, text, 100 * seconds / total)


@contextmanager
def spent(trainer: Any, name: str) -> Iterator[None]:
    """Record the time inside of this as a metric, if a trainer has the hook :class:`Hours`.

    Args:
        trainer: the trainer, or None.
        name: the metric.
    """
    hooks = trainer.hooks if trainer else ()
    counts = any(isinstance(hook, Hours) for hook in hooks)
    start = counts and trainer.clock.read()
    yield
    if counts:
        trainer.storage.put_scalar(name, trainer.clock.read() - start)
