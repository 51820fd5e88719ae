"""Starting processes, joining a launcher, and what happens when one fails or is asked to end."""

import json
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from multiprocessing.context import ForkProcess
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from gloo import run_ranks, torchrun
from hooktrain.engine.launch import launch
from hooktrain.utils import comm
from processes import CONTEXT, alive, end, start, start_program, wait_until

LAUNCH = sys.modules[launch.__module__]  # hooktrain.engine.launch is the function
LIMIT_SECONDS = 60


def place() -> tuple[int, int, int, int]:
    return (
        comm.get_rank(),
        comm.get_world_size(),
        comm.get_local_rank(),
        comm.get_local_size(),
    )


def write_place(folder: Path) -> None:
    method = multiprocessing.get_start_method()  # of loader workers
    found = place(), os.getppid(), torch.get_num_threads(), method
    Path(folder, str(comm.get_rank())).write_text(json.dumps(found))


def test_a_single_process_is_a_plain_call_with_its_result() -> None:
    result = object()
    pid, got, grouped = launch(
        lambda r: (os.getpid(), r, dist.is_initialized()), args=(result,)
    )
    assert pid == os.getpid()
    assert got is result
    assert not grouped


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_machines": 2, "machine_rank": 2}, "got 2"),
        ({"num_machines": 2}, "got None"),
        ({"num_machines": 2, "dist_url": "auto"}, "got 'auto'"),
    ],
)
def test_arguments_that_cannot_work_are_refused(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        launch(place, **arguments)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `launch` start copies of the fork server in place of interpreters of their own."""
    forked = partial(start_processes, start_method=CONTEXT.get_start_method())
    monkeypatch.setattr(LAUNCH, "start_processes", forked)


def test_a_single_task_of_srun_is_a_plain_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PROCID=0", "NTASKS=1", "LOCALID=0", "GTIDS=0"):
        monkeypatch.setenv(*f"SLURM_{name}".split("="))
    assert launch(dist.is_initialized) is False


def launch_as_a_guest() -> tuple[int, int, bool]:
    """In a group that Ray, a notebook or a test has made, also with torchrun's variables."""
    rank, world = dist.get_rank(), dist.group.WORLD
    os.environ.update(torchrun(3), RANK=str(rank), LOCAL_RANK=str(rank))

    def sum_of_ranks(first: int) -> int:
        return int(comm.all_reduce(torch.tensor(first + dist.get_rank())).item())

    total = launch(sum_of_ranks, 2, args=(10,))
    with pytest.raises(KeyError, match="own"):  # the error itself, as it came
        launch({}.__getitem__, args=("own",))
    dist.barrier()
    return rank, total, dist.group.WORLD is world


def test_launch_joins_the_group_that_is_there_and_does_not_leave_it() -> None:
    assert run_ranks(launch_as_a_guest, 3) == [(i, 33, True) for i in range(3)]


def test_started_processes_are_the_ranks_and_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert launch(write_place, 2, args=(tmp_path,)) is None
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    found = [json.loads((tmp_path / str(i)).read_text()) for i in range(2)]
    method = multiprocessing.get_all_start_methods()[0]  # the default of the platform
    assert found == [
        [[0, 2, 0, 2], os.getpid(), threads, method],
        [[1, 2, 1, 2], os.getpid(), threads, method],
    ]


def fail_in_rank_1_alone() -> None:
    """Rank 0 hangs and does not heed a polite request; rank 2 fails because rank 1 has left."""
    if comm.get_rank() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(10 * LIMIT_SECONDS)
    if comm.get_rank() == 1:
        raise KeyError("the cause")
    dist.barrier()


def die_in_rank_1_alone() -> None:
    """Rank 0 hangs: if it failed too, the parent might hear of that first."""
    if comm.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(10 * LIMIT_SECONDS)


def exit_in_order(folder: str) -> None:
    """Rank 0 still has files to close when the other one has ended."""
    if comm.get_rank() == 0:
        time.sleep(0.5)
        Path(folder, "closed").touch()
    sys.exit(75)


@pytest.mark.usefixtures("forked")
def test_machines_meet_at_the_address_they_are_given(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"tcp://127.0.0.1:{torchrun()['MASTER_PORT']}"

    def start_machine(i: int) -> None:
        limit = timedelta(seconds=LIMIT_SECONDS)
        launch(write_place, 1, 2, i, url, (tmp_path,), limit)

    machines = [threading.Thread(target=start_machine, args=(i,)) for i in range(2)]
    for machine in machines:
        machine.start()
    for machine in machines:
        machine.join()
    found = [json.loads((tmp_path / str(i)).read_text())[0] for i in range(2)]
    assert found == [[0, 2, 0, 1], [1, 2, 0, 1]]
    # Who calls it in another thread than the main one is told what that costs.
    assert caplog.text.count("SIGTERM ends the run at once") == 2


@pytest.mark.usefixtures("forked")
def test_the_error_of_the_first_rank_that_fails_comes_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(LAUNCH, "_GRACE_SECONDS", 0.5)
    get_temp_dir()  # that of the fork server
    # torch leaves the file in which a process has written its error.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(RuntimeError, match="failed") as caught:
        launch(fail_in_rank_1_alone, 3)
    assert "rank 1 failed" in str(caught.value)
    assert "in fail_in_rank_1_alone" in str(caught.value)
    assert str(caught.value).endswith("KeyError: 'the cause'")


FAIL = """
import torch, torch.distributed as dist
from hooktrain.engine import launch

def fail():
    open_one = dist.all_reduce(torch.ones(1), async_op=True)
    raise KeyError("the cause")

launch(fail)
"""


def join_and_wait(variables: dict[str, str]) -> None:
    os.environ.update(variables)
    launch(time.sleep, args=(10 * LIMIT_SECONDS,))


def test_a_rank_that_fails_ends_while_others_keep_it_waiting() -> None:
    shared = torchrun(world_size=2)
    waiting = start(join_and_wait, shared)
    try:
        # An interpreter of its own, whose end is what may hang.
        failed = subprocess.run(
            [sys.executable, "-c", FAIL],
            env={**os.environ, **shared, "RANK": "1", "LOCAL_RANK": "1"},
            stderr=subprocess.PIPE,
            text=True,
            timeout=LIMIT_SECONDS,
        )
        assert waiting.is_alive()
    finally:
        waiting.kill()
        end(waiting)
    assert failed.returncode == 1
    assert failed.stderr.strip().endswith("KeyError: 'the cause'")


def fail_and_be_asked_to_end(variables: dict[str, str]) -> None:
    """Torchrun asks this rank to end, since another one has failed, as it writes its error."""

    def write(error: Any, file: Any) -> None:
        file.write(json.dumps(error))
        os.kill(os.getpid(), signal.SIGTERM)

    json.dump = write
    os.environ.update(variables)
    launch(dist.all_reduce)  # which needs a tensor


def test_torchrun_finds_the_whole_error_of_a_rank_that_it_ends(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    elastic = {"TORCHELASTIC_RUN_ID": "1", "TORCHELASTIC_ERROR_FILE": str(file)}
    assert end(start(fail_and_be_asked_to_end, {**torchrun(), **elastic})) == 1
    assert "TypeError: " in json.loads(file.read_text())["message"]["message"]


@pytest.mark.usefixtures("forked")
def test_a_rank_that_is_killed_is_named_with_its_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LAUNCH, "_GRACE_SECONDS", 0.5)
    with pytest.raises(RuntimeError, match=r"rank 1 .* SIGKILL"):
        launch(die_in_rank_1_alone, 2)


def die_in_an_exchange() -> None:
    """Rank 1 is killed while the others wait for its metrics."""
    comm.synchronize()
    if comm.get_rank() == 1:
        comm.max_and_sum(torch.ones(3), 1)
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        comm.max_and_sum(torch.ones(3), 1)


@pytest.mark.usefixtures("forked")
def test_a_rank_that_is_killed_in_an_exchange_of_metrics_is_named_in_time() -> None:
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 1 .* SIGKILL"):
        launch(die_in_an_exchange, 3)
    assert time.monotonic() - begin < 30  # not the 30 minutes of the process group


@pytest.mark.usefixtures("forked")
def test_an_exit_code_comes_back_when_the_other_ranks_have_ended(
    tmp_path: Path,
) -> None:
    with pytest.raises(SystemExit) as caught:
        launch(exit_in_order, 2, args=(str(tmp_path),))
    assert caught.value.code == 75
    assert (tmp_path / "closed").exists()


def exit_or_wait(code: int) -> None:
    """Rank 1 ends with a code, or the parent gets a signal of that number."""
    comm.synchronize()
    if code < 0 and comm.get_rank() == 1:
        os.kill(os.getppid(), -code)
    if code < 0 or comm.get_rank() == 0:
        time.sleep(10 * LIMIT_SECONDS)
    sys.exit(code)


def launch_without_logging(code: int, printed: Path) -> None:
    logging.getLogger().handlers.clear()
    sys.stderr = printed.open("w", buffering=1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    LAUNCH.start_processes = partial(start_processes, start_method="fork")  # type: ignore[attr-defined]
    LAUNCH._GRACE_SECONDS = 0.1  # type: ignore[attr-defined]
    try:
        launch(exit_or_wait, 2, args=(code,))
    except KeyboardInterrupt:
        sys.exit(2)


@pytest.mark.parametrize(
    ("code", "of_parent", "said"),
    [
        (75, 75, r"rank 1 failed: .* exit code 75\n"),
        (-signal.SIGTERM, -signal.SIGTERM, r"rank . failed: .* signal SIGTERM\n"),
        (-signal.SIGINT, 2, ""),
    ],
)
def test_without_logging_too_it_is_printed_which_rank_has_ended_how(
    code: int, of_parent: int, said: str, tmp_path: Path
) -> None:
    printed = tmp_path / "printed"
    assert end(start(launch_without_logging, code, printed)) == of_parent
    assert re.fullmatch(said, printed.read_text())


def wait_for_an_interrupt(folder: Path) -> None:
    Path(folder, f"pid{comm.get_rank()}").write_text(str(os.getpid()))
    time.sleep(10 * LIMIT_SECONDS)


def launch_and_tell_of_ctrl_c(folder: Path) -> None:
    # A shell has its jobs in the background ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    LAUNCH.start_processes = partial(start_processes, start_method="fork")  # type: ignore[attr-defined]
    try:
        launch(wait_for_an_interrupt, 2, args=(folder,))
    except KeyboardInterrupt:
        sys.exit(7)


def test_ctrl_c_in_the_ranks_is_a_keyboard_interrupt_of_the_parent(
    tmp_path: Path,
) -> None:
    parent = start(launch_and_tell_of_ctrl_c, tmp_path)
    files = [tmp_path / "pid0", tmp_path / "pid1"]
    wait_until(lambda: all(f.exists() and f.read_text() for f in files))
    os.kill(parent.pid, signal.SIGINT)
    assert end(parent, 20) == 7
    assert not any(alive(int(f.read_text())) for f in files)


def run_until_a_signal(folder: Path, heeds: bool) -> None:
    stopped: list[bool] = []
    if heeds:
        signal.signal(
            signal.SIGINT, signal.SIG_IGN
        )  # torch's own message of a parent's death
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda *_: stopped.append(True))
    partly = Path(folder, f"partly{comm.get_rank()}")
    partly.write_text(str(os.getpid()))
    partly.rename(Path(folder, f"pid{comm.get_rank()}"))
    while not stopped:
        time.sleep(0.02)
    Path(folder, f"saved{comm.get_rank()}").touch()
    sys.exit(75)


def launch_two(folder: Path, heeds: bool) -> None:
    # Of this process only.
    LAUNCH.start_processes = partial(start_processes, start_method="fork")  # type: ignore[attr-defined]
    launch(run_until_a_signal, 2, args=(folder, heeds))


def start_by_torchrun(folder: Path) -> Any:
    script = folder / "script.py"
    script.write_text(
        "import sys, test_launch\nfrom hooktrain.engine import launch\n"
        "launch(test_launch.run_until_a_signal, args=(sys.argv[1], True))"
    )
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return start_program(*torchrun, script, folder, output=folder / "printed")


@contextmanager
def started(
    tmp_path: Path, heeds: bool, by_torchrun: bool = False
) -> Iterator[tuple[Any, list[int]]]:
    """The process that launches and the ids of its two ranks; none of them stays behind."""
    parent = (
        start_by_torchrun(tmp_path)
        if by_torchrun
        else start(launch_two, tmp_path, heeds)
    )
    files = [tmp_path / "pid0", tmp_path / "pid1"]
    try:
        wait_until(lambda: all(f.exists() for f in files) or not parent.is_alive())
        yield parent, [int(f.read_text()) for f in files]
    finally:
        parent.kill()
        parent.join()
        for child in [int(f.read_text()) for f in files if f.exists()]:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("by_torchrun", [False, True])
def test_a_parent_that_is_killed_leaves_no_orphans(
    tmp_path: Path, by_torchrun: bool
) -> None:
    with started(tmp_path, heeds=True, by_torchrun=by_torchrun) as (parent, children):
        parent.kill()
        parent.join()
        wait_until(lambda: not any(map(alive, children)))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_to_the_parent_ends_the_ranks_in_order(
    tmp_path: Path, number: int
) -> None:
    with started(tmp_path, heeds=True) as (parent, children):
        os.kill(parent.pid, number)
        assert end(parent) == 75
        assert (tmp_path / "saved0").exists()
        assert (tmp_path / "saved1").exists()
        assert not any(map(alive, children))


def launch_under_nohup(folder: Path) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    launch_two(folder, heeds=True)


def test_under_nohup_a_closed_terminal_ends_neither_the_parent_nor_the_ranks(
    tmp_path: Path,
) -> None:
    parent = start(launch_under_nohup, tmp_path)
    files = [tmp_path / "pid0", tmp_path / "pid1"]
    wait_until(lambda: all(file.exists() for file in files))
    for pid in [parent.pid, *(int(file.read_text()) for file in files)]:
        status = Path(f"/proc/{pid}/status").read_text()
        ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
        assert ignored >> (signal.SIGHUP - 1) & 1
    os.kill(parent.pid, signal.SIGTERM)
    assert end(parent) == 75
    assert len(list(tmp_path.glob("saved*"))) == 2


def launch_and_interrupt(folder: Path) -> None:
    start_one = ForkProcess.start

    def start_and_interrupt(process: ForkProcess) -> None:
        start_one(process)
        os.kill(os.getpid(), signal.SIGINT)

    ForkProcess.start = start_and_interrupt  # type: ignore[method-assign]  # of this process only
    launch_two(folder, heeds=False)


def test_a_signal_while_the_ranks_are_started_ends_all(tmp_path: Path) -> None:
    parent = start(launch_and_interrupt, tmp_path)
    assert end(parent, 20) in (1, -signal.SIGINT)
    for file in tmp_path.glob("pid*"):
        assert not alive(int(file.read_text()))


def test_a_signal_that_ends_the_ranks_ends_the_parent_too(tmp_path: Path) -> None:
    with started(tmp_path, heeds=False) as (parent, children):
        parent.terminate()
        assert end(parent) == -signal.SIGTERM
        assert not any(map(alive, children))
