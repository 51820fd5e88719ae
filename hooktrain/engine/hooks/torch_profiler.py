"""Profiles chosen iterations."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerActivity, profile, tensorboard_trace_handler

from hooktrain.engine.train_loop import HookBase
from hooktrain.utils import comm


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
        self._profiler: Any = None

    def before_step(self) -> None:
        """Start the profiler if this iteration is chosen."""
        if self._enable_predicate(self.trainer):
            self._profiler = self._make_profiler()
            self._profiler.__enter__()

    def _make_profiler(self) -> Any:
        handler = None
        if self._save_tensorboard:
            folder = self._output_dir / "log" / f"profiler-tensorboard-iter{self.trainer.iter}"
            handler = tensorboard_trace_handler(str(folder), worker_name=f"worker{comm.get_rank()}")
        return profile(
            activities=self._activities,
            record_shapes=True,
            profile_memory=True,
            with_stack=True,
            with_flops=True,
            on_trace_ready=handler,
        )

    def after_step(self) -> None:
        """Stop the profiler and write what it saw."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.__exit__(None, None, None)
        if not self._save_tensorboard:
            self._output_dir.mkdir(parents=True, exist_ok=True)
            suffix = f".rank{comm.get_rank()}" if comm.get_world_size() > 1 else ""
            name = f"profiler-trace-iter{self.trainer.iter}{suffix}.json"
            profiler.export_chrome_trace(str(self._output_dir / name))

    def after_train(self) -> None:
        """Stop a profiler that a failing step left running."""
        self.after_step()


class AutogradProfiler(TorchProfiler):
    """Runs the older :class:`torch.autograd.profiler.profile`, for scripts that use it already.

    It writes ``profiler-trace-iter{i}.json``.

    Args:
        enable_predicate: see :class:`TorchProfiler`.
        output_dir: the folder to write to.
        use_cuda: whether to time CUDA's kernels too, if there is a CUDA device.
    """

    def __init__(
        self, enable_predicate: Callable[[Any], bool], output_dir: str, *, use_cuda: bool = True
    ) -> None:
        super().__init__(enable_predicate, output_dir, save_tensorboard=False)
        self._use_device = "cuda" if use_cuda and torch.cuda.is_available() else None

    def _make_profiler(self) -> Any:
        return autograd_profiler.profile(use_device=self._use_device)
