"""A rank that is slow for a while is named, whether in its data or in its forward pass."""

import itertools
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gloo import run_ranks
from hooktrain.engine import SimpleTrainer, hooks
from hooktrain.strategy import wrap_in_ddp
from hooktrain.utils import comm
from toys import LinearLoss


class Clock:
    """Stands still, but for what the data and the model of a rank take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)


class Timed(LinearLoss):
    def __init__(self, clock: Clock, seconds: Iterator[float]) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def forward(self, x: Tensor) -> Tensor:
        self.clock.now += next(self.seconds)
        return super().forward(x)


def batches(clock: Clock, seconds: float) -> Iterator[Tensor]:
    while True:
        clock.now += seconds
        yield torch.ones(2, 4)


def warnings_of(
    waits: list[float], passes: list[list[float]], max_iter: int
) -> list[str]:
    """Train with these seconds for data, of each rank, and for forward passes, in turn."""
    rank = comm.get_rank()
    with pytest.MonkeyPatch.context() as monkeypatch:
        clock = Clock(monkeypatch)
        timed = Timed(clock, itertools.cycle(passes[rank]))
        model = wrap_in_ddp(timed, torch.device("cpu"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = SimpleTrainer(
            model, batches(clock, waits[rank]), optimizer, gather_metric_period=2
        )
        trainer.register_hooks([hooks.Stragglers(factor=1.5, patience=3)])
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logger = logging.getLogger(sys.modules[hooks.Stragglers.__module__].__name__)
        logger.addHandler(handler)
        trainer.train(max_iter=max_iter)
        logger.removeHandler(handler)
        assert not timed._forward_hooks
        assert not timed._forward_pre_hooks
    return said


# Seconds for data of each rank, for its forward passes in turn, and what is said.
SLOW = (
    "rank {}: an iteration takes it {:.4f} s for data and {:.4f} s for the forward pass"
)
CASES: list[tuple[list[float], list[list[float]], int, list[str]]] = [
    # Slow in its data, for three periods of two iterations.
    ([0.25, 1.0], [[0.25], [0.25]], 6, [SLOW.format(1, 1, 0.25)]),
    # Slow in its forward pass, for six periods.
    ([0.25, 0.25], [[1.0], [0.25]], 13, [SLOW.format(0, 0.25, 1)] * 2),
    # In two periods of three only.
    ([0.25, 0.25], [[0.25], [1.0, 1.0, 1.0, 1.0, 0.25, 0.25]], 18, []),
    # Not by so much.
    ([0.25, 0.25], [[0.25], [0.375]], 12, []),
]


def warnings_of_all() -> list[list[str]]:
    return [warnings_of(*arguments) for *arguments, _ in CASES]


def test_the_rank_that_the_others_wait_for_is_named() -> None:
    main, other = run_ranks(warnings_of_all, 2)
    assert other == [[]] * len(CASES)
    for said, (*_, expected) in zip(main, CASES, strict=True):
        for message, part in zip(said, expected, strict=True):
            assert part in message
            assert message.endswith("where 0.5000 s for both are usual")


def test_a_single_process_has_nobody_to_compare_with() -> None:
    model: Any = LinearLoss()
    trainer = SimpleTrainer(
        model, [torch.ones(2, 4)], torch.optim.SGD(model.parameters(), lr=0.1)
    )
    trainer.register_hooks([hooks.Stragglers()])
    trainer.train(max_iter=41)
    assert not model._forward_hooks
