"""Measure the costs that grow with the number of ranks, and the costs of checkpoints.

    python tools/benchmark_scale.py ranks
    python tools/benchmark_scale.py checkpoint
    python tools/benchmark_scale.py index
    python tools/benchmark_scale.py saves 8dfd668 HEAD
    python tools/benchmark_scale.py sampler
    python tools/benchmark_scale.py connections

``ranks`` trains in one process that acts as the main one of many: under torch's fake process group
collectives return at once, without data from other ranks. So it measures the rank's own work and
counts the bytes that it sends, but not the network or the wait for other ranks. Runs of all sizes
take turns, since machines are noisy and drift. Other programs can only add time, so the fastest
round is the best estimate, and the median shows how noisy the rounds were.

``checkpoint`` measures, on this disk and one core, each operation on the bytes of a checkpoint.
From that it computes the costs of larger checkpoints.

``index`` builds the index of a folder of shards as many ranks would write it, and measures how long
one rank takes to find and read its shards, and how long the main process takes for the index at
each save.

``saves`` compares two revisions, which take turns to save, verify and read the same folder.

``sampler`` measures, for one of 4,096 ranks with 32 samples each, the time and the memory that a
resumed loader needs to choose its first batch and each later one.

``connections`` starts real processes on this machine, a multiple of eight, that connect over gloo,
and counts the open files of each (Linux).
"""

import argparse
import multiprocessing
import os
import pickle
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing.spawn import start_processes
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hooktrain.checkpoint import Checkpointer, folders
from hooktrain.checkpoint.files import (
    load_file,
    load_verified,
    save_file,
    verify_file,
    write_file,
)
from hooktrain.checkpoint.folders import copy_to_host, save_folder
from hooktrain.checkpoint.loading import read_checkpoint
from hooktrain.data import build_train_loader
from hooktrain.engine import SimpleTrainer, hooks
from hooktrain.events import CommonMetricPrinter, JSONWriter
from hooktrain.solver import CosineParamScheduler
from hooktrain.strategy.environment import join_processes, leave_processes
from hooktrain.utils import comm
from hooktrain.utils.logger import close_logger, setup_logger

PERIOD = 20


class Model(nn.Module):
    """A linear layer of 16 by 16 and its mean square, with constants as further losses."""

    def __init__(self, metrics: int) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.others = {f"loss_{i}": torch.tensor(1.0 / i) for i in range(1, metrics)}

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Compute the losses."""
        return {"loss_0": self.fc(x).square().mean(), **self.others}


class Traffic(TorchDispatchMode):
    """Counts all collectives, torch's own included, and the bytes passed to them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # DTensor first turns it into collectives and tensors
        names = [argument.name for argument in func._schema.arguments]
        if func.namespace == "c10d" or "group_name" in names:
            self.count += 1
            # The input is a separate argument, or is changed in place.
            given = [i for i, name in enumerate(names) if name.startswith("input")]
            leaves = tree_leaves(args[given[0] if given else 0])
            self.bytes += sum(t.nbytes for t in leaves if isinstance(t, Tensor))
        return func(*args, **(kwargs or {}))


@contextmanager
def one_of(ranks: int, rank: int = 0) -> Iterator[None]:
    """Let this process act as one of many ranks inside the context."""
    if ranks == 1:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    real = comm.object_group
    # A fake process group has no gloo beside it.
    comm.object_group = lambda: dist.group.WORLD  # type: ignore[assignment, return-value]
    try:
        yield
    finally:
        comm.object_group = real
        dist.destroy_process_group()


@contextmanager
def full_stack(metrics: int, iterations: int) -> Iterator[SimpleTrainer]:
    """A trainer with a timer, a schedule, and writers to a log and to JSON every 20 iterations."""
    torch.manual_seed(0)
    model = Model(metrics)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with tempfile.TemporaryDirectory() as folder:
        setup_logger(folder, configure_stdout=False)
        trainer = SimpleTrainer(model, repeat(torch.randn(16, 16)), optimizer, PERIOD)
        writers = [
            CommonMetricPrinter(iterations),
            JSONWriter(f"{folder}/metrics.json"),
        ]
        trainer.register_hooks(
            [
                hooks.IterationTimer(),
                hooks.LRScheduler(scheduler=CosineParamScheduler(1.0, 0.0)),
                hooks.PeriodicWriter(writers, period=PERIOD),
            ]
        )
        try:
            yield trainer
        finally:
            close_logger("hooktrain")


def microseconds(ranks: int, metrics: int, iterations: int) -> float:
    """The processor time of an iteration, which other programs disturb least.

    It excludes the start of a run, when each rank reads the names of the hooks of all ranks.
    """
    with one_of(ranks), full_stack(metrics, iterations) as trainer:
        starts: list[float] = []
        note = hooks.CallbackHook(
            before_train=lambda _: starts.append(time.process_time())
        )
        trainer.register_hooks([note])
        trainer.train(0, iterations)
        return (time.process_time() - starts[0]) / iterations * 1e6


def traffic(ranks: int, metrics: int) -> tuple[float, float]:
    """Collectives and bytes a period, once the ranks know each other."""
    periods = 5
    with one_of(ranks), full_stack(metrics, PERIOD * (periods + 1)) as trainer:
        trainer.train(0, PERIOD)
        with Traffic() as first:
            trainer.train(max_iter=2 * PERIOD)
        with Traffic() as all_of_them:
            trainer.train(max_iter=(3 + periods) * PERIOD)
        count = (all_of_them.count - first.count) / periods
        return count, (all_of_them.bytes - first.bytes) / periods


def ranks_command(
    worlds: list[int], counts: list[int], rounds: int, iterations: int
) -> None:
    """Print the collectives of a period, and the time of an iteration with them."""
    print(
        f"{rounds} rounds of {iterations} iterations, one thread, torch {torch.__version__}"
    )
    for metrics in counts:
        times: dict[int, list[float]] = {ranks: [] for ranks in [1, *worlds]}
        for ranks in times:
            microseconds(ranks, metrics, 100)  # warm-up
        for turn in range(rounds):
            for ranks in times if turn % 2 == 0 else reversed(times):
                times[ranks].append(microseconds(ranks, metrics, iterations))
        rows = []
        for ranks, own in times.items():
            both = [f"{value:.1f}" for value in (statistics.median(own), min(own))]
            more = f"{min(own) - min(times[worlds[0]]):+.1f}" if ranks > 1 else ""
            rows.append([ranks, metrics, *traffic(ranks, metrics), *both, more])
        headers = ["ranks", "losses", "collectives a period", "bytes a period"]
        headers += ["us, median", "us, fastest", f"more than with {worlds[0]} ranks"]
        print("\n" + tabulate(rows, headers, tablefmt="pipe", intfmt=","), flush=True)


def seconds_of(function: Callable[[], object], rounds: int) -> tuple[float, float]:
    """The wall time and the processor time of the fastest of several calls.

    Other programs can only add to them, least to the processor time, which excludes the disk.
    """
    times, busy = [], []
    for _ in range(rounds):
        start, begun = time.perf_counter(), time.process_time()
        function()
        times.append(time.perf_counter() - start)
        busy.append(time.process_time() - begun)
    return min(times), min(busy)


def write_durably(path: Path, content: memoryview) -> None:
    """Write bytes to a new file, and wait until they are on the disk."""
    path.unlink(missing_ok=True)
    with open(path, "wb") as file:
        file.write(content)
        os.fsync(file.fileno())


Speeds = dict[str, tuple[float, float]]


def bandwidths(folder: Path, gigabytes: float, rounds: int) -> Speeds:
    """For each operation on the bytes of a checkpoint, GB/s and GB per processor second."""
    count = 48
    size = max(1, int(gigabytes * 1e9 / 4 / count))
    state = {f"layer_{i}": torch.rand(size) for i in range(count)}
    total = count * size * 4 / 1e9
    _, memory = copy_to_host(state, {})
    content = memoryview(torch.rand(count * size).numpy()).cast("B")
    raw, ours, plain = folder / "raw", folder / "ours.pth", folder / "plain.pth"
    sharded = folder / "sharded"
    model = nn.ParameterList(torch.rand(size // 3) for _ in range(count))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    run = Checkpointer(model, folder, optimizer=optimizer)
    run.save("run")
    run_file = folder / "run.pth"

    def by_torch() -> None:
        loaded = torch.load(run_file, mmap=True)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])

    # In this order: readers come after writers.
    steps: dict[str, Callable[[], object]] = {
        "copy into fresh memory": lambda: copy_to_host(state, {}),
        "copy into kept memory": lambda: copy_to_host(state, memory),
        "write and fsync": lambda: write_durably(raw, content),
        "torch.save, not synced": lambda: torch.save(state, plain),
        "save_file (checksums, fsync)": lambda: save_file(state, ours),
        "save_folder (checksums, fsync)": lambda: save_folder(state, sharded),
        "CRC-32 alone": lambda: zlib.crc32(content),
        "verify_file (all checksums)": lambda: verify_file(ours),
        "load_file (verified)": lambda: load_file(ours),
        "read_folder (verified)": lambda: read_checkpoint(str(sharded)),
        "a file into a model and AdamW (verified)": lambda: run.load(run_file),
        "the same by torch (left in the file)": by_torch,
    }
    speeds = {}
    for name, step in steps.items():
        seconds, busy = seconds_of(step, rounds)
        speeds[name] = (total / seconds, total / busy)
    return speeds


def measure_index(ranks: int, tensors: int, folder: Path) -> list[Any]:
    """Measure the index of many sharded tensors, with the first shard of each in a folder.

    Returns:
        MB of the manifest; processor seconds to read it, and to read it with the shards of rank 0;
        KB that the main process receives from each rank at a save; and its seconds for the index.
    """
    with one_of(ranks):
        mesh, shape = init_device_mesh("cpu", (ranks,)), torch.Size([ranks, 4])
        options = {"run_check": False, "shape": shape, "stride": (4, 1)}
        model = nn.Module()
        for i in range(tensors):
            shard = DTensor.from_local(torch.rand(1, 4), mesh, [Shard(0)], **options)
            model.register_parameter(f"attention_{i}", nn.Parameter(shard))
        state = {"model": model.state_dict()}
        skeleton, found = folders._split(state)
        parts, digest = folders._write_parts(found, folder / "__0_0.distcp")
        sent = [pickle.dumps(moved(parts, rank)) for rank in range(ranks)]
        start = time.process_time()
        everywhere = [pickle.loads(each) for each in sent]
        index, metadata = folders._index_of(everywhere, found)
        pickle.dumps(metadata)
        del everywhere, metadata
        files = {f"__{rank}_0.distcp": digest for rank in range(ranks)}
        manifest = folder / "manifest.pth"
        save_file({"files": files, "tensors": index}, manifest)
        saved = time.process_time() - start
        write_file({"state": skeleton}, folder / "state.pth")

        def read_index() -> None:
            verify_file(manifest)
            load_verified(manifest, mapped=True)

        _, read = seconds_of(read_index, 5)
        _, restored = seconds_of(
            lambda: folders.CheckpointFolder(folder).read(model), 5
        )
        megabytes = manifest.stat().st_size / 1e6
        return [megabytes, read, restored, len(sent[-1]) / 1e3, saved]


def moved(parts: folders.Parts, rank: int) -> folders.Parts:
    """The parts that rank 0 wrote, as if another rank had written them."""
    own = {}
    for name, (((_, *columns), sizes), (_, *place)) in parts.items():
        own[name] = (((rank, *columns), sizes), (rank, *place))
    return own


def index_command(worlds: list[int], tensors: int) -> None:
    """Print the cost of the index of a folder of shards."""
    rows = []
    for ranks in worlds:
        with tempfile.TemporaryDirectory() as folder:
            rows.append([ranks, *measure_index(ranks, tensors, Path(folder))])
    headers = ["ranks", "index, MB", "read it, s", "read a rank's shards, s"]
    headers += ["a rank sends, KB", "main process at a save, s"]
    print(f"{tensors} tensors, one thread, torch {torch.__version__}\n")
    print(tabulate(rows, headers, "pipe", intfmt=",", floatfmt=",.3g"))


# Run with a revision's own package; prints the seconds of a save, a verification and a read.
SAVES = """
import sys, time
import torch
from hooktrain.checkpoint import folders
torch.set_num_threads(1)
folder, megabytes = sys.argv[1], float(sys.argv[2])
state = {f"layer_{i}": torch.rand(int(megabytes * 1e6 / 4 / 48)) for i in range(48)}
folders.save_folder(state, folder)
if hasattr(folders, "CheckpointFolder"):
    saved = folders.CheckpointFolder(folder)
    verify, read = saved.verify, saved.read
else:  # a revision before 0.1.0
    verify = lambda: folders.verify_folder(folder)
    read = lambda: folders.read_folder(folder)
for step in (lambda: folders.save_folder(state, folder)), verify, read:
    start = time.perf_counter()
    step()
    print(time.perf_counter() - start)
"""


def saves_command(revisions: list[str], megabytes: float, rounds: int) -> None:
    """Print the fastest and the median times of both revisions, which take turns."""
    times: dict[str, list[list[float]]] = {revision: [] for revision in revisions}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        trees = {}
        for revision in revisions:
            trees[revision] = stack.enter_context(checked_out(revision, Path(name)))
        for turn in range(rounds):
            for revision in revisions if turn % 2 == 0 else reversed(revisions):
                done = subprocess.run(
                    [sys.executable, "-c", SAVES, f"{name}/saved", str(megabytes)],
                    env={**os.environ, "PYTHONPATH": str(trees[revision])},
                    cwd=name,
                    check=True,
                    capture_output=True,
                    text=True,
                )
                times[revision].append([float(line) for line in done.stdout.split()])
                shutil.rmtree(f"{name}/saved")
    rows = []
    for revision, measured in times.items():
        columns = list(zip(*measured, strict=True))
        both = [f"{min(c):.3f} / {statistics.median(c):.3f}" for c in columns]
        rows.append([revision, *both])
    headers = ["revision", "save, s (fastest / median)", "verify", "read"]
    print(f"{megabytes:g} MB, {rounds} rounds, one thread, torch {torch.__version__}\n")
    print(tabulate(rows, headers, "pipe"))


@contextmanager
def checked_out(revision: str, folder: Path) -> Iterator[Path]:
    """A worktree of a revision."""
    tree = folder / f"tree of {revision}"
    git = ["git", "-C", Path(__file__).parent, "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", tree, revision], check=True)
    try:
        yield tree
    finally:
        subprocess.run([*git, "remove", "--force", tree], check=True)


def costs(speed: Speeds, billions: float, ranks: int) -> list[Any]:
    """The cost of a sharded checkpoint of so many parameters for each rank, in seconds.

    This is processor time: the disk is assumed to keep up.
    """
    share = 12 * billions / ranks  # GB: weights and both moments of AdamW, float32
    blocked = share / speed["copy into kept memory"][1]
    background = share / speed["save_folder (checksums, fsync)"][1]
    restore = share / speed["read_folder (verified)"][1]
    return [billions, ranks, 12 * billions, share, blocked, background, restore]


def checkpoint_command(gigabytes: float, rounds: int, folder: str | None) -> None:
    """Print bandwidths, and the arithmetic of larger checkpoints."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        speed = bandwidths(Path(name), gigabytes, rounds)
    title = f"{gigabytes:g} GB in float32, {rounds} rounds, one thread, torch {torch.__version__}"
    headers = ["measured", "GB/s", "GB a second of the processor"]
    measured = [(name, *both) for name, both in speed.items()]
    print(f"{title}\n\n{tabulate(measured, headers, 'pipe', floatfmt='.2f')}\n")
    rows = [
        costs(speed, billions, ranks)
        for billions in (1, 10, 100)
        for ranks in (8, 64, 512)
    ]
    headers = ["billion parameters", "ranks", "GB", "GB a rank"]
    headers += ["blocked, s", "in the background, s", "restore, s"]
    print(
        tabulate(rows, headers, tablefmt="pipe", floatfmt=("g", "g", "g", *[".3g"] * 4))
    )


def choosing(samples: int, ranks: int = 4096, share: int = 32) -> list[Any]:
    """Seconds to the first batch of the second epoch, us for each later one, and MiB for both.

    These are processor times, which other programs disturb least.
    """
    with one_of(ranks):
        loader: Any = build_train_loader(
            range(samples),  # type: ignore[arg-type]
            total_batch_size=ranks * share,
            seed=0,
        )
        loader.batches = samples // (ranks * share) * 3 // 2
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.process_time()
        batches = loader._keys()
        next(batches)
        first = time.process_time() - start
        count = 2000
        list(islice(batches, count))
        each = (time.process_time() - start - first) / count * 1e6
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return [samples, first, each, (after - before) // 1024]


def sampler_command(sizes: list[int]) -> None:
    """Print the cost of choosing the samples of a rank."""
    rows = [choosing(size) for size in sizes]
    headers = ["samples", "first batch, s", "each later one, us", "MiB"]
    print(tabulate(rows, headers, "pipe", intfmt=",", floatfmt=("g", ".4f", ".1f")))


def open_files(rank: int, ranks: int, port: int, lazy: bool, results: Any) -> None:
    """Join, communicate, and create the group for background saves; count open files after each."""

    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    def talk() -> None:
        comm.synchronize()
        comm.broadcast(rank)
        comm.all_gather(rank)

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    # As if on machines of eight.
    os.environ.update(LOCAL_RANK=str(rank % 8), LOCAL_WORLD_SIZE="8")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["TORCH_GLOO_LAZY_INIT"] = str(int(lazy))
    before = count()
    join_processes("pytorch", "gloo")
    counts = [count() - before]
    talk()
    counts.append(count() - before)
    group = dist.new_group(backend="gloo")
    comm.on_all_ranks(count, group)
    counts.append(count() - before)
    everywhere = comm.all_gather(counts)
    if rank == 0:
        results.put(everywhere)
    leave_processes()


def connections_command(worlds: list[int]) -> None:
    """Print the number of open files of rank 0, and the largest of the other ranks."""
    rows = []
    for ranks in worlds:
        for lazy in (False, True):
            results = multiprocessing.SimpleQueue()
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            work = (ranks, port, lazy, results)
            start_processes(open_files, work, ranks, start_method="fork")
            first, *others = results.get()
            most = [max(counts) for counts in zip(*others, strict=True)]
            both = [f"{a} / {b}" for a, b in zip(first, most, strict=True)]
            rows.append([ranks, "where they talk" if lazy else "all", *both])
    headers = ["ranks", "connected", "joined", "talked", "one more group"]
    print(tabulate(rows, headers, "pipe"))


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="what", required=True)
    ranks = commands.add_parser("ranks", help="what grows with the number of ranks")
    ranks.add_argument("--worlds", type=int, nargs="+", default=[8, 64, 512, 4096])
    ranks.add_argument("--losses", type=int, nargs="+", default=[1, 10, 100])
    ranks.add_argument("--rounds", type=int, default=25)
    ranks.add_argument("--iterations", type=int, default=500)
    saves = commands.add_parser("checkpoint", help="the cost of a checkpoint")
    saves.add_argument("--gigabytes", type=float, default=1.0)
    saves.add_argument("--rounds", type=int, default=5)
    saves.add_argument(
        "--folder", help="on the disk to measure; a temporary one by default"
    )
    indices = commands.add_parser("index", help="the cost of a folder's index")
    indices.add_argument("--worlds", type=int, nargs="+", default=[8, 64, 512, 4096])
    indices.add_argument("--tensors", type=int, default=900)
    turns = commands.add_parser("saves", help="compare two revisions")
    turns.add_argument("revisions", nargs=2)
    turns.add_argument("--megabytes", type=float, default=200)
    turns.add_argument("--rounds", type=int, default=8)
    samplers = commands.add_parser("sampler", help="the cost of choosing samples")
    samplers.add_argument(
        "--samples", type=int, nargs="+", default=[10**6, 10**7, 10**8]
    )
    files = commands.add_parser("connections", help="the open files of real ranks")
    files.add_argument("--worlds", type=int, nargs="+", default=[8, 32, 64])
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if args.what == "ranks":
        ranks_command(args.worlds, args.losses, args.rounds, args.iterations)
    elif args.what == "index":
        index_command(args.worlds, args.tensors)
    elif args.what == "saves":
        saves_command(args.revisions, args.megabytes, args.rounds)
    elif args.what == "sampler":
        sampler_command(args.samples)
    elif args.what == "connections":
        connections_command(args.worlds)
    else:
        checkpoint_command(args.gigabytes, args.rounds, args.folder)


if __name__ == "__main__":
    main()
