"""Lines about the state of the run, for people."""

import logging
import time

from hooktrain.events.storage import EventStorage, get_event_storage
from hooktrain.events.writer import EventWriter, UnwrittenScalars
from hooktrain.utils import comm
from hooktrain.utils.env import device_module
from hooktrain.utils.logger import pretty_seconds, setup_logger
from hooktrain.utils.names import is_loss

# In the order of a line, which has no details.
_LOSS, _OTHER, _TIME, _RATE, _DETAIL, _HIDDEN = range(6)
_RESULTS = (_LOSS, _OTHER, _DETAIL)  # what an evaluation may put


class CommonMetricPrinter(EventWriter):
    """Logs a line of losses, times and rates, and a line of each evaluation's results.

    Results are metrics that were put with ``smoothing_hint=False``. Of others, losses,
    those that contain ``[metric]`` and those without a ``/`` in their names are shown:
    medians, but of times means. The main process logs.

    The time that is left, ``eta_seconds``, includes evaluations and saves: it comes from
    the clock since the first line of this run.

    Args:
        max_iter: where the run ends. The hook ``PeriodicWriter`` sets it.
        window_size: how many iterations to smooth over, at least 1.

    Attributes:
        logger: what it logs to; a subclass may have another.
    """

    logger = logging.getLogger(__name__)

    def __init__(
        self,
        max_iter: int | None = None,
        window_size: int = 20,
    ) -> None:
        if not self.logger.hasHandlers():
            setup_logger(distributed_rank=comm.get_rank())
        self.max_iter = max_iter
        self._window_size = window_size
        self._unwritten = UnwrittenScalars("console", window_size)
        # The iteration and the clock at the first write.
        self._first_write: tuple[int, float] | None = None

    def write(self) -> None:
        """Log the lines."""
        if not comm.is_main_process():
            return
        storage = get_event_storage()
        found = self._unwritten.find(storage)
        end = self.max_iter or 0
        is_running = storage.iter < end
        if is_running:
            found.setdefault(storage.iter, {})  # a line also without metrics
        for iteration, metrics in found.items():
            step, results = self._fields(storage, metrics)
            where = f"iter: {iteration}"
            if is_running and iteration == storage.iter:
                eta = self._eta(storage, end)
                self._log(*eta, where, *step, *_memory())
            elif step:
                self._log(where, *step)
            if results:
                self._log(where, *results)
        self._unwritten.mark_written(storage, found)

    def rewind(self, iteration: int) -> None:
        """Go on after the last write, with a new clock."""
        self._first_write = None
        self._unwritten.resume(get_event_storage())

    def _log(self, *fields: str) -> None:
        self.logger.info("  ".join(fields))

    def _fields(
        self,
        storage: EventStorage,
        metrics: dict[str, float],
    ) -> tuple[list[str], list[str]]:
        """What to show of a step, and of an evaluation."""
        step: list[str] = []
        results: list[str] = []
        hints = storage.smoothing_hints()
        for name in sorted(metrics, key=_kind):
            kind = _kind(name)
            value = metrics[name]
            if kind == _TIME:
                history = storage.history(name)
                value = history.avg(self._window_size)
            text = f"{name}: {value:.4g}"
            if kind in _RESULTS and not hints[name]:
                results.append(text)
            elif kind < _DETAIL:
                step.append(text)
        return step, results

    def _eta(self, storage: EventStorage, end: int) -> list[str]:
        now = time.perf_counter()
        if self._first_write is None:
            self._first_write = (storage.iter, now)
        first, since = self._first_write
        left = end - storage.iter - 1
        if storage.iter > first:
            seconds = (now - since) / (storage.iter - first)
        elif "time" in storage.histories():
            seconds = storage.history("time").median(self._window_size)
        else:
            return []
        seconds *= left
        storage.put_scalar("eta_seconds", seconds, smoothing_hint=False)
        return [f"eta: {pretty_seconds(seconds)}"]


def _kind(name: str) -> int:
    if name in ("eta_seconds", "rank_data_time"):
        return _HIDDEN
    if name in ("time", "data_time"):
        return _TIME
    if name == "lr" or name.endswith(".lr"):
        return _RATE
    if is_loss(name):
        return _LOSS
    is_detail = "/" in name and "[metric]" not in name
    return _DETAIL if is_detail else _OTHER


def _memory() -> list[str]:
    """The accelerator's peak of allocated memory, if it has one."""
    peak = getattr(device_module(), "max_memory_allocated", None)
    if peak is None:
        return []
    megabytes = peak() / 2**20
    return [f"max_mem: {megabytes:.0f}M"]
