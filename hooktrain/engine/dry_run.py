"""A run of two iterations: does it work, how long will the whole take, how much will it write?"""

import logging
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tabulate import tabulate

from hooktrain.checkpoint.resume import checkpoint_names
from hooktrain.engine.defaults import DefaultTrainer
from hooktrain.engine.losses import describe
from hooktrain.engine.train_loop import HookBase
from hooktrain.evaluation import first_batches, flatten_results_dict
from hooktrain.utils import comm
from hooktrain.utils.env import device_module
from hooktrain.utils.epochs import in_iterations
from hooktrain.utils.logger import pretty_seconds

logger = logging.getLogger(__name__)

_ITERATIONS = _BATCHES = 2


def dry_run(cfg: Any, build: Callable[[Any], DefaultTrainer] = DefaultTrainer) -> None:
    """Make the run of a configuration with two iterations, and log what the whole would take.

    Each evaluation sees two batches. All that the run does is real, checkpoints and files of
    metrics too, in a temporary folder that is removed at the end. The weights are those that a new
    run begins with.

    Args:
        cfg: the configuration; its ``train.output_dir`` is changed.
        build: makes the trainer from it.
    """
    target = Path(cfg.train.output_dir).absolute()
    with TemporaryDirectory() as folder:
        cfg.train.update(output_dir=comm.broadcast(folder), expected_results=None)
        trainer = build(cfg)
        hooks_of_run, length = trainer.describe_hooks(), trainer.max_iter
        batches, clock = _Described(trainer.data_loader), _Clock()
        trainer.data_loader = batches
        # First, since the time of other hooks' after_step is not that of a step.
        trainer.register_hooks([clock], before=HookBase)
        trainer.resume_or_load(resume=False)
        with first_batches(_BATCHES) as seconds:
            trainer.train(max_iter=min(_ITERATIONS, length))
        sizes = [_bytes_of(Path(folder, name)) for name in checkpoint_names(folder)]
        comm.synchronize()  # the folder of the main process goes, and others may be writing in it
    if not comm.is_main_process():
        return
    results = flatten_results_dict(trainer.last_results)
    evaluations = _times(cfg.train.eval_period, trainer, length) + 1 if results else 0
    whole = pretty_seconds(clock.seconds * length + sum(seconds) * evaluations)
    size = max(sizes, default=0)
    saves = _times(cfg.train.checkpointer.period, trainer, length)
    kept = min(saves, cfg.train.checkpointer.max_to_keep or saves) + len(sizes)
    free = shutil.disk_usage(
        next(p for p in (target, *target.parents) if p.exists())
    ).free
    parameters = list(trainer.model.parameters())
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    metrics = {name: value for name, (value, _) in trainer.storage.latest().items()}
    losses = {
        name: v for name, v in metrics.items() if "loss" in name and name not in results
    }
    rows = {
        "model": f"{sum(p.numel() for p in parameters):,} parameters, {trainable:,} to train",
        "batch": batches.first,
        "losses": _short(losses),
        "evaluation": _short(results) or "none",
        "iteration": f"{clock.seconds:.4f} s",
        "memory": f"{_peak_bytes() / 2**20:,.0f} MiB at the peak",
        "checkpoint": f"{size / 2**20:,.1f} MiB",
        "disk": f"{kept * size / 2**20:,.1f} of {free / 2**20:,.0f} MiB that are free",
        "whole run": f"about {whole}: {length:,} iterations, {evaluations:,} evaluations",
    }
    logger.debug("Hooks:\n%s", hooks_of_run)
    logger.info(
        "The run works:\n%s", tabulate(rows.items(), tablefmt="plain", maxcolwidths=80)
    )


class _Described:
    """A loader that remembers what its first batch is like."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader, self.first = loader, ""

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            self.first = self.first or describe(batch)
            yield batch


class _Clock(HookBase):
    """Measures the last iteration: the first one allocates, and compiles."""

    seconds = 0.0

    def before_step(self) -> None:
        self._start = time.perf_counter()

    def after_step(self) -> None:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # a host-device synchronisation
        self.seconds = time.perf_counter() - self._start


def _short(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}: {value:.4g}" for name, value in values.items())


def _times(period: int | str, trainer: DefaultTrainer, length: int) -> int:
    return length // (in_iterations(period, trainer.epoch_length) or length + 1)


def _bytes_of(path: Path) -> int:
    return sum(
        file.stat().st_size for file in [path, *path.rglob("*")] if file.is_file()
    )


def _peak_bytes() -> int:
    """The most memory: of the accelerator, if it tells, else of this process."""
    if peak := getattr(device_module(), "max_memory_allocated", None):
        return int(peak())
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
