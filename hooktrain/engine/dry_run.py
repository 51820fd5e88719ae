"""A run of two iterations: does it work, and how long will the whole take?"""

import logging
import time
from collections.abc import Mapping
from itertools import islice
from tempfile import TemporaryDirectory
from typing import Any

import torch

from hooktrain.engine.default_trainer import DefaultTrainer
from hooktrain.engine.train_loop import HookBase
from hooktrain.utils import comm
from hooktrain.utils.logger import pretty_seconds

logger = logging.getLogger(__name__)


class DryTrainer(DefaultTrainer):
    """Evaluates two batches."""

    @classmethod
    def build_test_loader(cls, cfg: Any) -> Any:
        """The first two batches of the usual loader, or of each of several."""
        loader = super().build_test_loader(cfg)
        if isinstance(loader, Mapping):
            return {name: list(islice(each, 2)) for name, each in loader.items()}
        return None if loader is None else list(islice(loader, 2))


class Clock(HookBase):
    """Measures the last step: the first one allocates, and compiles."""

    seconds = 0.0

    def before_step(self) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def after_step(self) -> None:
        """Stop it, when the device is done."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # a host-device synchronisation
        self.seconds = time.perf_counter() - self._start


def dry_run(cfg: Any) -> None:
    """Train two iterations, evaluate two batches, and log what the whole run would take.

    All that the run does is real, checkpoints and files of metrics too, in a temporary
    folder that is removed at the end. The weights are those that a new run begins with.

    Args:
        cfg: the configuration; its ``train.output_dir`` is changed.
    """
    with TemporaryDirectory() as folder:
        cfg.train.output_dir = comm.broadcast(folder)
        trainer = DryTrainer(cfg)
        length = trainer.max_iter
        trainer._hooks.pop()  # the summary
        clock = Clock()
        # First, since the time of other hooks' after_step is not that of a step.
        trainer.register_hooks([clock], before=HookBase)
        trainer.resume_or_load(resume=False)
        trainer.train(max_iter=min(2, length))
        # The folder of the main process goes, and others may be writing in it.
        comm.synchronize()
    logger.info(
        "The run works: %.4f s an iteration, about %s for all %s, without evaluations",
        clock.seconds,
        pretty_seconds(clock.seconds * length),
        f"{length:,}",
    )
