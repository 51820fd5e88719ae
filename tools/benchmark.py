"""Measure what hooktrain adds to a step.

    python tools/benchmark.py step
    python tools/benchmark.py ddp
    python tools/benchmark.py fsdp

Machines are noisy and drift, so a bare loop and hooktrain's are measured in pairs, and the result
is the median over the pairs. For ``step`` each run is a new process, in alternating order.
For ``ddp`` (a linear layer) and ``fsdp`` (a small transformer) two processes on the CPU train by
both loops in turns.
"""

import argparse
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import repeat
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from hooktrain.demos.text import Block, TextGPT
from hooktrain.engine import HookBase, SimpleTrainer, hooks, launch
from hooktrain.model.sharding import shard_model
from hooktrain.solver import CosineParamScheduler
from hooktrain.utils import comm
from hooktrain.utils.events import CommonMetricPrinter, JSONWriter
from hooktrain.utils.logger import setup_logger


class Model(nn.Module):
    """The smallest step that is one: a linear layer of 16 by 16 and its mean square."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the loss."""
        loss: Tensor = self.fc(x).square().mean()
        return loss


def bare_loop(iterations: int) -> float:
    """Train without anything around the step; return microseconds an iteration."""
    model, data = Model(), torch.randn(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = iter(repeat(data))
    start = time.perf_counter()
    for _ in range(iterations):
        loss = model(next(loader))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return (time.perf_counter() - start) / iterations * 1e6


def full_stack(iterations: int) -> float:
    """The same with timer, schedule, every iteration's metrics, console and JSON each 20."""
    model, data = Model(), torch.randn(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with tempfile.TemporaryDirectory() as folder:
        setup_logger(folder)
        trainer = SimpleTrainer(model, repeat(data), optimizer)
        writers = [CommonMetricPrinter(iterations), JSONWriter(f"{folder}/metrics.json")]
        trainer.register_hooks(
            [
                hooks.IterationTimer(),
                hooks.LRScheduler(scheduler=CosineParamScheduler(1.0, 0.0)),
                hooks.PeriodicWriter(writers, period=20),
            ]
        )
        start = time.perf_counter()
        trainer.train(0, iterations)
        seconds = time.perf_counter() - start
        logging.shutdown()
    return seconds / iterations * 1e6


RUNS = {"bare": bare_loop, "hooktrain": full_stack}


class InTurns(HookBase):
    """After each block of iterations, runs as many of a bare loop.

    Attributes:
        pairs: for each block but the first, microseconds an iteration of both, in that order.
    """

    def __init__(self, bare_block: Callable[[], list[float]], iterations: int) -> None:
        self.pairs: list[tuple[float, float]] = []
        self._bare_block, self._iterations = bare_block, iterations
        self._starts: list[float] = []

    def before_step(self) -> None:
        """Note when an iteration starts: from there to the next start is all that it costs."""
        self._starts.append(time.perf_counter())

    def after_step(self) -> None:
        """At the end of a block, run the bare loop."""
        if not self.is_due(self._iterations):
            return
        blocks = (self._bare_block(), self._starts)
        bare, ours = ((b[-1] - b[0]) / (len(b) - 1) * 1e6 for b in blocks)
        if self.trainer.iter + 1 > self._iterations:  # the first one warms up
            self.pairs.append((bare, ours))
        self._starts.clear()


def model_and_batch(kind: str) -> tuple[nn.Module, Any]:
    """A model for several processes, in training mode, and the batch that it always gets."""
    torch.manual_seed(0)
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(Model()), torch.randn(16, 16)
    text = torch.randint(64, (8, 65))
    model = shard_model(TextGPT(64, 64, (4, 64, 4)), wrap={Block})
    return model, {"tokens": text[:, :-1], "targets": text[:, 1:]}


def train_in_turns(kind: str, pairs: int, iterations: int) -> list[tuple[float, float]]:
    """Train by the full stack and by a bare loop in turns, in one of several processes."""
    torch.set_num_threads(1)
    model, batch = model_and_batch(kind)
    bare_model, _ = model_and_batch(kind)
    optimizer, bare_optimizer = (
        torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (model, bare_model)
    )

    def bare_block() -> list[float]:
        starts = []
        for _ in range(iterations):
            starts.append(time.perf_counter())
            losses = bare_model(batch)
            loss = losses if kind == "ddp" else losses["loss_lm"]
            bare_optimizer.zero_grad()
            loss.backward()
            bare_optimizer.step()
        return starts

    turns, total = InTurns(bare_block, iterations), (pairs + 1) * iterations
    with tempfile.TemporaryDirectory() as folder:
        setup_logger(folder, distributed_rank=comm.get_rank())
        writers = [CommonMetricPrinter(total), JSONWriter(f"{folder}/metrics.json")]
        trainer = SimpleTrainer(model, repeat(batch), optimizer)
        trainer.register_hooks(
            [
                hooks.IterationTimer(),
                hooks.LRScheduler(scheduler=CosineParamScheduler(1.0, 0.0)),
                hooks.PeriodicWriter(writers, period=20),
                turns,
            ]
        )
        trainer.train(0, total)
        logging.shutdown()
    return turns.pairs


def measure(kind: str, iterations: int) -> float:
    """One run in a new process."""
    command = [sys.executable, __file__, "run", kind, "--iterations", str(iterations)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(result.stdout.splitlines()[-1]))


def step(pairs: int, iterations: int) -> None:
    """Print what the full stack adds to a step, by pairs of processes."""
    bare, ours = [], []
    for pair in range(pairs):
        order = ("bare", "hooktrain") if pair % 2 == 0 else ("hooktrain", "bare")
        seconds = {kind: measure(kind, iterations) for kind in order}
        bare.append(seconds["bare"])
        ours.append(seconds["hooktrain"])
        print(f"pair {pair}: bare {bare[-1]:.1f} us, hooktrain {ours[-1]:.1f} us", flush=True)
    report("Linear(16, 16)", list(zip(bare, ours, strict=True)), iterations)


def report(what: str, pairs: list[tuple[float, float]], iterations: int) -> None:
    """Print the medians of pairs of microseconds an iteration, bare and hooktrain."""
    rows = [
        ["bare loop, us", statistics.median(bare for bare, _ in pairs)],
        ["hooktrain, us", statistics.median(ours for _, ours in pairs)],
        ["added (median of pairs), us", statistics.median(ours - bare for bare, ours in pairs)],
        ["added, %", 100 * statistics.median(ours / bare - 1 for bare, ours in pairs)],
    ]
    title = f"a mean iteration of {len(pairs)} pairs of {iterations} iterations, one thread"
    print(f"\n{title}, torch {torch.__version__}")
    print(tabulate(rows, tablefmt="pipe", floatfmt=".1f", headers=[what, ""]))


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    choices = ["step", "ddp", "fsdp", "run"]
    parser.add_argument("what", choices=choices, help="what to measure; run is for its own use")
    parser.add_argument("kind", nargs="?", choices=RUNS)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--iterations", type=int, help="by default 5000, 1001 or 41")
    args = parser.parse_args()
    # One more than a multiple of 20: the times between two starts then hold whole periods.
    defaults = {"step": 5000, "ddp": 1001, "fsdp": 41, "run": 5000}
    args.iterations = args.iterations or defaults[args.what]
    if args.what == "step":
        step(args.pairs, args.iterations)
        return
    if args.what in ("ddp", "fsdp"):
        arguments = (args.what, args.pairs, args.iterations)
        pairs = launch(train_in_turns, 2, args=arguments, backend="gloo")[0]
        report(f"{args.what}, two processes", pairs, args.iterations)
        return
    torch.set_num_threads(1)
    torch.manual_seed(0)
    RUNS[args.kind](200)  # warm-up
    print(json.dumps(RUNS[args.kind](args.iterations)))


if __name__ == "__main__":
    main()
