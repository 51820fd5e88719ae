"""The hooks of detectron2 that profile time and memory, beside the core's ``TorchProfiler``."""

import logging
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity

from hooktrain.engine.hooks import HookBase, TorchProfiler
from hooktrain.utils.env import device_module
from hooktrain.utils.periods import Period

logger = logging.getLogger(__name__)


class AutogradProfiler(TorchProfiler):
    """A :class:`TorchProfiler` that writes for the browser.

    Args:
        enable_predicate: see :class:`TorchProfiler`.
        output_dir: the folder to write to.
        use_cuda: whether to profile the accelerator too, if there is one.
    """

    def __init__(
        self,
        enable_predicate: Callable[[Any], bool],
        output_dir: str,
        *,
        use_cuda: bool = True,
    ) -> None:
        activities = None if use_cuda else [ProfilerActivity.CPU]
        super().__init__(
            enable_predicate, output_dir, activities=activities, save_tensorboard=False
        )


_SHOWN = (
    "max_memory_reserved",
    "memory_reserved",
    "max_memory_allocated",
    "memory_allocated",
)


class TorchMemoryStats(HookBase):
    """Logs memory reserved and allocated, and their peaks since the last time.

    It does so ``max_runs`` times in a run. Without an accelerator it does nothing.

    Args:
        period: in iterations, or like ``"1 epoch"``; 0 logs at the last one only.
        max_runs: how many times to log.
    """

    def __init__(self, period: int | str = 20, max_runs: int = 10) -> None:
        self._period = Period(period)
        self._max_runs = max_runs

    def before_train(self) -> None:
        """Start counting."""
        self._runs = 0

    def after_step(self) -> None:
        """Log where a period ends, and at the last iteration."""
        device = device_module()
        is_due = self._period.is_due_or_last(self.trainer)
        if device is None or self._runs == self._max_runs or not is_due:
            return
        self._runs += 1
        sizes = [f"{name}: {getattr(device, name)() >> 20} MiB" for name in _SHOWN]
        logger.info("iter: %d  %s", self.trainer.iter, "  ".join(sizes))
        device.reset_peak_memory_stats()
