"""Runs a function in several real processes that form a gloo process group.

    from gloo import run_ranks

    def rank_and_sum(value):
        tensor = torch.tensor(value + dist.get_rank())
        dist.all_reduce(tensor)
        return tensor.item()

    assert run_ranks(rank_and_sum, 2, 10) == [21, 21]

The processes are copies of the fork server in tests/processes.py. It keeps the environment
variables it was started with, so hand values over as arguments.
"""

import multiprocessing.connection
import os
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from processes import CONTEXT, as_on_its_own

NOT_CONNECTED = ", before the function was called"


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    limit_seconds: float = 60.0,
) -> list[Any]:
    """Call `function(*args)` in `world_size` processes; return what each rank returned.

    Args:
        function: stands at the top level of a module. The process group is initialised around it
            (backend gloo) and destroyed after it.
        world_size: the number of processes.
        args: handed to `function`; these and the results are pickled.
        limit_seconds: when the call takes longer, every process is killed.

    Raises:
        RuntimeError: a rank failed (a skip counts as a failure); holds the traceback of the first.
        TimeoutError: the limit was reached.
    """
    for attempt in range(3):
        try:
            return _run_once(function, world_size, args, limit_seconds)
        except RuntimeError as error:
            # On a busy machine gloo now and then fails to connect two processes as they start.
            if NOT_CONNECTED not in str(error) or attempt == 2:
                raise
    raise AssertionError("the last attempt returned or raised")


def _run_once(
    function: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    limit_seconds: float,
) -> list[Any]:
    with tempfile.TemporaryDirectory(prefix="run-ranks-") as name:
        folder = Path(name)
        processes = [
            CONTEXT.Process(
                target=_run_rank, args=(folder, rank, world_size, function, args)
            )
            for rank in range(world_size)
        ]
        try:
            for process in processes:
                process.start()
            _wait(processes, folder, limit_seconds)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        return [
            pickle.loads((folder / f"result-{r}").read_bytes())
            for r in range(world_size)
        ]


def _wait(processes: list[Any], folder: Path, limit_seconds: float) -> None:
    """Return when every process has ended well; raise as soon as one has not."""
    deadline = time.monotonic() + limit_seconds
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    while running:
        ended = multiprocessing.connection.wait(
            running, max(0.0, deadline - time.monotonic())
        )
        if not ended:
            raise TimeoutError(
                f"ranks {sorted(running.values())} run for over {limit_seconds} s"
            )
        for rank in [running.pop(sentinel) for sentinel in ended]:
            processes[rank].join()
            failure, exitcode = folder / "failure", processes[rank].exitcode
            if failure.exists():
                raise RuntimeError(failure.read_text())
            if exitcode != 0 or not (folder / f"result-{rank}").exists():
                raise RuntimeError(f"rank {rank} left no result, exit code {exitcode}")


def _run_rank(
    folder: Path,
    rank: int,
    world_size: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    as_on_its_own()
    when = NOT_CONNECTED
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        when = ""
        result = pickle.dumps(function(*args))
        if dist.is_initialized():
            dist.destroy_process_group()
        (folder / f"result-{rank}").write_bytes(result)
    except BaseException:
        # The first to fail is the cause; the others fail because it has left them. A link is there
        # with its whole content or not at all.
        own = folder / f"failure-{rank}"
        own.write_text(f"failure in rank {rank}{when}:\n{traceback.format_exc()}")
        with suppress(FileExistsError):
            os.link(own, folder / "failure")
        raise


def torchrun(world_size: int = 1) -> dict[str, str]:
    """The variables of torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size))
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {"RANK": "0", "LOCAL_RANK": "0", **sizes, **meeting}
