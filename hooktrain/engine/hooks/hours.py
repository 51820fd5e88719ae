"""Where the hours of a run went, and how fast its steps are."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hooktrain.engine.hook_base import HookBase
from hooktrain.events import JSONWriter
from hooktrain.utils.logger import pretty_seconds

logger = logging.getLogger(__name__)

# The metrics whose sums are told. "data_time" is a part of "time".
_PARTS = ("time", "data_time", "evaluation_time", "save_time", "again_time")


class Hours(HookBase):
    """Logs at the end on what a run has spent its time, also before it was killed and resumed.

    The parts are sums of metrics, so each checkpoint has them:

    - ``time`` of the steps, by :class:`IterationTimer`, and ``data_time`` within it;
    - ``evaluation_time`` and ``save_time``, which other hooks record if this one is registered;
    - ``again_time`` of iterations that kills have taken back: those that ``metrics.json`` had rows
      of when the run was resumed, at the mean time of a step.

    A start that is killed before its first checkpoint leaves no trace. Register it last.

    Given what an iteration does, it also records how much of that the steps do in a second::

        flops = 6 * parameters * tokens  # or counted: see the guide, "Speed and memory"
        Hours(samples_per_second=64, mfu=flops / (ranks * 989e12))

    A value belongs to the last iteration of a period (``gather_metric_period``), and is the mean
    over as many iterations before it. The first period has none.

    Args:
        rates: by the name of a metric, what an iteration of all ranks does. Names that contain
            ``second`` or ``mfu`` are not compared when a resume proves itself.
    """

    def __init__(self, **rates: float) -> None:
        self._rates = rates
        self._since = 0.0

    def before_train(self) -> None:
        """Record the time of the steps that are computed again."""
        storage = self.trainer.storage
        steps = storage.histories().get("time")
        for writer in storage.writers.values():
            if steps and isinstance(writer, JSONWriter) and writer.cut:
                again = writer.cut[-1]["iteration"] + 1 - self.trainer.start_iter
                storage.put_scalar("again_time", again * steps.global_avg())
                return

    def before_step(self) -> None:
        """Record the rates where a period ends, so that writers write them after this step."""
        trainer = self.trainer
        if not trainer.ends_period:
            return
        period, now = trainer.sync_period, trainer.clock.own
        if trainer.iter >= trainer.start_iter + period:
            for name, amount in self._rates.items():
                rate = amount * period / (now - self._since)
                trainer.storage.put_scalar(name, rate)
        self._since = now

    def after_train(self) -> None:
        """Log the parts."""
        seconds = {}
        for name, history in self.trainer.storage.histories().items():
            if name in _PARTS:
                seconds[name] = history.global_avg() * history.count
        total = sum(seconds.values()) - seconds.get("data_time", 0.0)
        if total > 0:
            for name, each in seconds.items():
                share = 100 * each / total
                logger.info("%s: %s, %.1f %%", name, pretty_seconds(each), share)


@contextmanager
def spent(trainer: Any, name: str) -> Iterator[None]:
    """Record the time inside of this as a metric, if a trainer has the hook :class:`Hours`.

    Args:
        trainer: the trainer, or None.
        name: the metric.
    """
    counts = trainer and any(isinstance(hook, Hours) for hook in trainer.hooks)
    start = counts and trainer.clock.read()
    yield
    if counts:
        trainer.storage.put_scalar(name, trainer.clock.read() - start)
