"""detectron2's hooks that profile time and memory, besides the core's ``TorchProfiler``."""

import logging
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity

from hooktrain.engine.hooks import TorchProfiler

logger = logging.getLogger(__name__)


class AutogradProfiler(TorchProfiler):
    """A :class:`TorchProfiler` that writes Chrome traces.

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
