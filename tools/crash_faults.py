"""Runs a training in processes of its own, and disturbs it, for tools/crash_campaign.py."""

import faulthandler
import multiprocessing
import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from crash_scripts import SCRIPTS, WATCHDOG_SECONDS, Variant
from crash_store import Proxy, environment
from torch.multiprocessing.spawn import ProcessContext, start_processes

from hooktrain.checkpoint.resume import checkpoint_names, read_pointer
from hooktrain.engine import launch
from hooktrain.utils import comm

CONTEXT = multiprocessing.get_context("forkserver")
LIMIT_SECONDS = 120.0
GRACE_SECONDS = 15.0  # for the processes that the first one leaves
STACKS = signal.SIGQUIT  # makes a process print its stacks
# The code that multiprocessing gives a process if its fork server is gone.
SERVER_GONE = 255
ERRORS = {"a full disk": 28, "an input/output error": 5, "a stale file handle": 116}


class LostRunError(Exception):
    """A run that did not survive."""


# In the processes of the training.


@dataclass
class AtCall:
    """Kills one rank, or makes it fail, at a system call that changes files in the folder."""

    number: int
    error: int | None = None  # None kills
    rank: int = 0
    folder: str = ""  # in place of the output folder
    seconds: float = 0.0  # how long each call takes

    def install(self, folder: str) -> None:
        """Count the calls of this process from now on."""
        sys.addaudithook(partial(self._audit, self.folder or folder))
        fsync = os.fsync

        def counted(file: Any) -> None:
            self._count()
            fsync(file)

        os.fsync = counted

    def _audit(self, folder: str, event: str, args: tuple[Any, ...]) -> None:
        changes = event in (
            "os.rename",
            "os.remove",
            "os.rmdir",
            "os.mkdir",
            "os.truncate",
        )
        if event == "open" and isinstance(args[2], int):
            changes = bool(args[2] & (os.O_WRONLY | os.O_RDWR))
        if changes and str(args[0]).startswith(folder):
            self._count()

    def _count(self) -> None:
        time.sleep(self.seconds)
        self.number -= 1
        if self.number == 0 and self.error is None:
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.number == 0:
            raise OSError(self.error, os.strerror(self.error or 0))


def main(folder: str, variant: Variant, at_call: AtCall | None) -> None:
    """Run the script in each rank."""
    if variant.port:
        os.environ.update(environment(variant.port))
    if at_call is not None and comm.get_rank() == at_call.rank % comm.get_world_size():
        at_call.install(folder)
    SCRIPTS[variant.script].main(folder, variant)


def train(folder: str, variant: Variant, at_call: AtCall | None) -> None:
    """Start the ranks, in the first process of a run, which begins a session."""
    launch_copies(main, variant.ranks, (folder, variant, at_call))


def launch_copies(function: Any, ranks: int, args: tuple[Any, ...]) -> None:
    """Call a function in ranks that are copies of this process, which begins a session.

    Args:
        function: the function that each rank calls.
        ranks: the number of ranks.
        args: its arguments. The first one is the output folder, and the log is beside it.
    """
    os.setsid()
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{args[0]}.collectives_"
    with open(f"{args[0]}.log", "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.register(STACKS, file=2)  # of the copies of this process too
    torch.set_num_threads(1)
    # New interpreters would spend seconds on importing torch.
    multiprocessing.set_start_method("fork", force=True)
    module: Any = sys.modules[launch.__module__]
    module.start_processes = start_copies
    launch(function, ranks, args=args)


def start_copies(
    function: Any, args: tuple[Any, ...], count: int, join: Literal[False] = False
) -> ProcessContext:
    """Start ranks that are copies of this process, and let them run once all of them exist.

    This process serves the store where they meet. When one connects, the store's thread looks up
    its name and holds a lock of the C library, which would stay locked in a copy made then.
    """
    reading, writing = os.pipe()
    work = partial(begin_with_all, reading, writing, function)
    context = start_processes(work, args, count, join, start_method="fork")
    os.close(reading)
    os.close(writing)
    return context


def begin_with_all(
    reading: int, writing: int, function: Any, index: int, *args: Any
) -> None:
    """In each copy: wait until every process has closed the pipe, then call the function."""
    os.close(writing)
    os.read(reading, 1)
    os.close(reading)
    function(index, *args)


# In the process of the campaign.


def parents(session: int) -> dict[int, int]:
    """The living processes of a session, each with its parent."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, _, of, *_ = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(of) == session and state != "Z":
            found[int(path.parent.name)] = int(parent)
    return found


def by_role(first: int, ranks: int) -> dict[str, list[int]]:
    """The processes of a run by their roles."""
    tree = parents(first)
    of_ranks = (
        [first]
        if ranks == 1
        else [pid for pid, parent in tree.items() if parent == first]
    )
    workers = [pid for pid, parent in tree.items() if parent in of_ranks]
    return {"all": list(tree), "rank": of_ranks, "worker": workers, "parent": [first]}


def kill(first: int) -> bool:
    """Kill all processes of a session; return whether there were any."""
    return send(signal.SIGKILL, list(parents(first)))


def send(number: int, processes: list[int]) -> bool:
    """Send a signal; return whether any of the processes still existed."""
    hit = False
    for process in processes:
        try:
            os.kill(process, number)
            hit = True
        except ProcessLookupError:
            pass
    return hit


def strike(fault: str, process: Any, variant: Variant, draw: random.Random) -> bool:
    """Inflict a fault on a running training; return whether it was hit."""
    roles = by_role(process.pid, variant.ranks)
    one = [draw.choice(roles["rank"])] if roles["rank"] else []
    number = draw.choice((signal.SIGTERM, signal.SIGINT))
    if fault.startswith("SIGKILL to one rank"):
        return send(signal.SIGKILL, one)
    if fault.startswith("SIGKILL to the parent"):
        return variant.ranks > 1 and send(signal.SIGKILL, roles["parent"])
    if fault.startswith("SIGKILL to a loader worker"):
        return send(signal.SIGKILL, roles["worker"][:1])
    if fault.startswith("SIGKILL"):
        return send(signal.SIGKILL, roles["all"])
    if fault.startswith("SIGTERM or SIGINT to one"):
        return send(number, one)
    if fault.startswith("SIGTERM or SIGINT to all"):
        return send(number, roles["all"])
    if fault == "all processes are suspended":
        hit = send(signal.SIGSTOP, roles["all"])
        time.sleep(WATCHDOG_SECONDS + 1)
        send(signal.SIGCONT, roles["all"])
        return hit
    if fault == "a rank hangs":  # the only one would stop its own watchdog too
        return variant.ranks > 1 and send(signal.SIGSTOP, one)
    return send(signal.SIGSTOP, roles["worker"][:1])


def run(
    folder: Path,
    variant: Variant,
    fault: str = "",
    seconds: float = 0,
    draw: Any = random,
    at_call: AtCall | Proxy | None = None,
) -> tuple[int, bool]:
    """Disturb a training, and wait for its end; return its exit code and whether it was hit."""
    in_rank = at_call if isinstance(at_call, AtCall) else None
    has_hooks = SCRIPTS[variant.script].has_hooks
    if "system call" in fault:
        error = draw.choice(list(ERRORS.values())) if "fails" in fault else None
        at_call = in_rank = AtCall(draw.randint(1, 60), error, draw.randrange(12))
    if "disk of one rank was slow" in fault:  # as one of a network may be
        at_call = in_rank = AtCall(0, rank=draw.randrange(12), seconds=0.03)
    log = Path(f"{folder}.log")
    before = log.stat().st_size if log.exists() else 0
    process = CONTEXT.Process(target=train, args=(str(folder), variant, in_rank))
    process.start()
    if isinstance(at_call, Proxy):
        at_call.process = process.pid
    hit = begun = False
    if fault and (at_call is None or at_call.seconds):
        # Most runs resume, and have only a part left to do.
        process.join(draw.uniform(0, seconds / 3))
        # A run that is still starting has neither a watchdog nor anything to save.
        begun = log.exists() and b"Saving checkpoint" in log.read_bytes()[before:]
        may_strike = (begun and has_hooks) or not fault.endswith("hangs")
        hit = (
            may_strike and process.is_alive() and strike(fault, process, variant, draw)
        )
    end(process)
    # After the last save a signal ends the process without waiting.
    saves = hit and begun and b"Total training time" not in log.read_bytes()[before:]
    asked = saves and has_hooks and fault.startswith("SIGTERM or SIGINT")
    if asked and process.exitcode == 1:
        raise LostRunError("a signal was answered with an error")
    if at_call is not None:
        hit |= process.exitcode != 0
    return process.exitcode, hit


def end(process: Any) -> None:
    """Wait for the end of all processes of a training."""
    process.join(LIMIT_SECONDS)
    deadline = time.monotonic() + GRACE_SECONDS
    while (left := parents(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    if left:
        for each in left:  # one after the other: they write to the same log
            send(STACKS, [each])
            time.sleep(0.2)
        kill(process.pid)
        raise LostRunError(
            f"{len(left)} processes did not end; the log has their stacks"
        )
    if process.exitcode == SERVER_GONE:
        raise RuntimeError("something has ended the fork server of the campaign itself")


def damage(folder: Path, fault: str, draw: random.Random) -> None:
    """Damage the pointer of a killed run, or its newest checkpoint if there is an older one."""
    names = [name for name in checkpoint_names(str(folder)) if "best" not in name]
    newest = folder / read_pointer(str(folder))
    if "pointer" in fault:
        (folder / "last_checkpoint").write_bytes(draw.randbytes(draw.randrange(9)))
    elif len(names) > 1 and newest != folder:
        files = [newest] if newest.is_file() else sorted(newest.iterdir())
        path = draw.choice(files)
        content = bytearray(path.read_bytes())
        place = draw.randrange(max(1, len(content)))
        how = draw.choice(("flip", "cut", "zeros", "empty"))
        if how == "flip" and content:
            content[place] ^= 1 << draw.randrange(8)
        elif how == "zeros":
            content[place : place + 4096] = bytes(len(content[place : place + 4096]))
        else:
            del content[place if how == "cut" else 0 :]
        path.write_bytes(content)
