"""Profiles chosen iterations."""

import logging
from collections.abc import Callable, Iterable
from operator import methodcaller
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, tensorboard_trace_handler

from hooktrain.engine.train_loop import HookBase
from hooktrain.utils import comm
from hooktrain.utils.env import device_module
from hooktrain.utils.periods import Period

logger = logging.getLogger(__name__)


class TorchProfiler(HookBase):
    """Runs :class:`torch.profiler.profile` in the iterations that a predicate chooses.

    Each profiled iteration gives one trace in the output folder, for TensorBoard
    ``log/profiler-tensorboard-iter{i}``, or for a browser's ``chrome://tracing``
    ``profiler-trace-iter{i}.json``. The name contains the rank where there are several. For
    example iterations 10 to 19 of the run:
    ``TorchProfiler(lambda trainer: 10 <= trainer.iter < 20, output_dir)``.

    Args:
        enable_predicate: called with the trainer before each step; true means to profile it.
        output_dir: the folder to write to.
        activities: see the profiler; None takes the CPU, and the accelerator if there is one.
        save_tensorboard: which of the two formats to write.
    """

    def __init__(
        self,
        enable_predicate: Callable[[Any], bool],
        output_dir: str,
        *,
        activities: Iterable[ProfilerActivity] | None = None,
        save_tensorboard: bool = True,
    ) -> None:
        self._enable_predicate = enable_predicate
        self._output_dir = Path(output_dir)
        self._activities = activities
        self._save_tensorboard = save_tensorboard
        self._profiler: profile | None = None

    def before_step(self) -> None:
        """Start the profiler if this iteration is chosen."""
        if not self._enable_predicate(self.trainer):
            return
        iteration = self.trainer.iter
        rank = comm.get_rank()
        if self._save_tensorboard:
            folder = self._output_dir / "log" / f"profiler-tensorboard-iter{iteration}"
            write = tensorboard_trace_handler(str(folder), worker_name=f"worker{rank}")
        else:
            self._output_dir.mkdir(parents=True, exist_ok=True)
            suffix = f".rank{rank}" if comm.get_world_size() > 1 else ""
            path = self._output_dir / f"profiler-trace-iter{iteration}{suffix}.json"
            write = methodcaller("export_chrome_trace", str(path))
        self._profiler = profile(
            activities=self._activities,
            record_shapes=True,
            profile_memory=True,
            with_stack=True,
            with_flops=True,
            on_trace_ready=write,
        )
        self._profiler.start()

    def after_step(self) -> None:
        """Stop the profiler, which writes what it saw."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()

    def after_train(self) -> None:
        """Stop a profiler that a failing step left running."""
        self.after_step()


class AutogradProfiler(TorchProfiler):
    """A :class:`TorchProfiler` that writes for the browser, for scripts that use it already.

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
        is_due = self.trainer.is_last or self._period.is_due(self.trainer)
        if device is None or self._runs == self._max_runs or not is_due:
            return
        self._runs += 1
        sizes = []
        for name in _SHOWN:
            size = getattr(device, name)()
            sizes.append(f"{name}: {size >> 20} MiB")
        logger.info("iter: %d  %s", self.trainer.iter, "  ".join(sizes))
        device.reset_peak_memory_stats()
