"""Measure what hooktrain adds to a step.

    python tools/benchmark.py step
    python tools/benchmark.py step --instructions
    python tools/benchmark.py fabric
    python tools/benchmark.py row
    python tools/benchmark.py ddp
    python tools/benchmark.py fsdp
    python tools/benchmark.py replay
    python tools/benchmark.py data

Machines are noisy and drift, so a process alternates between a bare loop and hooktrain, and the
result is the median over the pairs. ``step`` trains a linear layer in one process, ``ddp`` the same
in two, and ``fsdp`` a small transformer in two, all on the CPU. hooktrain's loop has a timer, a
schedule, and the metrics of every iteration, which go to the console and to JSON every 20
iterations. ``replay`` trains the transformer in one process, with hooktrain in both turns: without
and with ``ReplayCheck(100)``. ``data`` reads batches of 32 numbers without workers, by torch's
loader and by ``build_train_loader``: from a plain container and from a data set that may draw
random numbers.

``fabric`` measures the loop of a linear layer with ``compute_loss``, and compares the median of all
iterations to those of a bare loop and of a loop with Lightning Fabric, which records nothing and
must be installed (``lightning-fabric``). ``row`` measures the time that PeriodicWriter takes in
such a run to write a row of metrics to the console and to JSON.

``--instructions`` counts the instructions of a step and of a row of metrics instead, which do not
depend on how busy the machine is. Under valgrind (a package of most systems), forks of a process
that has imported everything run 100 and 600 steps of each loop; the difference is 500 steps. The
cost of a row is that of 20 steps minus that of 20 steps without writers.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from functools import partial
from itertools import pairwise, repeat
from typing import Any, ClassVar

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

from hooktrain.data import build_train_loader
from hooktrain.demos.text import Block, TextGPT
from hooktrain.engine import HookBase, SimpleTrainer, hooks, launch
from hooktrain.events import CommonMetricPrinter, JSONWriter
from hooktrain.model.sharding import shard_model
from hooktrain.solver import CosineParamScheduler
from hooktrain.utils import comm
from hooktrain.utils.logger import close_logger, setup_logger

LOOPS = ("bare", "without writers", "hooktrain")
FEW_AND_MANY = (100, 600)  # iterations; the difference is the cost of 500 steps


class Model(nn.Module):
    """A model with a very small step: a linear layer of 16 by 16 and its mean square."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the loss."""
        loss: Tensor = self.fc(x).square().mean()
        return loss


class InTurns(HookBase):
    """After each block of iterations, runs a block of each other loop.

    Args:
        blocks: functions that run a block of iterations of a loop, and return their start times.
        iterations: the length of a block.

    Attributes:
        turns: for each block except the first, the times of the other loops and of this one.
    """

    def __init__(
        self, blocks: Sequence[Callable[[], list[float]]], iterations: int
    ) -> None:
        self.turns: list[list[list[float]]] = []
        self._blocks = blocks
        self._iterations = iterations
        self._starts: list[float] = []

    def before_step(self) -> None:
        """Note when an iteration starts; it lasts until the next one starts."""
        self._starts.append(time.perf_counter())

    def after_step(self) -> None:
        """At the end of a block, run the other loops."""
        # Quick in the other iterations, since it is part of their time.
        if len(self._starts) < self._iterations:
            return
        turn = [*(block() for block in self._blocks), self._starts]
        if self.trainer.done > self._iterations:  # the first block is a warm-up
            self.turns.append(turn)
        self._starts = []

    def means(self) -> list[tuple[float, float]]:
        """For each turn, microseconds per iteration of the first other loop and of this one."""
        pairs = []
        for bare, ours in self.turns:
            mean, own = ((t[-1] - t[0]) / (len(t) - 1) * 1e6 for t in (bare, ours))
            pairs.append((mean, own))
        return pairs

    def medians(self) -> list[float]:
        """The median of all iterations of each loop, in microseconds."""
        return [
            1e6 * statistics.median(b - a for times in loop for a, b in pairwise(times))
            for loop in zip(*self.turns, strict=True)
        ]


class OwnLoss(SimpleTrainer):
    """Calls the model in its own ``compute_loss``."""

    def compute_loss(self, data: Any) -> Any:
        """The model's loss."""
        return self.model(data)


class TimedWriter(hooks.PeriodicWriter):
    """Notes the seconds of each row, which has the metrics of 20 iterations."""

    seconds: ClassVar[list[float]] = []

    def after_step(self) -> None:
        """Write, and note the time."""
        start = time.perf_counter()
        super().after_step()
        if self.trainer.done % 20 == 0:
            self.seconds.append(time.perf_counter() - start)


def model_and_batch(kind: str) -> tuple[nn.Module, Any]:
    """A model in training mode, and the batch that it always gets."""
    torch.manual_seed(0)
    if kind == "step":
        return Model(), torch.randn(16, 16)
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(Model()), torch.randn(16, 16)
    text = torch.randint(64, (8, 65))
    model: nn.Module = TextGPT(64, 64, (4, 64, 4))
    if kind == "fsdp":
        shard_model(model, wrap={Block})
    return model, {"tokens": text[:, :-1], "targets": text[:, 1:]}


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all loops."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def bare_step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> None:
    """One iteration of a bare loop."""
    losses = model(batch)
    loss = losses["loss_lm"] if isinstance(losses, dict) else losses
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train(
    model: nn.Module,
    batch: Any,
    total: int,
    last: Sequence[HookBase] = (),
    kind: type[SimpleTrainer] = SimpleTrainer,
    writer: type[hooks.PeriodicWriter] = hooks.PeriodicWriter,
    has_writers: bool = True,
) -> None:
    """Train with hooktrain and the hooks that most runs have; ``last`` are further hooks."""
    with (
        tempfile.TemporaryDirectory() as folder,
        open(f"{folder}/console", "w") as console,
        redirect_stdout(console),
    ):
        setup_logger(folder, distributed_rank=comm.get_rank())
        writers = [CommonMetricPrinter(total), JSONWriter(f"{folder}/metrics.json")]
        trainer = kind(model, repeat(batch), new_optimizer(model))
        trainer.register_hooks(
            [
                hooks.IterationTimer(),
                hooks.LRScheduler(scheduler=CosineParamScheduler(1.0, 0.0)),
                writer(writers if has_writers else [], period=20),
                *last,
            ]
        )
        trainer.train(0, total)
        close_logger()


def train_in_turns(kind: str, pairs: int, iterations: int) -> list[tuple[float, float]]:
    """Alternate between the full stack and a bare loop, in this process or in one of several."""
    torch.set_num_threads(1)
    model, batch = model_and_batch(kind)
    bare_model, _ = model_and_batch(kind)
    bare_optimizer = new_optimizer(bare_model)

    def bare_block() -> list[float]:
        return block_of(
            partial(bare_step, bare_model, batch, bare_optimizer), iterations
        )

    def block_without_check() -> list[float]:
        starts: list[float] = []
        note = hooks.CallbackHook(
            before_step=lambda _: starts.append(time.perf_counter())
        )
        train(bare_model, batch, iterations, [note])
        return starts

    if kind == "replay":
        turns = InTurns([block_without_check], iterations)
        last = [hooks.ReplayCheck(100), turns]
    else:
        turns = InTurns([bare_block], iterations)
        last = [turns]
    train(model, batch, (pairs + 1) * iterations, last)
    return turns.means()


def block_of(step: Callable[[], None], iterations: int) -> list[float]:
    """Run steps, and return their start times."""
    starts = []
    for _ in range(iterations):
        starts.append(time.perf_counter())
        step()
    return starts


def fabric_loop(records: bool) -> Callable[[], None]:
    """An iteration with Lightning Fabric; ``records`` adds a schedule and the recorded loss."""
    from lightning_fabric import Fabric  # type: ignore[import-not-found, unused-ignore]

    plain, batch = model_and_batch("step")
    inner = new_optimizer(plain)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(inner, 1_000_000)
    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(plain, inner)
    recorded: list[float] = []

    def step() -> None:
        loss = model(batch)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        if records:
            recorded.append(loss.item())
            schedule.step()

    return step


def compare_with_fabric(turns: int, iterations: int) -> None:
    """Print the median iteration of a bare loop, of loops with Lightning Fabric, and of ours."""
    torch.set_num_threads(1)
    model, batch = model_and_batch("step")
    optimizer = new_optimizer(model)
    loops = {
        "bare loop": partial(bare_step, model, batch, optimizer),
        "Lightning Fabric": fabric_loop(records=False),
        "the same, with a schedule and the loss": fabric_loop(records=True),
    }
    blocks = [partial(block_of, step, iterations) for step in loops.values()]
    in_turns = InTurns(blocks, iterations)
    ours, _ = model_and_batch("step")
    train(ours, batch, (turns + 1) * iterations, [in_turns], OwnLoss)
    medians = in_turns.medians()
    rows = [
        [name, median, median - medians[0]]
        for name, median in zip([*loops, "hooktrain"], medians, strict=True)
    ]
    print(f"\nmedians of {turns * iterations} iterations in turns, one thread")
    print(tabulate(rows, tablefmt="pipe", floatfmt=".1f", headers=["", "us", "added"]))


def report_rows(rows: int) -> None:
    """Print the time of a row of metrics in a run."""
    torch.set_num_threads(1)
    model, batch = model_and_batch("step")
    train(model, batch, 20 * rows, writer=TimedWriter)
    median = 1e6 * statistics.median(TimedWriter.seconds)
    print(f"\nmedian of {rows} rows of metrics: {median:.0f} us")


class Numbers(Dataset[int]):
    """The numbers below 4096."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> int:
        return index


def read_in_turns(
    numbers: Any, pairs: int, iterations: int
) -> list[tuple[float, float]]:
    """Alternate between torch's loader and hooktrain's; return microseconds per batch of both."""
    torch.set_num_threads(1)
    endless = RandomSampler(numbers, replacement=True, num_samples=10**9)
    loaders = (
        iter(DataLoader(numbers, batch_size=32, sampler=endless)),
        iter(build_train_loader(numbers, total_batch_size=32, seed=0)),
    )

    def seconds(batches: Iterator[Any]) -> float:
        start = time.perf_counter()
        for _ in range(iterations):
            next(batches)
        return time.perf_counter() - start

    times = []
    for _ in range(pairs + 1):
        torchs, ours = (seconds(batches) / iterations * 1e6 for batches in loaders)
        times.append((torchs, ours))
    return times[1:]  # the first one warms up


def run_steps(loop: str, iterations: int) -> None:
    """Run one of the loops in this process, while valgrind counts its instructions."""
    torch.set_num_threads(1)
    model, batch = model_and_batch("step")
    if loop != "bare":
        train(model, batch, iterations, has_writers=loop == "hooktrain")
        return
    optimizer = new_optimizer(model)
    for _ in range(iterations):
        bare_step(model, batch, optimizer)


def fork_loops() -> None:
    """Run some steps of each loop in separate processes, and print their process ids."""
    # Import and compile everything only once, which is slowest under valgrind.
    run_steps("hooktrain", 20)
    for loop in LOOPS:
        for iterations in FEW_AND_MANY:
            child = os.fork()
            if child == 0:
                run_steps(loop, iterations)
                os._exit(0)
            os.waitpid(child, 0)
            print(loop, iterations, child, sep=",", flush=True)


def count_instructions() -> dict[str, float]:
    """The instructions of a step of a bare loop and of ours, and of a row, in thousands."""
    # Spinning threads and the order of sets would differ from run to run.
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    environment = {**os.environ, **dict.fromkeys(threads, "1"), "PYTHONHASHSEED": "0"}
    command = ["setarch", "--addr-no-randomize"]
    command += ["valgrind", "--tool=cachegrind", "--cache-sim=no"]
    command += ["--cachegrind-out-file=/dev/null", sys.executable, __file__, "step"]
    command += ["--fork-loops"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    )
    found = re.findall(r"==(\d+)== I\s+refs:\s+([\d,]+)", done.stderr)
    of_process = {pid: int(count.replace(",", "")) for pid, count in found}
    few, many = FEW_AND_MANY
    counts: dict[str, float] = dict.fromkeys(LOOPS, 0.0)
    for line in done.stdout.splitlines():
        loop, iterations, pid = line.split(",")
        sign = 1 if int(iterations) == many else -1
        counts[loop] += sign * of_process[pid] / (many - few) / 1e3
    counts["row"] = 20 * (counts["hooktrain"] - counts.pop("without writers"))
    return counts


def report_instructions() -> None:
    """Print the instructions of a step of both loops, and of a row."""
    bare, ours, row = count_instructions().values()
    rows = [
        ["bare loop", f"{bare:.0f}"],
        ["hooktrain", f"{ours:.0f}"],
        ["ratio", f"{ours / bare:.3f}"],
        ["a row of metrics", f"{row:.0f}"],
    ]
    print(f"\nthousands of instructions a step, torch {torch.__version__}")
    print(tabulate(rows, tablefmt="pipe", headers=["Linear(16, 16)", ""]))


def report(
    what: str,
    pairs: list[tuple[float, float]],
    iterations: int,
    names: tuple[str, str] = ("bare loop", "hooktrain"),
) -> None:
    """Print the medians of pairs of microseconds per iteration, by default bare and hooktrain."""
    rows = [
        [f"{names[0]}, us", statistics.median(bare for bare, _ in pairs)],
        [f"{names[1]}, us", statistics.median(ours for _, ours in pairs)],
        [
            "added (median of pairs), us",
            statistics.median(ours - bare for bare, ours in pairs),
        ],
        ["added, %", 100 * statistics.median(ours / bare - 1 for bare, ours in pairs)],
    ]
    title = (
        f"a mean iteration of {len(pairs)} pairs of {iterations} iterations, one thread"
    )
    print(f"\n{title}, torch {torch.__version__}")
    print(tabulate(rows, tablefmt="pipe", floatfmt=".1f", headers=[what, ""]))


def report_two_processes(kind: str, pairs: int, iterations: int) -> None:
    """Print the measurements of the main process of two."""
    found = train_in_turns(kind, pairs, iterations)
    if comm.is_main_process():
        report(f"{kind}, two processes", found, iterations)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "what",
        choices=["step", "ddp", "fsdp", "replay", "data", "fabric", "row"],
        help="what to measure",
    )
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument(
        "--iterations", type=int, help="by default 1001, for fsdp 41, for others 100"
    )
    parser.add_argument("--instructions", action="store_true", help="count them")
    parser.add_argument("--fork-loops", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.fork_loops:
        fork_loops()
        return
    if args.instructions:
        report_instructions()
        return
    # One more than a multiple of 20, so that the times between starts cover whole periods. Those of
    # replay have one check.
    by_default = {"fsdp": 41, "replay": 100, "data": 100}
    iterations = args.iterations or by_default.get(args.what, 1001)
    if args.what == "fabric":
        compare_with_fabric(args.pairs, iterations)
        return
    if args.what == "row":
        report_rows(iterations)
        return
    arguments = (args.what, args.pairs, iterations)
    if args.what == "step":
        report("Linear(16, 16)", train_in_turns(*arguments), iterations)
        return
    if args.what == "replay":
        names = ("without a check", "with ReplayCheck(100)")
        report("transformer", train_in_turns(*arguments), iterations, names)
        return
    if args.what == "data":
        names = ("torch's loader", "hooktrain's")
        kinds: dict[str, Any] = {"a range": range(4096), "a data set": Numbers()}
        for what, numbers in kinds.items():
            pairs = read_in_turns(numbers, args.pairs, iterations)
            report(f"batch of 32 of {what}", pairs, iterations, names)
        return
    launch(report_two_processes, 2, args=arguments, backend="gloo")


if __name__ == "__main__":
    main()
