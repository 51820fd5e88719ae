"""Cut the power of runs that save, and check that each ends as if nothing had happened.

    python tools/crash_power.py --cuts 300

A kill keeps everything that was written to the operating system. A power cut does not: data that no
``fsync`` has flushed to the disk may be lost, wholly or in part, in any order. This tool keeps
track of that. A small run trains in child processes, and writes each change of its output folder to
a list: a file or a folder is created, renamed, removed or flushed. It ends at a random change. Then
the folder is rebuilt as a disk may have it after a power cut at that moment:

- The names in a folder change in the order of the list. Each change that is not followed by an
  ``fsync`` of that folder may be lost independently, so renames and deletions are reordered.
- The data written to a file since its last ``fsync`` are dropped, cut in half, zeroed or kept.

The same command continues in the rebuilt folder, may be cut once or twice more, and then completes
the run. It must not resume from before the newest checkpoint that was safe at a cut. At the end its
weights, optimizer, best model and rows of metrics must equal those of an uninterrupted run, bit for
bit; the log must say that the run resumed exactly; and no temporary file may be left. The tries
have one rank or two, and save files or folders of shards, in the foreground or the background, with
old checkpoints deleted. Everything random is drawn from ``--seed`` and the number of the try.
"""

import argparse
import json
import os
import random
import shutil
import stat
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from crash_campaign import differences, outcome, proof_problem
from crash_faults import CONTEXT, LostRunError, end, kill, launch_copies
from tabulate import tabulate
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hooktrain.checkpoint import Checkpointer
from hooktrain.checkpoint.resume import iteration_in_name
from hooktrain.data import build_train_loader
from hooktrain.engine import SimpleTrainer, hooks
from hooktrain.events import JSONWriter
from hooktrain.model.sharding import shard_model
from hooktrain.strategy import create_ddp_model
from hooktrain.utils import comm
from hooktrain.utils.logger import setup_logger

ITERATIONS = 14
CUT = 7  # the exit code of the process that the power cut ends
LOSSES = ("dropped", "cut", "zeroed", "kept")  # what happens to unflushed data


@dataclass(frozen=True)
class Variant:
    """How a run is set up.

    Attributes:
        ranks: 1 or 2 processes.
        sharded: save folders of shards; two ranks also shard the model.
        background: save in the background.
    """

    ranks: int
    sharded: bool
    background: bool

    def __str__(self) -> str:
        kind = "folders" if self.sharded else "files"
        place = "background" if self.background else "foreground"
        return f"{kind}, {self.ranks} ranks, {place}"


VARIANTS = [Variant(*each) for each in product((1, 2), (False, True), (False, True))]


# In the processes of the training.


class Net(nn.Module):
    """A small network with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.5), nn.Linear(40, 2))

    def forward(self, data: list[Tensor]) -> dict[str, Tensor]:
        """A loss."""
        return {"loss": self.layers(data[0]).square().mean()}


def train(folder: str, variant: Variant, recorder: "Recorder | None") -> None:
    """In each rank: train, with checkpoints that rotate, a best model and metrics."""
    if recorder is not None:
        recorder.install()
    setup_logger(distributed_rank=comm.get_rank())
    torch.manual_seed(3)
    is_divided = variant.sharded and variant.ranks > 1
    model = shard_model(Net()) if is_divided else create_ddp_model(Net())
    samples = TensorDataset(
        torch.randn(64, 6, generator=torch.Generator().manual_seed(5))
    )
    loader = build_train_loader(samples, total_batch_size=4, num_workers=0, seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = SimpleTrainer(model, loader, optimizer)
    trainer.seed = 3
    checkpointer = Checkpointer(
        model,
        folder,
        sharded=variant.sharded,
        background=variant.background,
        trainer=trainer,
    )

    def evaluate() -> dict[str, float]:
        return {"score": -abs(trainer.iter - 9.0)}

    def record_start() -> None:
        if comm.is_main_process():
            Path(f"{folder}.start").write_text(str(trainer.start_iter))

    trainer.register_hooks(
        [
            hooks.EvalHook(5, evaluate),
            hooks.BestCheckpointer(checkpointer, "score", "max"),
            hooks.PeriodicWriter([JSONWriter(Path(folder, "metrics.json"))], 2),
            hooks.PeriodicCheckpointer(checkpointer, 3, max_to_keep=2),
            hooks.CallbackHook(before_train=lambda _: record_start()),
        ]
    )
    checkpointer.resume_or_load("")
    trainer.train(max_iter=ITERATIONS)


@dataclass
class Recorder:
    """Writes each change of a folder to a list, and ends the process at a chosen one.

    A change is a line of JSON: the rank, the kind, a path, the inode and the size of the file
    there, and the new path of a rename. It is written before the change is made; an ``fsync`` is
    written when it is complete. Each file gets a hard link in another folder, named by its inode,
    so the contents of files that the run removes remain available.

    Attributes:
        folder: the output folder.
        keep: a folder for the list and the hard links.
        rank: the rank of the process to end.
        number: the number of the change at which it ends; -1 for none.
    """

    folder: str
    keep: str
    rank: int
    number: int

    def install(self) -> None:
        """Record the changes of this process from now on."""
        path = os.path.join(self.keep, "changes")
        self._list = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        sys.addaudithook(self._audit)
        fsync = os.fsync

        def recorded(file: Any) -> None:
            fsync(file)
            descriptor = file if isinstance(file, int) else file.fileno()
            self._record("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))

        os.fsync = recorded

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            changes = isinstance(flags, int) and flags & (os.O_CREAT | os.O_TRUNC)
            if changes and not isinstance(path, int):
                kind = "write anew" if flags & os.O_TRUNC else "write"
                self._record(kind, path_in(path, -1))
        elif event == "os.rename":
            target = path_in(args[1], args[3])
            self._keep(target)
            self._record("rename", path_in(args[0], args[2]), target)
        elif event in ("os.remove", "os.rmdir", "os.mkdir"):
            self._record(event[3:], path_in(args[0], args[-1]))

    def _record(self, kind: str, path: str, target: str = "") -> None:
        if not f"{path}/".startswith(f"{self.folder}/"):
            return
        rank = comm.get_rank()
        is_cut = rank == self.rank and self.number == 0
        self.number -= rank == self.rank
        change = [rank, "cut" if is_cut else kind, path, *self._keep(path), target]
        os.write(self._list, (json.dumps(change) + "\n").encode())
        if is_cut:
            os._exit(CUT)

    def _keep(self, path: str) -> tuple[int, int]:
        """Link a file into the other folder; return its inode and its size."""
        try:
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode):
                second = os.path.join(self.keep, str(status.st_ino))
                with suppress(FileExistsError):  # perhaps by another thread or rank
                    os.link(path, second)
            return status.st_ino, status.st_size
        except FileNotFoundError:  # perhaps another rank has removed it
            return 0, 0


def path_in(path: Any, descriptor: int) -> str:
    """The absolute path; relative to an open folder if the descriptor is not negative."""
    base = f"/proc/self/fd/{descriptor}" if descriptor >= 0 else "."
    return os.path.join(os.path.realpath(base), os.fspath(path))


# In the process of the tool.


@dataclass
class Node:
    """A file or a folder on the disk.

    Attributes:
        is_folder: whether it is a folder.
        inode: the inode of a file, 0 until it is known.
        flushed: the number of bytes of a file that are safe.
    """

    is_folder: bool
    inode: int = 0
    flushed: int = 0


@dataclass
class Change:
    """A node gets a name, loses one, or both (a rename).

    Attributes:
        node: the number of the file or folder.
        old: the folder's number and the name that it loses, or None.
        new: the folder's number and the name that it gets, or None.
        is_safe: whether the change survives a power cut.
    """

    node: int
    old: tuple[int, str] | None
    new: tuple[int, str] | None
    is_safe: bool = False


Names = dict[int, dict[str, int]]
"""For each folder, by its number, the numbers of its nodes by name."""


class Disk:
    """Keeps track of what an output folder contains, and of which changes are safe.

    Args:
        folder: when a run begins. All of it is on the disk then.

    Attributes:
        nodes: by their numbers; the output folder is 0.
        changes: of names, in their order.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.nodes = [Node(True)]
        self.changes: list[Change] = []
        self._start: Names = {0: {}}
        self._read(folder, 0)
        self._now = self.names([])

    def _read(self, folder: Path, number: int) -> None:
        for path in sorted(folder.iterdir()):
            status = path.stat()
            node = self._add(path.is_dir(), status.st_ino, status.st_size)
            self._start[number][path.name] = node
            if path.is_dir():
                self._start[node] = {}
                self._read(path, node)

    def _add(self, is_folder: bool, inode: int = 0, size: int = 0) -> int:
        self.nodes.append(Node(is_folder, inode, size))
        return len(self.nodes) - 1

    def _place(self, path: str) -> tuple[int, str]:
        """The number of the folder of a path, and the name in it."""
        number = 0
        *folders, name = Path(path).relative_to(self._folder).parts
        for each in folders:
            number = self._now.get(number, {}).get(each, -1)
        return number, name

    def record(self, kind: str, path: str, inode: int, size: int, target: str) -> None:
        """Record a change from the list of a :class:`Recorder`."""
        if path == str(self._folder):
            number: int | None = 0
        else:
            old = self._place(path)
            number = self._now.get(old[0], {}).get(old[1])
        if kind == "fsync":
            if number is not None:  # else it was removed
                self._flush(number, inode, size)
        elif number is None:
            if kind in ("write", "write anew", "mkdir"):
                self._enter(Change(self._add(kind == "mkdir"), None, old))
            return  # a missing file cannot be renamed or removed
        elif kind == "write anew":
            self.nodes[number].flushed = 0
        elif kind == "rename":
            self._enter(Change(number, old, self._place(target)))
        elif kind in ("remove", "rmdir"):
            self._enter(Change(number, old, None))
        if number is not None and inode and not self.nodes[number].is_folder:
            self.nodes[number].inode = inode

    def _enter(self, change: Change) -> None:
        self.changes.append(change)
        self._apply(change, self._now)

    def _flush(self, number: int, inode: int, size: int) -> None:
        if not self.nodes[number].is_folder:
            self.nodes[number].flushed = size
            return
        for change in self.changes:
            place = change.new or change.old
            change.is_safe |= place is not None and place[0] == number

    def _apply(self, change: Change, names: Names) -> None:
        """Change the names, unless a change that this one needs was lost."""
        if change.old is not None:
            folder, name = change.old
            if names.get(folder, {}).get(name) != change.node:
                return
            del names[folder][name]
        if change.new is not None and change.new[0] in names:
            folder, name = change.new
            names[folder][name] = change.node
            if self.nodes[change.node].is_folder:
                names.setdefault(change.node, {})

    def names(self, lost: list[Change]) -> Names:
        """The names of all files and folders, if some changes are lost."""
        names = {number: dict(of) for number, of in self._start.items()}
        for change in self.changes:
            if not any(change is each for each in lost):
                self._apply(change, names)
        return names

    def unsafe(self) -> list[Change]:
        """The changes that a power cut may lose."""
        return [change for change in self.changes if not change.is_safe]

    def missing(self) -> list[str]:
        """The paths in the folder that no change explains. The other files get their inodes."""
        missing = []
        for path in self._folder.rglob("*"):
            folder, name = self._place(str(path))
            number = self._now.get(folder, {}).get(name)
            if number is None:
                missing.append(str(path))
            else:
                self.nodes[number].inode = path.stat().st_ino
        return missing

    def safe_iteration(self, keep: Path) -> int:
        """The iteration of the newest checkpoint that survives any power cut, or -1."""
        names = self.names(self.unsafe())
        pointer = names[0].get("last_checkpoint")
        if pointer is None:
            return -1
        content = Path(keep, str(self.nodes[pointer].inode)).read_bytes()
        name = content[: self.nodes[pointer].flushed].decode()
        iteration = iteration_in_name(name)
        return ITERATIONS - 1 if iteration is None else iteration


def cut_power(
    disk: Disk, keep: Path, folder: Path, draw: random.Random
) -> Counter[str]:
    """Rebuild the folder as it may be after a power cut; count what is lost."""
    share = draw.choice((0.0, 0.3, 0.7, 1.0))
    lost = [each for each in disk.unsafe() if draw.random() < share]
    names = disk.names(lost)
    counts = Counter({"changes of names that are lost": len(lost)})
    shutil.rmtree(folder)

    def build(number: int, path: Path) -> None:
        path.mkdir()
        for name, child in names[number].items():
            node = disk.nodes[child]
            if node.is_folder:
                build(child, path / name)
                continue
            source = keep / str(node.inode)
            content = source.read_bytes() if source.exists() else b""
            how = draw.choice(LOSSES)
            (path / name).write_bytes(lose(content, node.flushed, how))
            if len(content) > node.flushed:
                counts[f"files with data that are {how}"] += 1

    build(0, folder)
    return counts


def lose(content: bytes, flushed: int, how: str) -> bytes:
    """The content that a power cut leaves of a file, whose first bytes were flushed."""
    safe, rest = content[:flushed], content[flushed:]
    if how == "dropped":
        rest = b""
    elif how == "cut":
        rest = rest[: len(rest) // 2]
    elif how == "zeroed":
        rest = bytes(len(rest))
    return safe + rest


def check_start(folder: Path, safe: int) -> None:
    """Raise a LostRunError if a run did not resume from an iteration or a later one."""
    path = Path(f"{folder}.start")
    if path.exists():
        start = int(path.read_text())
        path.unlink()
        if start <= safe:
            raise LostRunError(f"it begins at {start}, and {safe} was safe on the disk")


class Cuts:
    """The tries and their results.

    Args:
        seed: of everything random.
        folder: for the runs.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed, self.folder = seed, folder.resolve()
        self.cuts: Counter[Variant] = Counter()
        self.lost: Counter[str] = Counter()  # at the cuts
        self.failures: list[str] = []
        self._undisturbed: dict[Variant, tuple[Any, list[int]]] = {}

    def undisturbed(self, variant: Variant) -> tuple[Any, list[int]]:
        """The outcome of a run that is not cut, and how many changes each rank makes."""
        if variant not in self._undisturbed:
            folder = self.folder / f"undisturbed-{len(self._undisturbed)}"
            _, lines = self.run(folder, variant)
            ranks = [line[0] for line in lines]
            counts = [ranks.count(rank) for rank in range(variant.ranks)]
            self._undisturbed[variant] = outcome(folder), counts
        return self._undisturbed[variant]

    def run(
        self, folder: Path, variant: Variant, rank: int = 0, number: int = -1
    ) -> tuple[bool, list[Any]]:
        """Train until a change; return whether it was cut there, and the list of changes."""
        keep = Path(f"{folder}.keep")
        shutil.rmtree(keep, ignore_errors=True)
        keep.mkdir()
        folder.mkdir(exist_ok=True)
        for path in filter(Path.is_file, folder.rglob("*")):
            os.link(path, keep / str(path.stat().st_ino))
        recorder = Recorder(str(folder), str(keep), rank, number)
        args = (str(folder), variant, recorder)
        process = CONTEXT.Process(
            target=launch_copies, args=(train, variant.ranks, args)
        )
        process.start()
        changes = keep / "changes"
        while process.is_alive():
            process.join(0.02)
            if changes.exists() and b'"cut"' in changes.read_bytes():
                kill(process.pid)
                break
        end(process)
        lines = [json.loads(line) for line in changes.read_text().splitlines()]
        kinds = [line[1] for line in lines]
        if "cut" in kinds:
            return True, lines[: kinds.index("cut")]
        if process.exitcode != 0:
            raise LostRunError(f"it does not continue: exit code {process.exitcode}")
        return False, lines

    def cut(
        self,
        folder: Path,
        variant: Variant,
        rank: int,
        number: int,
        safe: int,
        draw: random.Random,
    ) -> int:
        """Cut the power of a run at a change.

        Args:
            folder: the folder of the run.
            variant: how it is set up.
            rank: the rank that makes the change.
            number: the number of the change.
            safe: the iteration of the newest checkpoint that was safe before, or -1.
            draw: the generator for what is lost.

        Returns:
            The iteration of the newest checkpoint that is safe.
        """
        folder.mkdir(exist_ok=True)
        disk = Disk(folder)
        was_cut, lines = self.run(folder, variant, rank, number)
        check_start(folder, safe)
        for _, *change in lines:
            disk.record(*change)
        # After a cut the other rank may have continued for a moment.
        if (missing := disk.missing()) and (variant.ranks == 1 or not was_cut):
            raise RuntimeError(f"no change has made {missing}")
        keep = Path(f"{folder}.keep")
        safe = max(safe, disk.safe_iteration(keep))
        if was_cut:
            self.lost += cut_power(disk, keep, folder, draw)
            self.lost["changes of names that are not safe"] += len(disk.unsafe())
            self.cuts[variant] += 1
        return safe

    def check(self, folder: Path, expected: Any, safe: int) -> None:
        """Raise a LostRunError if a complete run is not as it should be."""
        check_start(folder, safe)
        if different := differences(outcome(folder), expected):
            raise LostRunError(f"bent: {different[:3]}")
        said = Path(f"{folder}.log").read_text()
        if "METRICS ARE LOST" in said:
            raise LostRunError("metrics are lost that a safe checkpoint counts")
        if unproved := proof_problem(said):
            raise LostRunError(unproved)
        if left := [each.name for each in folder.iterdir() if ".tmp-" in each.name]:
            raise LostRunError(f"files are left: {left}")

    def attempt(self, number: int) -> None:
        """One try: some cuts, then to the end."""
        draw = random.Random(f"{self.seed} {number}")
        variant = VARIANTS[number % len(VARIANTS)]
        folder = self.folder / f"try-{number}"
        expected, counts = self.undisturbed(variant)
        problem = ""
        try:
            safe = -1
            for part in range(1, draw.randint(1, 3) + 1):
                rank = draw.choices(range(variant.ranks), counts)[0]
                at = draw.randrange(max(1, counts[rank] // part))
                safe = self.cut(folder, variant, rank, at, safe, draw)
            self.run(folder, variant)
            self.check(folder, expected, safe)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            self.failures.append(f"try {number} ({variant}): {problem}")
        total = f"{self.cuts.total()} cuts, {len(self.failures)} failures"
        print(f"try {number}: {problem or 'survived'}; {total}", flush=True)
        if not problem:
            for path in self.folder.glob(f"{folder.name}*"):
                if path.name.partition(".")[0] == folder.name:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

    def go(self, cuts: int) -> None:
        """Try until there were enough cuts."""
        number = 0
        while self.cuts.total() < cuts:
            self.attempt(number)
            number += 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cuts", type=int, default=100, help="at least this many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="TRY", help="repeat this try alone")
    parser.add_argument(
        "--folder", type=Path, help="for the runs; those that fail stay there"
    )
    options = parser.parse_args()
    CONTEXT.set_forkserver_preload(
        ["torch._dynamo", "hooktrain.checkpoint.folders", "crash_power"]
    )
    folder = options.folder or Path(tempfile.mkdtemp(prefix="crash-power-"))
    folder.mkdir(parents=True, exist_ok=True)
    tool = Cuts(options.seed, folder)
    if options.only is None:
        tool.go(options.cuts)
    else:
        tool.attempt(options.only)
    print(tabulate([(str(each), tool.cuts[each]) for each in VARIANTS]))
    print(f"{tool.cuts.total()} cuts, which lost in total")
    print(tabulate(sorted(tool.lost.items())))
    for failure in tool.failures:
        print(f"{failure}; see {folder}")
    if not tool.failures:
        shutil.rmtree(folder)
    sys.exit(bool(tool.failures))
