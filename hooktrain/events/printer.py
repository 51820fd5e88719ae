"""Lines about the state of the run, for people."""

import logging
import math
import re
import time
from statistics import fmean

from hooktrain.events.storage import EventStorage, get_event_storage
from hooktrain.events.writer import EventWriter, UnwrittenScalars
from hooktrain.utils import comm
from hooktrain.utils.env import device_module
from hooktrain.utils.logger import pretty_seconds, setup_logger

# A word of the name's last part that is or ends in "loss": total_loss, loss1, rpn/loss_box, lossG,
# but neither glossy nor lossless_ratio.
_LOSS = re.compile(r"[lL]oss(es)?(?![a-z])[^/]*$")
_FOR_FILES = ("eta_seconds", "rank_data_time")
_LOSSES, _MARKED, _OTHERS, _TIME, _DATA_TIME, _RATES = range(6)  # the order in a line


class CommonMetricPrinter(EventWriter):
    """Logs what is new: a line of losses, times and rates, and one of each evaluation's results.

    Every result of an evaluation is shown, and whatever else was put with ``smoothing_hint=False``.
    Of other metrics, those whose names say that they are a loss (``rpn/loss_box``) or contain
    ``[metric]``, and those without a ``/`` in their names, such as ``grad_norm``; the rest is for
    the files. The only loss in ``total_loss`` is not shown again, and a ``data_time`` of less than
    a third of ``time`` not at all. The main process logs, the others do not. If nobody has set up
    logging, :func:`~hooktrain.utils.logger.setup_logger` is called.

    The time that is left comes from the clock: what an iteration has taken since the first line of
    this run, with everything around it, such as evaluations and saves. In the first line it comes
    from ``time``, if there is that. It is put into the storage as ``eta_seconds``.

    Args:
        max_iter: where the run ends, for the time that is left. None asks the trainer, where the
            hook ``PeriodicWriter`` writes.
        window_size: losses and the like are medians, times are means, over so many iterations.

    Attributes:
        logger: what it logs to; a subclass may have another.
    """

    logger = logging.getLogger(__name__)

    def __init__(self, max_iter: int | None = None, window_size: int = 20) -> None:
        if not self.logger.hasHandlers() and not logging.getLogger("hooktrain").level:
            setup_logger(distributed_rank=comm.get_rank())
        self.max_iter = max_iter
        self._window_size = window_size
        self._unwritten = UnwrittenScalars(window_size)
        # The iteration and the clock at the first write.
        self._first_write: tuple[int, float] | None = None
        self._peak = ""

    def write(self) -> None:
        """Log the lines."""
        storage = get_event_storage()
        if not comm.is_main_process():
            return
        # A line for an iteration, and one for the results of its evaluation.
        lines: dict[tuple[int, bool], dict[str, str]] = {}
        end, eta = self.max_iter or 0, ""
        if storage.iter < end:
            lines[storage.iter, False] = {}  # also without metrics
            eta = self._get_eta(storage, end)
        histories = storage.histories()
        for name, value, iteration in self._unwritten.find(storage):
            kind, smoothed = _kind(name), histories[name].smoothing_hint
            if name in _FOR_FILES or (smoothed and kind == _OTHERS and "/" in name):
                continue
            if kind in (_TIME, _DATA_TIME):
                value = fmean(histories[name].recent(self._window_size))
            line = lines.setdefault((iteration, not smoothed and kind < _TIME), {})
            line[name] = f"{value:.4g}" if kind < _TIME else f"{value:.3g}"
        self._unwritten.mark_written()
        storage.written["console"] = storage.iter + 1
        for (iteration, is_result), texts in sorted(lines.items()):
            fields = [f"iter: {iteration}", *_fields(texts)]
            if iteration == storage.iter and not is_result:
                fields = [*([f"eta: {eta}"] if eta else []), *fields, *self._new_peak()]
            self.logger.info("  ".join(fields))

    def rewind(self, iteration: int) -> None:
        """Forget the clock: the time between two runs says nothing about either."""
        self._first_write = None
        storage = get_event_storage()
        self._unwritten.skip(storage, storage.written.get("console", 0))

    def _get_eta(self, storage: EventStorage, end: int) -> str:
        now, left = time.perf_counter(), end - storage.iter - 1
        self._first_write = self._first_write or (storage.iter, now)
        first, since = self._first_write
        if storage.iter > first:
            seconds = (now - since) / (storage.iter - first) * left
        elif "time" in storage.histories():
            seconds = storage.history("time").recent_median(self._window_size) * left
        else:
            return ""
        storage.put_scalar("eta_seconds", seconds, smoothing_hint=False)
        return pretty_seconds(seconds)

    def _new_peak(self) -> list[str]:
        """The most memory that the accelerator has lent to tensors, if it tells and that grew."""
        peak = getattr(device_module(), "max_memory_allocated", None)
        before, self._peak = (
            self._peak,
            f"max_mem: {peak() / 2**20:.0f}M" if peak else "",
        )
        return [self._peak] if self._peak != before else []


def _kind(name: str) -> int:
    if name in ("time", "data_time"):
        return _TIME if name == "time" else _DATA_TIME
    if name == "lr" or name.endswith(".lr"):
        return _RATES
    if "[metric]" in name:
        return _MARKED
    return _LOSSES if _LOSS.search(name) else _OTHERS


def _fields(texts: dict[str, str]) -> list[str]:
    names = sorted(texts, key=_kind)
    losses = [name for name in names if _kind(name) == _LOSSES]
    if (
        losses[:1] == ["total_loss"]
        and len(losses) == 2
        and len({*map(texts.get, losses)}) == 1
    ):
        names.remove(losses[1])
    if float(texts.get("data_time", math.inf)) < float(texts.get("time", 0)) / 3:
        names.remove("data_time")
    units = {_TIME: " s", _DATA_TIME: " s"}
    return [f"{name}: {texts[name]}{units.get(_kind(name), '')}" for name in names]
