"""Names the ranks that the others wait for."""

import logging
import time
from collections import Counter
from statistics import median_low
from typing import Any

import torch

from hooktrain.engine.train_loop import HookBase
from hooktrain.model.wrappers import unwrap_model
from hooktrain.utils import comm

logger = logging.getLogger(__name__)


class Stragglers(HookBase):
    """Warns when one rank is slower than the others for a while, as by a failing device or disk.

    All ranks take as long for an iteration as the slowest, since they exchange gradients. What
    tells them apart is the time before that: the wait for data and the forward pass. At the end of
    each period (``trainer.sync_period``) the ranks exchange it, by one sum of two numbers a rank.

    The forward pass is that of the model's own ``forward``; on an accelerator its time is the
    device's. Where ranks meet in it (a sharded model, batch norms over all ranks), the wait for
    the slowest counts for all.

    Args:
        factor: a rank is slow if it takes longer than the median of the ranks times ``factor``.
        patience: for how many periods in a row a rank must be slow, at least 1.
    """

    needs_every_rank = True

    def __init__(self, factor: float = 1.5, patience: int = 3) -> None:
        self._factor = factor
        self._patience = patience
        self._slow: Counter[int] = Counter()
        self._starts: list[
            Any
        ] = []  # of the forward passes of the period, and their ends
        self._ends: list[Any] = []
        self._handles: list[Any] = []

    def before_train(self) -> None:
        """Time the model's forward passes from now on, if there are several ranks."""
        if comm.get_world_size() == 1:
            return
        model = unwrap_model(self.trainer.model)
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._handles = [
            model.register_forward_pre_hook(
                lambda *_: self._starts.append(self._now())
            ),
            model.register_forward_hook(lambda *_: self._ends.append(self._now())),
        ]

    def after_step(self) -> None:
        """At the end of a period, compare the ranks."""
        period = self.trainer.sync_period
        if not self._handles or not self.is_due(period, at_end=None):
            return
        waits = self.trainer.storage.history("rank_data_time").tail(period)
        forward = sum(map(self._seconds, self._starts, self._ends))
        self._starts.clear()
        self._ends.clear()
        table = torch.zeros(comm.get_world_size(), 2, dtype=torch.float64)
        table[comm.get_rank()] = torch.tensor(
            [sum(seconds for seconds, _ in waits), forward]
        )
        rows = (comm.all_reduce(table) / period).tolist()
        usual = median_low(map(sum, rows))
        for rank, (wait, forward) in enumerate(rows):
            is_slow = wait + forward > self._factor * usual
            self._slow[rank] = self._slow[rank] + 1 if is_slow else 0
            if (
                is_slow
                and self._slow[rank] % self._patience == 0
                and comm.is_main_process()
            ):
                text = "The others wait for rank %d: an iteration takes it %.4f s for data and "
                text += "%.4f s for the forward pass, where %.4f s for both are usual"
                logger.warning(text, rank, wait, forward, usual)

    def after_train(self) -> None:
        """Stop timing."""
        for handle in self._handles:
            handle.remove()

    def _now(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def _seconds(self, start: Any, end: Any) -> float:
        if self._device.type == "cpu":
            return float(end - start)
        end.synchronize()  # host-device synchronisation, at the end of a period
        return float(start.elapsed_time(end)) / 1000
