"""Where the hours of a run went, and how fast its steps are."""

import logging

from hooktrain.engine.hook_base import HookBase
from hooktrain.events import JSONWriter
from hooktrain.utils.logger import pretty_seconds

logger = logging.getLogger(__name__)


class Hours(HookBase):
    """Logs at the end on what a run has spent its time, also before it was killed and resumed.

    The trainer's clock counts the parts, and each checkpoint has them:

    - ``step``: the iterations, with the wait for the device; ``data``: the part of them that waited
      for batches, by the metric ``data_time``;
    - ``evaluation`` and ``save``;
    - ``again``: the iterations that kills have taken back. They are those that ``metrics.json`` had
      rows of when the run was resumed, at the mean time of a step.

    A start that is killed before its first checkpoint leaves no trace.

    Given what an iteration does, it also records how much of that the steps do in a second::

        flops = 6 * parameters * tokens  # or counted: see the guide, "Speed and memory"
        Hours(samples_per_second=64, mfu=flops / (ranks * 989e12))

    A value belongs to the last iteration of a period (``gather_metric_period``), and is the mean
    over as many iterations before it. The first period has none.

    Args:
        rates: by the name of a metric, what an iteration of all ranks does. Names that contain
            ``second`` or ``mfu`` are not compared when a resume proves itself.
    """

    phase = "end"

    def __init__(self, **rates: float) -> None:
        self._rates = rates
        self._since = 0.0

    def before_train(self) -> None:
        """Count the iterations that are computed again."""
        start, clock = self.trainer.start_iter, self.trainer.clock
        hooks = self.trainer.hooks
        writers = [each for hook in hooks for each in getattr(hook, "writers", ())]
        for writer in writers:
            if start > 0 and isinstance(writer, JSONWriter) and writer.cut:
                again = writer.cut[-1]["iteration"] + 1 - start
                clock.pauses["again"] += again * clock.own / start
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
        clock = self.trainer.clock
        parts = {"step": clock.own, **clock.pauses}
        total = sum(parts.values())
        waits = self.trainer.storage.histories().get("data_time")
        if waits:
            parts["data"] = waits.global_avg() * waits.count
        for name, seconds in parts.items() if total > 0 else ():
            share = 100 * seconds / total
            logger.info("%s: %s, %.1f %%", name, pretty_seconds(seconds), share)
