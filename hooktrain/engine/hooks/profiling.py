"""Profiles chosen iterations."""

from collections.abc import Callable, Iterable
from typing import Any

from torch.profiler import ProfilerActivity, profile, tensorboard_trace_handler

from hooktrain.engine.hook_base import HookBase
from hooktrain.utils import comm


class TorchProfiler(HookBase):
    """Runs :class:`torch.profiler.profile` in the iterations that a predicate chooses.

    Each rank writes a trace of each of them, for TensorBoard to
    ``log/profiler-tensorboard-iter{i}/worker{rank}.*.json`` in the output folder, or for
    ``chrome://tracing`` to ``profiler-trace-iter{i}.rank{rank}.*.json``. To profile iterations 10
    to 19: ``TorchProfiler(lambda trainer: 10 <= trainer.iter < 20, output_dir)``.

    Args:
        enable_predicate: called with the trainer before each step; returns whether to profile it.
        output_dir: the folder to write to.
        activities: see the profiler; None takes the CPU, and the accelerator if there is one.
        save_tensorboard: whether to write for TensorBoard.
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
        self._output_dir = output_dir
        self._activities = activities
        self._save_tensorboard = save_tensorboard
        self._profiler: profile | None = None

    def before_step(self) -> None:
        """Start the profiler if this iteration is chosen."""
        if not self._enable_predicate(self.trainer):
            return
        iteration, rank = self.trainer.iter, comm.get_rank()
        folder, name = self._output_dir, f"profiler-trace-iter{iteration}.rank{rank}"
        if self._save_tensorboard:
            folder += f"/log/profiler-tensorboard-iter{iteration}"
            name = f"worker{rank}"
        self._profiler = profile(
            activities=self._activities,
            record_shapes=True,
            profile_memory=True,
            with_stack=True,
            with_flops=True,
            on_trace_ready=tensorboard_trace_handler(folder, name),
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
