"""A run of two iterations: does it work, and how long will the whole take?"""

import logging
import time
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tabulate import tabulate

from hooktrain.engine.default_trainer import DefaultTrainer
from hooktrain.engine.train_loop import HookBase
from hooktrain.evaluation import flatten_results_dict
from hooktrain.utils import comm
from hooktrain.utils.logger import pretty_seconds
from hooktrain.utils.names import is_loss

logger = logging.getLogger(__name__)


def dry_run(cfg: Any, kind: type[DefaultTrainer] = DefaultTrainer) -> None:
    """Train two iterations, evaluate two batches, and log what the whole run would take.

    All that the run does is real, checkpoints and files of metrics too, in a temporary
    folder that is removed at the end. The weights are those that a new run begins with.

    Args:
        cfg: the configuration; its ``train.output_dir`` is changed.
        kind: the class of the trainer.
    """

    class OfTwoBatches(kind):  # type: ignore[misc, valid-type]
        @classmethod
        def build_test_loader(cls, cfg: Any) -> Any:
            loader = super().build_test_loader(cfg)
            return None if loader is None else list(islice(loader, 2))

    with TemporaryDirectory() as folder:
        cfg.train.update(output_dir=comm.broadcast(folder), expected_results=None)
        trainer = OfTwoBatches(cfg)
        length = trainer.max_iter
        clock = _Clock()
        # First, since the time of other hooks' after_step is not that of a step.
        trainer.register_hooks([clock], before=HookBase)
        trainer.resume_or_load(resume=False)
        trainer.train(max_iter=min(2, length))
        sizes = [path.stat().st_size for path in Path(folder).glob("*.pth")]
        # The folder of the main process goes, and others may be writing in it.
        comm.synchronize()
    if not comm.is_main_process():
        return
    count = sum(p.numel() for p in trainer.model.parameters())
    whole = pretty_seconds(clock.seconds * length)
    results = flatten_results_dict(trainer.last_results)
    losses = {}
    for name, (value, _) in trainer.storage.latest().items():
        if is_loss(name) and name not in results:
            losses[name] = value
    rows = {
        "model": f"{count:,} parameters",
        "losses": _short(losses),
        "evaluation": _short(results) or "none",
        "iteration": f"{clock.seconds:.4f} s",
        "checkpoint": f"{max(sizes, default=0) / 2**20:,.1f} MiB",
        "whole run": f"about {whole} for {length:,} iterations, without evaluations",
    }
    table = tabulate(rows.items(), tablefmt="plain", maxcolwidths=80)
    logger.info("The run works:\n%s", table)


class _Clock(HookBase):
    """Measures the last step: the first one allocates, and compiles."""

    seconds = 0.0

    def before_step(self) -> None:
        self._start = time.perf_counter()

    def after_step(self) -> None:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # a host-device synchronisation
        self.seconds = time.perf_counter() - self._start


def _short(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}: {value:.4g}" for name, value in values.items())
