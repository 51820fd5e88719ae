"""One line about the state of the run, for people."""

import logging
import re
import time
from collections.abc import Mapping
from datetime import timedelta

from hooktrain.utils import comm
from hooktrain.utils.env import device_module
from hooktrain.utils.events.history import HistoryBuffer
from hooktrain.utils.events.storage import EventStorage, get_event_storage
from hooktrain.utils.events.writer import EventWriter

# A word of the name's last part that is or ends in "loss": total_loss, loss1, rpn/loss_box, lossG,
# but neither glossy nor lossless_ratio.
_LOSS = re.compile(r"[lL]oss(es)?(?![a-z])[^/]*$")


class CommonMetricPrinter(EventWriter):
    """Logs the iteration, losses, times, learning rate and memory in one line.

    These are the metrics whose names say that they are a loss (``total_loss``, ``rpn/loss_box``)
    or contain ``[metric]``, and those called ``time``, ``data_time`` and ``lr``, or with several
    optimizers ``generator.lr`` and the like. For others, write a printer of your own. The main
    process logs, the others do not.

    The time that is left is estimated from the median of the last ``time``, and put into the
    storage as ``eta_seconds``. Without ``time`` it comes from the clock, between two writes.

    Args:
        max_iter: where the run ends, for the time that is left; nothing is logged from there on.
        window_size: losses are medians, ``data_time`` the mean, over so many iterations.

    Attributes:
        logger: what it logs to; a subclass may have another.
    """

    logger = logging.getLogger(__name__)

    def __init__(self, max_iter: int | None = None, window_size: int = 20) -> None:
        self._max_iter = max_iter
        self._window_size = window_size
        # The iteration and the clock at the last write.
        self._last_write: tuple[int, float] | None = None

    def write(self) -> None:
        """Log the line."""
        storage = get_event_storage()
        ended = self._max_iter is not None and storage.iter >= self._max_iter
        if ended or not comm.is_main_process():
            return
        histories = storage.histories()
        losses: list[str] = []
        others: list[str] = []
        rates: list[str] = []
        for name, history in histories.items():
            if name == "lr" or name.endswith(".lr"):
                rates.append(f"{name}: {history.latest():.5g}")
            elif (other := "[metric]" in name) or _LOSS.search(name):
                median = f"{name}: {history.recent_median(self._window_size):.4g}"
                (others if other else losses).append(median)
        eta = self._get_eta(storage)
        self.logger.info(
            f" {eta and f'eta: {eta}  '}iter: {storage.iter}"
            f"  {'  '.join(losses)}  {'  '.join(others)}"
            f"  {self._times(histories)} {'  '.join(rates) or 'lr: N/A'}  {_peak_memory()}"
        )

    def rewind(self, iteration: int) -> None:
        """Forget the clock: the time between two runs says nothing about either."""
        self._last_write = None

    def _times(self, histories: Mapping[str, HistoryBuffer]) -> str:
        text = ""
        if (history := histories.get("time")) is not None:
            text += f"time: {history.global_avg():.4f}  last_time: {history.latest():.4f}  "
        if (history := histories.get("data_time")) is not None:
            mean = history.avg(self._window_size)
            text += f"data_time: {mean:.4f}  last_data_time: {history.latest():.4f}  "
        return text

    def _get_eta(self, storage: EventStorage) -> str:
        if self._max_iter is None:
            return ""
        left, histories = self._max_iter - storage.iter - 1, storage.histories()
        if "time" in histories:
            seconds = histories["time"].recent_median(self._window_size) * left
            storage.put_scalar("eta_seconds", seconds, smoothing_hint=False)
        else:
            now = time.perf_counter()
            last, self._last_write = self._last_write, (storage.iter, now)
            if last is None or storage.iter <= last[0]:
                return ""
            seconds = (now - last[1]) / (storage.iter - last[0]) * left
        return str(timedelta(seconds=int(seconds)))


def _peak_memory() -> str:
    """The most memory that tensors have taken on the current accelerator, if it tells."""
    peak = getattr(device_module(), "max_memory_allocated", None)
    return f"max_mem: {peak() / 2**20:.0f}M" if peak else ""
