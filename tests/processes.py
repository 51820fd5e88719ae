"""Runs Python programs in processes that have imported torch and the package already.

    done = run_program("tools/train_net.py", "--config-file", "configs/digits_cnn.py")
    assert done.returncode == 0, done.stdout

The processes are copies of a fork server. The first one of a test run costs as much as its imports
do, which is seconds, and the later ones next to nothing. All else is as with a command: arguments,
folder, environment, output, exit code, signals.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import run as torchrun

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "pytest",
        "torch._dynamo",  # which the first optimizer imports, and that takes seconds
        "torch.distributed.run",
        "torch.utils.tensorboard",  # which every run writes to
        "hooktrain.checkpoint.folders",
        "hooktrain.demos",
        "hooktrain.engine",
        "hooktrain.evaluation",
        "hooktrain.strategy",
    ]
)
LIMIT_SECONDS = 120.0
GLOO: Any = dist.ProcessGroupGloo
MAKE_GLOO = GLOO.__init__


def start(function: Callable[..., Any], *args: Any) -> Any:
    """Start a process that calls `function(*args)`, in a group of its own; end it by `end`."""
    process = CONTEXT.Process(target=_call, args=(function, args))
    process.start()
    return process


def end(process: Any, limit_seconds: float = LIMIT_SECONDS) -> int:
    """Wait for a process of `start`, kill what it leaves behind, and return its exit code."""
    process.join(limit_seconds)
    alive = process.is_alive()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    if alive:
        raise TimeoutError(f"the process ran for over {limit_seconds} s")
    return int(process.exitcode)


def wait_until(condition: Callable[[], object]) -> None:
    """Look a hundred times a second, and fail after the limit."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited for {LIMIT_SECONDS} s"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process runs, also one of others that nobody has waited for yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.setsid()  # the group of the process, with the workers of its loaders
    as_on_its_own()
    function(*args)


def as_on_its_own() -> None:
    """Set what multiprocessing has changed in this process, and what every test sets."""
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    GLOO.__init__ = _with_one_thread


def _with_one_thread(
    self: Any, store: Any, rank: int, size: int, **settings: Any
) -> None:
    """Make a group of gloo that completes its collectives in one thread, not in two.

    Without a lock, each thread writes the name of what it has completed to one string of the
    group (torch 2.8 to 2.15). A name that does not fit into the string itself, such as that of
    a gather of shards, is freed twice then, or written to when it is freed: seldom, and the
    heap is damaged.
    """
    options = GLOO._Options()
    options._devices = [GLOO.create_default_device()]
    options._threads = 1
    options._timeout = settings["timeout"]
    MAKE_GLOO(self, store, rank, size, options)


def start_program(
    *command: str | Path,
    output: Path | None,
    folder: Path | None = None,
    **environment: str,
) -> Any:
    """Start `python command`: a script or `-m` and a module, then arguments. End it by `end`.

    Args:
        command: of `-m torch.distributed.run`, the ranks are copies of the process too, but with
            `--no-python` what it says.
        output: the file for what is printed; None closes stdin and both outputs.
        folder: the current one by default.
        environment: what is different from the environment of this process.
    """
    environment = {**os.environ, **environment}
    return start(_become, [str(part) for part in command], output, folder, environment)


def run_program(
    *command: str | Path, folder: Path | None = None, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """What `subprocess.run` gives; `stdout` holds both outputs."""
    with tempfile.TemporaryDirectory(prefix="run-program-") as temporary:
        output = Path(temporary, "output")
        code = end(start_program(*command, output=output, folder=folder, **environment))
        return subprocess.CompletedProcess(command, code, output.read_text())


def _become(
    command: list[str],
    output: Path | None,
    folder: Path | None,
    environment: dict[str, str],
) -> None:
    if output is None:
        os.closerange(0, 3)
        sys.stdin = sys.stdout = sys.stderr = None  # type: ignore[assignment]
    else:
        with open(output, "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    os.chdir(folder or ".")
    os.environ.clear()
    os.environ.update(environment)
    _run(*command)


def _run(*command: str) -> None:
    if command[:2] == ("-m", torchrun.__name__):
        if "--no-python" not in command:
            torchrun.config_from_args = _with_forked_ranks(torchrun.config_from_args)
        torchrun.main(list(command[2:]))
    elif command[0] == "-m":
        sys.argv[:] = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = command
        sys.path.insert(0, str(Path(command[0]).parent))
        runpy.run_path(command[0], run_name="__main__")


def _with_forked_ranks(config_from_args: Callable[..., Any]) -> Callable[..., Any]:
    def changed(args: Any) -> tuple[Any, Callable[..., None], list[str]]:
        config, _, (_, *command) = config_from_args(args)  # python, -u and the script
        config.start_method = "fork"
        return config, _run_rank, command

    return changed


def _run_rank(*command: str) -> None:
    for number in (
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGQUIT,
    ):  # torchrun handles them
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A copy makes its pool of threads again at the first call. Two threads of a backward pass
    # at once would find none (builds of torch for CUDA).
    torch.set_num_threads(1)
    _run(*command)
