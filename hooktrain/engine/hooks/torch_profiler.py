"""Profiles chosen iterations with torch.profiler."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, tensorboard_trace_handler

from hooktrain.engine.train_loop import HookBase
from hooktrain.utils import comm

__all__ = ["TorchProfiler"]


class TorchProfiler(HookBase):
    """Runs :class:`torch.profiler.profile` in those iterations that a predicate chooses.

    Each profiled iteration gives a trace of its own: ``log/profiler-tensorboard-iter{i}`` for
    TensorBoard, or ``profiler-trace-iter{i}.json`` for a browser's ``chrome://tracing``, in the
    output folder, with the rank in the name where there are several. For example iterations 10 to
    19 of the run: ``TorchProfiler(lambda trainer: 10 <= trainer.iter < 20, output_dir)``.

    Args:
        enable_predicate: given the trainer before each step; true means to profile it.
        output_dir: the folder to write to.
        activities: see the profiler; None takes the CPU, and CUDA if there is one.
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
        activities = self._activities
        if activities is None:
            cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            activities = [ProfilerActivity.CPU, *cuda]
        return profile(
            activities=activities,
            record_shapes=True,
            profile_memory=True,
            with_stack=True,
            with_flops=True,
            on_trace_ready=self._write(self.trainer.iter),
        )

    def _write(self, iteration: int) -> Callable[[Any], None]:
        rank = comm.get_rank()
        if self._save_tensorboard:
            folder = self._output_dir / "log" / f"profiler-tensorboard-iter{iteration}"
            handler: Callable[[Any], None] = tensorboard_trace_handler(
                str(folder), worker_name=f"worker{rank}"
            )
            return handler
        suffix = f".rank{rank}" if comm.get_world_size() > 1 else ""
        path = self._output_dir / f"profiler-trace-iter{iteration}{suffix}.json"
        self._output_dir.mkdir(parents=True, exist_ok=True)
        return lambda profiler: profiler.export_chrome_trace(str(path))

    def after_step(self) -> None:
        """Stop the profiler and write what it saw."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.__exit__(None, None, None)

    def after_train(self) -> None:
        """Stop a profiler that a failing step left running."""
        self.after_step()
