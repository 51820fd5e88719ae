"""Disturb real training runs at random, and check that they end like undisturbed ones.

    python tools/crash_campaign.py --faults 200

A try trains one of the scripts in tools/crash_scripts.py, with one to four ranks, with or without
loader workers, with files or folders of shards, in the foreground or the background. It runs in
child processes, which tools/crash_faults.py starts and disturbs. Half of the tries, except those of
detectron2's script, compute in bfloat16 and accumulate gradients. The core's script also reads a
stream in half of its tries, stops early in half of them, and shards the model in half of them
(FSDP). Four ranks that write folders shard it in two groups of two (HSDP). ``--ranks 3 4`` draws
only these numbers, with equal probability; by default one or two ranks are drawn in two thirds of
the tries. Faults strike a run one after the other, and after each the same command continues the
run. At the end its weights, optimizer, hooks, best model and rows of metrics must equal those of an
undisturbed run, bit for bit, with no process and no temporary file left. The log must say so too:
each resume compares the rows that it truncates with those that it computes again. All random
choices are drawn from ``--seed`` and the number of the try; only the moments at which the operating
system acts on them differ.

With ``--lose-machine`` the scripts have a store beside their disk. The faults are those of
machines: the processes are killed and the folder is deleted, at any time or at a request to the
store; requests fail or are slow; another machine continues the run while the first one is still
training. At the end the store alone must hold the run, without files that rotation should have
deleted. In every third try the machines have 4, 3, 2 or 1 ranks, with DDP or FSDP; then the samples
and the rows are compared. Every third try is of a script that uses compat's trainers. The store is
a folder; with ``--s3`` it is an S3 server, behind a proxy that also truncates requests and answers,
repeats requests and returns late listings (``pip install -e '.[store-server]'``).
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import compare_revisions
import fsspec
from crash_faults import (
    CONTEXT,
    ERRORS,
    AtCall,
    LostRunError,
    damage,
    end,
    kill,
    run,
    train,
)
from crash_scripts import ITERATIONS, SCRIPTS, Variant
from crash_store import Proxy, environment, s3_server
from tabulate import tabulate

from hooktrain.checkpoint.loading import read_checkpoint
from hooktrain.checkpoint.store import Store
from hooktrain.events import load_json_metrics

# Texts that the core logs or raises; a test checks that it does.
ROWS_ARE_LOST = (b"NOT WRITTEN", b"METRICS ARE LOST")
BEST_IS_REFUSED = b"the next better model is saved"
NOT_IN_THE_STORE = b"NOT IN THE STORE"
STORE_IS_TAKEN = b"another process has taken over the run"
STORE_HAS_A_RUN = b"already has a run"

TIMES = ("time", "data_time", "rank_data_time", "eta_seconds")

# The weight with which each fault is drawn.
FAULTS = {
    "SIGKILL to all processes": 6,
    "SIGKILL to all processes, and the disk of one rank was slow": 2,
    "SIGKILL to one rank": 3,
    "SIGKILL at a system call of a save": 6,
    "SIGKILL to the parent of the ranks": 1,
    "SIGKILL to a loader worker": 1,
    "SIGTERM or SIGINT to one process": 1.5,
    "SIGTERM or SIGINT to all processes": 1.5,
    "a system call of a save fails": 3,
    "SIGKILL, and the newest checkpoint is damaged": 1.5,
    "SIGKILL, and the pointer is damaged": 1,
    "a rank hangs": 0.1,
    "a loader worker hangs": 0.1,
    "all processes are suspended": 0.1,
}

# The faults of a campaign that loses machines.
MACHINE_FAULTS = {
    "the machine is lost": 4,
    "the machine is lost at a request to the store": 4,
    "the machine is lost, and the store was slow": 2,
    "the machine is lost, and the store has a damaged checkpoint": 1,
    "a request to the store fails": 2,
    "another machine continues the run": 2,
}

S3_FAULTS = {
    **MACHINE_FAULTS,
    "a request to the store is cut": 2,
    "a request to the store is repeated": 1,
    "the machine is lost, and the store listed late": 2,
}

# Every other try is of a script that uses compat. These are shorter, so they get less than half of
# the faults, but more than a third.
TURNS = ("core", "DefaultTrainer", "core", "StepTrainer", "core", "own loop")

# One of them is drawn for each try.
RANKS = (1, 1, 2, 2, 3, 4)


def outcome(folder: Path) -> Any:
    """The outcome in which a disturbed run must equal an undisturbed one."""
    # Not by the pointer, which a fault may have damaged after the run was complete.
    last = [*folder.glob("model_final*"), *folder.glob(f"iter_{ITERATIONS}*")]
    state = read_checkpoint(str(last[0]))
    for name in ("meta", "storage"):  # the date, and metrics that are times
        state.get("trainer", {}).pop(name, None)
    best = {}
    for path in folder.glob("model_best*"):
        saved = read_checkpoint(str(path))
        best = {"model": saved["model"], "best": saved["best"]}
    rows = []
    if (folder / "metrics.json").exists():
        rows = load_json_metrics(folder / "metrics.json")
    rows = [{k: v for k, v in row.items() if k not in TIMES} for row in rows]
    return {**state, "best": best, "rows": rows}


def differences(ours: Any, theirs: Any) -> list[str]:
    """The names of the parts that are not equal."""
    return [path for path, _, _ in compare_revisions.differences(ours, theirs)]


def proof_problem(said: str) -> str:
    """The problem, if any, that the resumes of a try report about the rows they computed again."""
    _, cut, of_last = said.rpartition("which this run computes again and compares: ")
    if "Not resumed exactly" in said:
        return "a resume found rows that differ"
    count = re.match("[1-9][0-9]*", of_last)
    if cut and count and "Resumed exactly" not in of_last:
        return f"the last resume has not proved {count[0]} rows"
    return ""


def where_they_part(undisturbed: Path, folder: Path, ranks: int) -> str:
    """The report of tools/compare.py about two runs of the configuration."""
    tool = Path(__file__).with_name("compare.py")
    command = [sys.executable, tool, undisturbed, folder, f"--ranks={ranks}"]
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ).stdout


class Campaign:
    """The tries and their results.

    Args:
        seed: the seed of all random choices.
        faults: the number of faults that must strike.
        folder: the folder for the runs.
        rounds: the smallest and the largest number of faults in a try.
        ranks: the numbers of ranks, of which one is drawn for each try.
    """

    kinds: ClassVar = FAULTS

    def __init__(
        self,
        seed: int,
        faults: int,
        folder: Path,
        rounds: tuple[int, int] = (4, 12),
        ranks: Sequence[int] = RANKS,
    ) -> None:
        self.seed, self.faults, self.folder = seed, faults, folder
        self.rounds, self.ranks = rounds, ranks
        self.struck: Counter[tuple[str, str]] = Counter()  # by script and fault
        self.failures: list[tuple[int, Variant, list[str], str]] = []
        self._undisturbed: dict[Variant, tuple[Path, Any, float]] = {}
        self._lock = threading.Lock()

    def undisturbed(self, variant: Variant) -> tuple[Path, Any, float]:
        """The folder and outcome of an undisturbed run of a variant, and its seconds.

        The outcome depends neither on where a checkpoint is written nor, except for a stream, on
        workers.
        """
        workers = variant.workers if variant.streams else 0
        fsdp = variant.fsdp and variant.ranks > 1
        changed = {"background": False, "store": "", "port": 0}
        variant = replace(variant, workers=workers, fsdp=fsdp, **changed)
        with self._lock:
            if variant not in self._undisturbed:
                folder = self.folder / f"undisturbed-{len(self._undisturbed)}"
                start = time.monotonic()
                code, _ = run(folder, variant)
                if code != 0:
                    raise RuntimeError(f"an undisturbed run fails: see {folder}.log")
                seconds = time.monotonic() - start
                self._undisturbed[variant] = folder, outcome(folder), seconds
            return self._undisturbed[variant]

    def variant(self, number: int, folder: Path, draw: random.Random) -> Variant:
        """The variant that a try trains."""
        flags = (False, True)
        script = TURNS[number % len(TURNS)]
        # Streams, early stops and the choice of FSDP are the core's.
        further = flags if script == "core" else (False,)
        # detectron2 has neither bfloat16 nor accumulation.
        mixed = flags if script != "DefaultTrainer" else (False,)
        choices = product(self.ranks, (0, 2), flags, flags, *[further] * 3, mixed)
        return Variant(script, *draw.choice(list(choices)))

    def disturb(
        self, folder: Path, variant: Variant, fault: str, seconds: float, draw: Any
    ) -> tuple[int, bool]:
        """Start a run and disturb it; return its exit code, and whether the fault struck."""
        code, hit = run(folder, variant, fault, seconds, draw)
        if hit and "damaged" in fault and folder.is_dir():
            damage(folder, fault, draw)
        return code, hit

    def last_run(self, folder: Path, variant: Variant) -> int:
        """Start the run once more, to its end; return its exit code."""
        code, _ = run(folder, variant)
        return code

    def comparable(self, outcome: Any, variant: Variant) -> Any:
        """The part of an outcome that must equal that of an undisturbed run."""
        return outcome

    def left(self, folder: Path, variant: Variant) -> list[str]:
        """The names of files that should not be there."""
        return [path.name for path in folder.rglob("*") if ".tmp-" in path.name]

    def forget(self, folder: Path, variant: Variant) -> None:
        """Delete the files of a try that has survived."""
        shutil.rmtree(folder)
        Path(f"{folder}.log").unlink()

    def attempt(self, number: int) -> None:
        """Make one try: some faults, then a run to the end."""
        draw = random.Random(f"{self.seed} {number}")
        folder = self.folder / f"try-{number}"
        variant = self.variant(number, folder, draw)
        undisturbed, expected, seconds = self.undisturbed(variant)
        log = Path(f"{folder}.log")
        log.touch()
        struck: list[str] = []
        problem = ""
        try:
            for _ in range(draw.randint(*self.rounds)):
                (fault,) = draw.choices(list(self.kinds), list(self.kinds.values()))
                code, hit = self.disturb(folder, variant, fault, seconds, draw)
                if hit:
                    struck.append(fault)
                if code == 0:
                    break
            code = self.last_run(folder, variant)
            if code != 0:
                raise LostRunError(f"it does not continue: exit code {code}")
            of_both = [
                self.comparable(each, variant) for each in (outcome(folder), expected)
            ]
            different = differences(*of_both)
            said = log.read_bytes()
            excused: tuple[str, ...] = ()
            # A full disk refused rows, or a run truncated them before its pointer was damaged.
            if any(loss in said for loss in ROWS_ARE_LOST):
                excused += (".rows",)
            of_best = ".trainer.hooks.BestCheckpointer."
            # A full disk refused a best model, so an earlier one remains.
            if BEST_IS_REFUSED in said:
                excused += (".best", of_best)
            # If the last checkpoint of a complete run is damaged, the run's end is repeated, with
            # knowledge of the best model of the final evaluation.
            if re.search(rb"Passing over the checkpoint \S+model_final", said):
                excused += (of_best,)
            different = [path for path in different if not path.startswith(excused)]
            if different:
                text = f"bent: {different[:3]}"
                if variant.script == "core" and not variant.ranks_change:
                    parted = where_they_part(undisturbed, folder, variant.ranks)
                    text += f"\n{parted}"
                raise LostRunError(text)
            unproved = proof_problem(said.decode())
            if unproved and not variant.ranks_change:
                raise LostRunError(unproved)
            if left := self.left(folder, variant):
                raise LostRunError(f"files are left: {left}")
        except Exception as error:
            problem = str(error)
        with self._lock:
            self.struck.update((variant.script, fault) for fault in struck)
            if problem:
                self.failures.append((number, variant, struck, problem))
            failures = len(self.failures)
            total = f"{self.struck.total()} faults, {failures} failures"
            print(f"try {number}: {problem or 'survived'}; {total}", flush=True)
        if not problem:
            self.forget(folder, variant)

    def table(self) -> str:
        """How often each fault struck each script."""
        rows = []
        for fault in self.kinds:
            counts = [self.struck[script, fault] for script in SCRIPTS]
            rows.append((fault, *counts, sum(counts)))
        sums = [sum(column) for column in list(zip(*rows, strict=True))[1:]]
        return tabulate([*rows, ("all", *sums)], headers=["fault", *SCRIPTS, "all"])

    def go(self, jobs: int) -> None:
        """Make tries until enough faults have struck."""
        numbers = iter(range(1_000_000))

        def work() -> None:
            while self.struck.total() < self.faults:
                with self._lock:
                    number = next(numbers)
                self.attempt(number)

        with ThreadPoolExecutor(jobs) as pool:
            threads = [pool.submit(work) for _ in range(jobs)]
            try:
                for thread in threads:
                    thread.result()
            except KeyboardInterrupt:
                self.faults = 0  # no new tries


class LostMachines(Campaign):
    """Tries in which machines are lost, and only the store remains."""

    kinds: ClassVar = MACHINE_FAULTS

    def variant(self, number: int, folder: Path, draw: random.Random) -> Variant:
        """A script with a store."""
        flags = (False, True)
        place = self.place(folder)
        if number % 3 == 1:
            script = ("DefaultTrainer", "StepTrainer")[number // 3 % 2]
            parts = draw.choice(list(product(self.ranks, (0, 2), flags, flags)))
            mixed = script == "StepTrainer" and draw.random() < 0.5
            return Variant(script, *parts, False, False, False, mixed, *place)
        choices = list(product(self.ranks, (0, 2), *[flags] * 6))
        variant = Variant("core", *draw.choice(choices), *place)
        if number % 3 == 0:
            return variant
        return replace(
            variant, ranks=1, ranks_change=True, streams=False, stops_early=False
        )

    def place(self, folder: Path) -> tuple[str, int]:
        """The address of the store of a try, and the port of its server."""
        return f"file://{folder}-store", 0

    def disturber(self, fault: str, variant: Variant, draw: random.Random) -> Any:
        """The object that disturbs requests to the store, if the fault is of that kind."""
        folder = variant.store.removeprefix("file://")
        if "slow" in fault:
            return AtCall(0, folder=folder, seconds=0.03)
        if "request" in fault:
            error = draw.choice(list(ERRORS.values())) if "fails" in fault else None
            return AtCall(draw.randint(1, 100), error, folder=folder)
        return None

    def comparable(self, outcome: Any, variant: Variant) -> Any:
        """Only the data and the rows' iterations, if the number of ranks has changed.

        In detectron2's order of hooks the final evaluation comes after the last upload.
        """
        if variant.script == "DefaultTrainer":
            last = {"iteration": ITERATIONS - 1}.items()
            rows = [r for r in outcome["rows"] if "lr" in r or not last <= r.items()]
            return {**outcome, "rows": rows}
        if not variant.ranks_change:
            return outcome
        rows = [row["iteration"] for row in outcome["rows"] if len(row) > 1]  # no times
        return {"data": outcome["trainer"]["data"], "rows": rows}

    def disturb(
        self, folder: Path, variant: Variant, fault: str, seconds: float, draw: Any
    ) -> tuple[int, bool]:
        """Start a run on a machine that is lost, or whose store fails."""
        if variant.ranks_change:
            ranks, fsdp = draw.choice((4, 2, 3, 1)), draw.choice((False, True))
            variant = replace(variant, ranks=ranks, fsdp=fsdp)
        if fault.startswith("another machine"):
            return self.two_machines(folder, variant, seconds, draw)
        log = Path(f"{folder}.log")
        before = log.stat().st_size
        at_call = self.disturber(fault, variant, draw)
        loses = "lost" in fault
        signalled = f"SIGKILL, {fault}" if loses else fault
        code, hit = run(folder, variant, signalled, seconds, draw, at_call)
        if loses and hit:
            shutil.rmtree(folder, ignore_errors=True)
        if hit and "damaged" in fault:
            self.damage(variant.store, draw)
        return code, hit or NOT_IN_THE_STORE in log.read_bytes()[before:]

    def two_machines(
        self, folder: Path, variant: Variant, seconds: float, draw: Any
    ) -> tuple[int, bool]:
        """Start another machine while the first one is training; the first one must end then."""
        first = CONTEXT.Process(target=train, args=(str(folder), variant, None))
        log = Path(f"{folder}.log")
        before = log.stat().st_size
        first.start()
        first.join(draw.uniform(0, seconds / 2))
        other = Path(f"{folder}-other")
        code, _ = run(other, variant)
        end(first)
        stops = STORE_IS_TAKEN in log.read_bytes()[before:]
        if first.exitcode != 0 and not stops:
            raise LostRunError("the first of two machines ends with another error")
        said = Path(f"{other}.log").read_bytes()
        # It has found nothing to resume from in the store, but then a run appeared there.
        is_late = STORE_HAS_A_RUN in said
        if code != 0 and (stops or not (is_late or STORE_IS_TAKEN in said)):
            raise LostRunError("the second of two machines ends with an error")
        shutil.rmtree(folder if code == 0 else other, ignore_errors=True)
        if code == 0:
            other.rename(folder)
        return code, stops

    def damage(self, store: str, draw: random.Random) -> None:
        """Truncate or alter a file of the newest checkpoint, if there is an earlier one."""
        system, root = fsspec.url_to_fs(store)
        checkpoints = [each for each in named_in(store) if each["iteration"] >= 0]
        if len(checkpoints) > 1:
            own = [f"{root}/{key}" for key in checkpoints[-1]["files"].values()]
            path = draw.choice([path for path in own if system.size(path)])
            content = bytearray(system.cat_file(path))
            place = draw.randrange(len(content))
            if draw.random() < 0.5:
                del content[place:]
            else:
                content[place] ^= 1 << draw.randrange(8)
            system.pipe_file(path, bytes(content))

    def last_run(self, folder: Path, variant: Variant) -> int:
        """Run to the end; afterwards only the files in the store count."""
        code = super().last_run(folder, variant)
        shutil.rmtree(folder)
        next(Store(variant.store, folder).names_to_resume([]), None)
        return code

    def left(self, folder: Path, variant: Variant) -> list[str]:
        """See the base class. Also the files that the pointer of the store does not name."""
        there = names_in(variant.store)
        named = set(there[-1:])  # the pointer
        for saved in named_in(variant.store):
            named.update(saved["files"].values())
        return super().left(folder, variant) + sorted(named.symmetric_difference(there))

    def forget(self, folder: Path, variant: Variant) -> None:
        """See the base class. Also the store, and the log of the other machine."""
        super().forget(folder, variant)
        system, root = fsspec.url_to_fs(variant.store)
        system.rm(root, recursive=True)
        Path(f"{folder}-other.log").unlink(missing_ok=True)


class S3Machines(LostMachines):
    """The same with an S3 server as the store.

    Args:
        port: the port of the server.
        args: see the base class.
        kwargs: see the base class.
    """

    kinds: ClassVar = S3_FAULTS

    def __init__(self, port: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._port = port
        self._proxies: dict[str, Proxy] = {}
        os.environ.update(environment(port))
        with suppress(FileExistsError):
            fsspec.filesystem("s3").mkdir("bucket")

    def place(self, folder: Path) -> tuple[str, int]:
        """See the base class."""
        store = f"s3://bucket/{folder.name}"
        proxy = self._proxies[store] = Proxy(self._port, kill)
        return store, proxy.port

    def disturber(self, fault: str, variant: Variant, draw: random.Random) -> Any:
        """See the base class."""
        proxy = self._proxies[variant.store]
        proxy.plan("", 0)
        number = draw.randrange(40)
        if "slow" in fault:
            proxy.plan("", 0, seconds=0.1)
        elif "lost at a request" in fault:
            proxy.plan(draw.choice(("kill", "kill at the answer")), number)
        elif "fails" in fault:
            proxy.plan("refuse", number, draw.choice((1, 3, 30)))
        elif "is cut" in fault:
            how = draw.choice(("cut", "cut the answer"))
            proxy.plan(how, number, draw.choice((1, 3, 30)))
        elif "repeated" in fault:
            proxy.plan("repeat", number, draw.choice((1, 3, 30)))
        elif "late" in fault:
            proxy.plan("late", 0, 1000, seconds=0.01)
        else:
            return None
        return proxy

    def disturb(
        self, folder: Path, variant: Variant, fault: str, seconds: float, draw: Any
    ) -> tuple[int, bool]:
        """See the base class. A request that was repeated counts too."""
        code, hit = super().disturb(folder, variant, fault, seconds, draw)
        proxy = self._proxies[variant.store]
        hit |= proxy.struck > 0
        proxy.plan("", 0)
        return code, hit

    def forget(self, folder: Path, variant: Variant) -> None:
        """See the base class. Also closes the proxy."""
        super().forget(folder, variant)
        self._proxies.pop(variant.store).close()


def names_in(store: str) -> list[str]:
    """The sorted names of the files in a store; the last one is its pointer."""
    system, root = fsspec.url_to_fs(store)
    system.invalidate_cache()
    if not system.exists(root):
        return []
    return sorted(Path(path).name for path in system.ls(root, detail=False))


def named_in(store: str) -> Any:
    """The checkpoints that the pointer of a store names."""
    system, root = fsspec.url_to_fs(store)
    pointers = names_in(store)[-1:]
    return json.loads(system.cat_file(f"{root}/{pointers[0]}")) if pointers else []


def preload_forkserver(*further: str) -> None:
    """Let the fork server import the modules that each run needs, and wait for it."""
    modules = (
        "torch._dynamo",
        "torch.utils.tensorboard",
        "hooktrain.checkpoint.folders",
    )
    CONTEXT.set_forkserver_preload([*modules, "crash_faults", *further])
    first = CONTEXT.Process(target=int)
    first.start()
    first.join()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=100, help="the number of faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="TRY", help="repeat this try alone")
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        default=RANKS,
        help="each try draws one of these",
    )
    parser.add_argument("--jobs", type=int, default=1, help="tries at the same time")
    parser.add_argument(
        "--folder", type=Path, help="for the runs; failed runs are kept"
    )
    parser.add_argument(
        "--lose-machine", action="store_true", help="machines with stores are lost"
    )
    parser.add_argument(
        "--s3", action="store_true", help="with --lose-machine: an S3 store"
    )
    options = parser.parse_args()
    preload_forkserver(*["s3fs"] * options.s3)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="crash-campaign-"))
    folder.mkdir(parents=True, exist_ok=True)
    kind: Any = LostMachines if options.lose_machine else Campaign
    with ExitStack() as stack:
        if options.s3:
            kind = partial(S3Machines, stack.enter_context(s3_server()))
        campaign = kind(options.seed, options.faults, folder, ranks=options.ranks)
        if options.only is None:
            campaign.go(options.jobs)
        else:
            campaign.attempt(options.only)
    print(campaign.table())
    print(f"tries that were lost or bent: {len(campaign.failures)}")
    for number, variant, struck, problem in campaign.failures:
        print(json.dumps({"try": number, "variant": str(variant), "faults": struck}))
        print(f"  {problem}; see {folder}/try-{number}.log; repeat it by")
        lose = " --lose-machine" * options.lose_machine + " --s3" * options.s3
        ranks = " ".join(map(str, options.ranks))
        print(f"  python {sys.argv[0]} --seed {options.seed} --ranks {ranks}{lose}")
        print(f"    --only {number}")
    if not campaign.failures:
        shutil.rmtree(folder)
    sys.exit(bool(campaign.failures))
