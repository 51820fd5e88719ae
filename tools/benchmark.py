"""Measure what hooktrain adds to a step.

    python tools/benchmark.py step

Runs come in pairs, a bare loop and hooktrain's, each in a process of its own and in alternating
order, since machines are noisy and drift: only what is compared within pairs means something. The
result is the median over the pairs.
"""

import argparse
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import repeat

import torch
from tabulate import tabulate
from torch import Tensor, nn

from hooktrain.engine import SimpleTrainer, hooks
from hooktrain.solver import CosineParamScheduler
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


def measure(kind: str, iterations: int) -> float:
    """One run in a new process."""
    command = [sys.executable, __file__, "run", kind, "--iterations", str(iterations)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(result.stdout.splitlines()[-1]))


def step(pairs: int, iterations: int) -> None:
    """Print what the full stack adds to a step."""
    bare, ours = [], []
    for pair in range(pairs):
        order = ("bare", "hooktrain") if pair % 2 == 0 else ("hooktrain", "bare")
        seconds = {kind: measure(kind, iterations) for kind in order}
        bare.append(seconds["bare"])
        ours.append(seconds["hooktrain"])
        print(f"pair {pair}: bare {bare[-1]:.1f} us, hooktrain {ours[-1]:.1f} us", flush=True)
    added = [b - a for a, b in zip(bare, ours, strict=True)]
    rows = [
        ["bare loop", statistics.median(bare)],
        ["hooktrain", statistics.median(ours)],
        ["added (median of pairs)", statistics.median(added)],
    ]
    title = f"microseconds an iteration, {pairs} pairs of {iterations} iterations, one thread"
    print(f"\n{title}, torch {torch.__version__}")
    print(tabulate(rows, tablefmt="pipe", floatfmt=".1f", headers=["Linear(16, 16)", "us"]))


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["step", "run"], help="step; run is for its own use")
    parser.add_argument("kind", nargs="?", choices=RUNS)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--iterations", type=int, default=5000)
    args = parser.parse_args()
    if args.what == "step":
        step(args.pairs, args.iterations)
        return
    torch.set_num_threads(1)
    torch.manual_seed(0)
    RUNS[args.kind](200)  # warm-up
    print(json.dumps(RUNS[args.kind](args.iterations)))


if __name__ == "__main__":
    main()
