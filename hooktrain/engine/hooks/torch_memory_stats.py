"""Logs the memory that the accelerator's allocator holds."""

import logging

from hooktrain.engine.train_loop import HookBase
from hooktrain.utils.env import device_module

logger = logging.getLogger(__name__)

_SHOWN = ("max_memory_reserved", "memory_reserved", "max_memory_allocated", "memory_allocated")


class TorchMemoryStats(HookBase):
    """Logs memory reserved and allocated, and their peaks since the last time.

    It does so ``max_runs`` times in a run, the last time with the allocator's summary. Without an
    accelerator it does nothing.

    Args:
        period: in iterations, or like ``"1 epoch"``; 0 or less logs at the last one only.
        max_runs: how many times to log.
    """

    def __init__(self, period: int | str = 20, max_runs: int = 10) -> None:
        self._period = period
        self._max_runs = max_runs

    def before_train(self) -> None:
        """Start counting."""
        self._runs = 0

    def after_step(self) -> None:
        """Log where a period ends, and at the last iteration."""
        device = device_module()
        if device is None or not self.is_due(self._period) or self._runs == self._max_runs:
            return
        self._runs += 1
        sizes = [getattr(device, function)() / 2**20 for function in _SHOWN]
        text = " iter: %d  max_reserved_mem: %.0fMB  reserved_mem: %.0fMB"
        text += "  max_allocated_mem: %.0fMB  allocated_mem: %.0fMB"
        logger.info(text, self.trainer.iter, *sizes)
        if self._runs == self._max_runs:
            logger.info("\n%s", device.memory_summary())
        device.reset_peak_memory_stats()
