"""What the tests of a CUDA device share. What can be told without one is tested on the CPU."""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from hooktrain.checkpoint import Checkpointer
from hooktrain.engine import HookBase, SimpleTrainer, default_hooks
from hooktrain.events import CommonMetricPrinter, JSONWriter
from hooktrain.solver import CosineParamScheduler

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")

# The marks of a test that needs a CUDA device.
CARD = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]

T = TypeVar("T", bound=Callable[..., Any])


def needs_card(test: T) -> T:
    """Mark a test so."""
    for mark in CARD:
        test = mark(test)
    return test


def now() -> float:
    """The seconds of a clock, when the device has done all its work."""
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


class Perceptron(nn.Module):
    """So many layers of a width, and the mean square of what they give as the loss."""

    def __init__(self, width: int, depth: int, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        layers: list[nn.Module] = []
        for _ in range(depth):
            layers += [nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout)]
        self.body = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).float().square().mean()


def pinned(count: int, *shape: int) -> list[Tensor]:
    """Fixed batches, as a loader with `pin_memory` gives them."""
    generator = torch.Generator().manual_seed(2)
    made = [torch.randn(shape, generator=generator) for _ in range(count)]
    return [batch.pin_memory() for batch in made] if CUDA else made


def register_all(
    trainer: SimpleTrainer,
    folder: Path,
    *first: HookBase,
    period: int = 10**6,
    background: bool = False,
) -> Checkpointer:
    """Register what most runs have. Gives the checkpointer."""
    checkpointer = Checkpointer(
        trainer.model, folder, trainer=trainer, background=background
    )
    hooks = default_hooks(
        scheduler=CosineParamScheduler(1.0, 0.0),
        checkpointer=checkpointer,
        checkpoint_period=period,
        writers=[CommonMetricPrinter(), JSONWriter(folder / "metrics.json")],
    )
    trainer.register_hooks([*first, *hooks])
    return checkpointer


class Clock(HookBase):
    """Measures the seconds of an iteration, after those that warm up."""

    def __init__(self, warmup: int) -> None:
        self.warmup = warmup
        self.seconds = 0.0

    def before_step(self) -> None:
        if self.trainer.iter == self.warmup:
            self.start = now()

    def after_train(self) -> None:
        self.seconds = (now() - self.start) / (self.trainer.max_iter - self.warmup)


@contextmanager
def noted_waits(transfers: list[int]) -> Iterator[list[Any]]:
    """What waits for the device in a block; on the CPU, what the fixture `transfers` notes."""
    if not CUDA:
        transfers.clear()
        yield transfers
        return
    with warnings.catch_warnings(record=True) as found:
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        warnings.filterwarnings("always", "called a synchronizing CUDA operation")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")


class Watched(SimpleTrainer):
    """Counts what waits for the device in each iteration, its hooks included."""

    transfers: list[int]

    def before_train(self) -> None:
        self.waits: list[int] = []
        super().before_train()

    def before_step(self) -> None:
        self.block = noted_waits(self.transfers)
        self.noted = self.block.__enter__()
        super().before_step()

    def after_step(self) -> None:
        super().after_step()
        self.block.__exit__(None, None, None)
        self.waits.append(len(self.noted))
