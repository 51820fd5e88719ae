"""Profiles chosen iterations with the older autograd profiler."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import profiler as autograd_profiler

from hooktrain.engine.train_loop import HookBase
from hooktrain.utils import comm

__all__ = ["AutogradProfiler"]


class AutogradProfiler(HookBase):
    """Runs :class:`torch.autograd.profiler.profile` in iterations that a predicate chooses.

    Each gives a trace for ``chrome://tracing``, ``profiler-trace-iter{i}.json``. ``TorchProfiler``
    sees more; this one is for scripts that use it already.

    Args:
        enable_predicate: given the trainer before each step; true means to profile it.
        output_dir: the folder to write to.
        use_cuda: whether to time CUDA's kernels too, if there is a CUDA device.
    """

    def __init__(
        self, enable_predicate: Callable[[Any], bool], output_dir: str, *, use_cuda: bool = True
    ) -> None:
        self._enable_predicate = enable_predicate
        self._output_dir = Path(output_dir)
        self._use_device = "cuda" if use_cuda and torch.cuda.is_available() else None
        self._profiler: Any = None

    def before_step(self) -> None:
        """Start the profiler if this iteration is chosen."""
        if self._enable_predicate(self.trainer):
            self._profiler = autograd_profiler.profile(use_device=self._use_device)
            self._profiler.__enter__()

    def after_step(self) -> None:
        """Stop the profiler and write what it saw."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.__exit__(None, None, None)
        self._output_dir.mkdir(parents=True, exist_ok=True)
        suffix = f".rank{comm.get_rank()}" if comm.get_world_size() > 1 else ""
        name = f"profiler-trace-iter{self.trainer.iter}{suffix}.json"
        profiler.export_chrome_trace(str(self._output_dir / name))

    def after_train(self) -> None:
        """Stop a profiler that a failing step left running."""
        self.after_step()
