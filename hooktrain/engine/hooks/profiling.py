"""Profiles chosen iterations."""

import os
from collections.abc import Callable, Iterable
from typing import Any

from torch.profiler import ProfilerActivity, profile, tensorboard_trace_handler

from hooktrain.engine.hook_base import HookBase
from hooktrain.utils import comm


class TorchProfiler(HookBase):
    """Runs :class:`torch.profiler.profile` in the iterations that a predicate chooses.

    Each rank writes a trace of each such iteration, for ``chrome://tracing`` and other viewers:
    ``profiler-trace-iter{i}.rank{rank}.*.json``. To profile iterations 10 to 19:
    ``TorchProfiler(lambda trainer: 10 <= trainer.iter < 20, output_dir)``.

    Args:
        enable_predicate: called with the trainer before each step; returns whether to profile it.
        output_dir: the folder to write to.
        activities: as for the profiler; None takes the CPU, and the accelerator if there is one.
        save_tensorboard: whether to write to ``log`` in the folder, where TensorBoard looks.
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
        self._folder = os.path.join(output_dir, "log" if save_tensorboard else "")
        self._activities = activities
        self._profiler: profile | None = None

    def before_step(self) -> None:
        """Start the profiler if this iteration is chosen."""
        if not self._enable_predicate(self.trainer):
            return
        name = f"profiler-trace-iter{self.trainer.iter}.rank{comm.get_rank()}"
        self._profiler = profile(
            activities=self._activities,
            record_shapes=True,
            profile_memory=True,
            with_stack=True,
            with_flops=True,
            on_trace_ready=tensorboard_trace_handler(self._folder, name),
            acc_events=True,  # without this some releases of torch warn
        )
        self._profiler.start()

    def after_step(self) -> None:
        """Stop the profiler, which writes its trace."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()

    def after_train(self) -> None:
        """Stop the profiler if a step failed while it ran."""
        self.after_step()
