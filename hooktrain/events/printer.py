"""Logs lines about the state of the run, for people to read."""

import logging
import time
from functools import cache

from hooktrain.events.storage import EventStorage
from hooktrain.events.writer import TIMES, Metrics, ScalarWriter
from hooktrain.utils.env import device_module
from hooktrain.utils.logger import pretty_seconds, setup_logger
from hooktrain.utils.names import Numbers, is_loss


class CommonMetricPrinter(ScalarWriter):
    """Logs a line of losses, metrics, times and rates, on the main process only.

    It leaves out smoothed metrics with a ``/`` in their names, except losses and names with
    ``[metric]``. Evaluation results have separate lines.

    The remaining time, ``eta_seconds``, is estimated from the time since the run's first line, so
    it includes evaluations and saves.

    Args:
        max_iter: the iteration at which the run ends, exclusive, if the storage does not know it.
        window_size: how many iterations to smooth over, at least 1.

    Attributes:
        logger: the logger of the lines; a subclass may have another.
    """

    logger = logging.getLogger(__name__)

    def __init__(self, max_iter: int | None = None, window_size: int = 20) -> None:
        if not self.logger.hasHandlers():
            setup_logger()
        super().__init__("console", window_size)
        self.max_iter = max_iter
        # The iteration and the clock at the first write.
        self._first_write: tuple[int, float] | None = None

    def write_scalars(self, storage: EventStorage, scalars: Metrics) -> None:
        """Log the lines."""
        end = storage.max_iter or self.max_iter or 0
        is_running = storage.iter < end
        if is_running:  # a line without metrics still has the ETA
            scalars.setdefault(storage.iter, {})
        for iteration, metrics in scalars.items():
            fields, results = self._fields(storage, metrics)
            head = f"iter: {iteration}"
            for result in results:
                self.logger.info("%s  %s", head, result)
            line = [head, *fields]
            if is_running and iteration == storage.iter:
                line = [*self._eta(storage, end), *line, *_memory()]
            elif not fields:
                continue
            self.logger.info("  ".join(line))

    def rewind(self, iteration: int) -> None:
        """Continue after the last write, with a new clock."""
        self._first_write = None
        super().rewind(iteration)

    def _fields(
        self, storage: EventStorage, metrics: Numbers
    ) -> tuple[list[str], list[str]]:
        """The texts to show: of training metrics, and of evaluation results."""
        hints = storage.smoothing_hints()
        fields: list[str] = []
        results: list[str] = []
        for name in sorted(metrics, key=_place):
            is_result = "/" in name and not hints[name]
            is_shown = "/" not in name or "[metric]" in name or is_loss(name)
            if name == "eta_seconds" or not (is_result or is_shown):
                continue
            kind = results if is_result else fields
            kind.append(f"{name}: {metrics[name]:.4g}")
        return fields, results

    def _eta(self, storage: EventStorage, end: int) -> list[str]:
        now = time.perf_counter()
        self._first_write = self._first_write or (storage.iter, now)
        first, since = self._first_write
        if storage.iter == first:
            return []
        mean = (now - since) / (storage.iter - first)
        seconds = mean * (end - storage.iter - 1)
        storage.put_scalar("eta_seconds", seconds, smoothing_hint=False)
        return [f"eta: {pretty_seconds(seconds)}"]


@cache  # each line has the same names
def _place(name: str) -> int:
    """The place of a metric in a line: losses come first, then others, times, learning rates."""
    if is_loss(name):
        return 0
    if name in TIMES:
        return 2 + TIMES.index(name)
    return 4 if f".{name}".endswith(".lr") else 1


def _memory() -> list[str]:
    """The accelerator's peak of allocated memory, if it has one."""
    peak = getattr(device_module(), "max_memory_allocated", None)
    if peak is None:
        return []
    megabytes = peak() / 2**20
    return [f"max_mem: {megabytes:.0f}M"]
