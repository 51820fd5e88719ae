"""The same script on real engines: `make engines`. Each is skipped if it is not installed."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from processes import wait_until

HERE = Path(__file__).parent
TRAIN = HERE / "train.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
# What Open MPI and Ray want to be told on a machine with few cores, or in a container.
QUIET = {
    "OMP_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "RAY_TRAIN_V2_ENABLED": "1",
}
pytestmark = pytest.mark.timeout(600)


@contextmanager
def started(*command: Any, **environment: str) -> Iterator[Any]:
    """Start a command in a process group of its own, and kill what is left of it at the end."""
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=HERE,
        env={**os.environ, **QUIET, **environment},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def run(*command: Any, **environment: str) -> None:
    with started(*command, **environment) as process:
        finish(process)


def finish(process: Any) -> None:
    printed, _ = process.communicate(timeout=400)
    assert process.returncode == 0, printed


def weights(folder: Path) -> list[torch.Tensor]:
    state = torch.load(folder / "model_final.pth", weights_only=True)
    return [*state["model"].values()]


def finished(folder: Path) -> list[tuple[int, list[int]]]:
    """The number of ranks, and the iterations that they have finished, in order."""
    lines = (folder / "iterations").read_text().splitlines()
    pairs = [[int(number) for number in line.split()] for line in lines]
    return [
        (size, [iteration for iteration, _ in group])
        for size, group in groupby(pairs, key=lambda pair: pair[1])
    ]


def wait_for(process: Any, *files: Path) -> list[int]:
    """The ids of the processes that have written the files."""
    ended = process.poll
    wait_until(lambda: all(f.exists() for f in files) or ended() is not None)
    assert all(f.exists() for f in files), process.communicate()
    return [int(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[torch.Tensor]:
    """The weights that torchrun ends with."""
    folder = tmp_path_factory.mktemp("torchrun")
    run(*TORCHRUN, 2, "--standalone", TRAIN, folder)
    assert finished(folder) == [(2, [*range(60)])]
    return weights(folder)


def check_same(folder: Path, expected: list[torch.Tensor]) -> None:
    assert all(map(torch.equal, weights(folder), expected))


def test_mpirun_gives_the_weights_of_torchrun(
    expected: list[torch.Tensor], tmp_path: Path
) -> None:
    own = Path(sys.executable).parent / "mpirun"  # of the wheel
    mpirun = shutil.which("mpirun", path=f"{own.parent}:{os.environ['PATH']}")
    if mpirun is None:
        pytest.skip("needs Open MPI")
    run(mpirun, "--oversubscribe", "-n", 2, sys.executable, TRAIN, tmp_path)
    check_same(tmp_path, expected)


@pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray")
def test_ray_gives_the_weights_of_torchrun_also_when_a_worker_is_killed(
    expected: list[torch.Tensor], tmp_path: Path
) -> None:
    with started(sys.executable, HERE / "by_ray.py", tmp_path, 25) as process:
        _, worker = wait_for(process, *(tmp_path / f"at25-{i}" for i in range(2)))
        os.kill(worker, signal.SIGKILL)
        (tmp_path / "go").touch()
        finish(process)
    check_same(tmp_path, expected)
    [(ranks, iterations)] = finished(tmp_path)
    assert ranks == 2
    # What came since the checkpoint is computed again. Rank 0 may have ended iteration 25 alone.
    assert iterations[:25] == [*range(25)]
    assert iterations[25:] in ([*range(20, 60)], [25, *range(20, 60)])


@pytest.mark.skipif(find_spec("submitit") is None, reason="needs submitit")
@pytest.mark.parametrize("first", [[], [signal.SIGTERM]])
def test_a_job_that_submitit_requeues_gives_the_weights_of_torchrun_and_loses_no_iteration(
    first: list[int], expected: list[torch.Tensor], tmp_path: Path
) -> None:
    with started(sys.executable, HERE / "by_submitit.py", tmp_path, 25) as process:
        tasks = wait_for(process, *(tmp_path / f"at25-{i}" for i in range(2)))
        for number in [*first, signal.SIGUSR2]:
            for task in tasks:
                os.kill(task, number)
        finish(process)
    check_same(tmp_path, expected)
    assert finished(tmp_path) == [(2, [*range(60)])]


@pytest.fixture(scope="module")
def slurm() -> None:
    if shutil.which("srun") is None:
        pytest.skip("needs SLURM")
    try:
        subprocess.run(["srun", "-n", "2", "true"], timeout=60, check=True)
    except (subprocess.SubprocessError, OSError):
        pytest.skip("needs a cluster of SLURM that answers")


@pytest.mark.usefixtures("slurm")
def test_srun_gives_the_weights_of_torchrun(
    expected: list[torch.Tensor], tmp_path: Path
) -> None:
    run("srun", "-n", 2, sys.executable, TRAIN, tmp_path)
    check_same(tmp_path, expected)


@contextmanager
def job_of_slurm(folder: Path) -> Iterator[tuple[Any, str]]:
    """A job that waits in iteration 25, and its number; sbatch ends when the job does."""
    output = f"--output={folder}/printed"
    job = ["sbatch", "--wait", output, HERE / "job.sh", sys.executable, folder, 25]
    with started(*job) as process:
        wait_for(process, *(folder / f"at25-{i}" for i in range(2)))
        found = subprocess.check_output(["squeue", "-h", "-o", "%i"], text=True)
        yield process, found.split()[0]


@pytest.mark.usefixtures("slurm")
def test_a_job_that_slurm_requeues_loses_no_iteration(
    expected: list[torch.Tensor], tmp_path: Path
) -> None:
    with job_of_slurm(tmp_path) as (process, number):
        subprocess.run(["scancel", "--signal=TERM", number], check=True)
        finish(process)  # SLURM starts a job again after two minutes at the earliest
    check_same(tmp_path, expected)
    assert finished(tmp_path) == [(2, [*range(60)])]


@pytest.mark.usefixtures("slurm")
def test_a_job_that_is_cancelled_saves_and_is_not_requeued(tmp_path: Path) -> None:
    with job_of_slurm(tmp_path) as (process, number):
        subprocess.run(["scancel", number], check=True)
        process.communicate(timeout=400)
    state = subprocess.check_output(["scontrol", "show", "job", number], text=True)
    assert "JobState=CANCELLED" in state
    assert "Restarts=0" in state
    [(_, iterations)] = finished(tmp_path)
    saved = (tmp_path / "last_checkpoint").read_text()
    assert saved == f"model_{iterations[-1]:07}.pth"


def test_an_agent_that_joins_loses_no_iteration_and_one_that_dies_those_since_the_checkpoint(
    tmp_path: Path,
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"--rdzv-endpoint=127.0.0.1:{free.getsockname()[1]}"
    meeting = ["--rdzv-backend=c10d", "--rdzv-id=1", endpoint, "--local-addr=127.0.0.1"]
    patience = ["--rdzv-conf=last_call_timeout=1", "--monitor-interval=0.2"]
    agent = [*TORCHRUN, 1, "--nnodes=1:2", "--max-restarts=3", *meeting, *patience]
    apart = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [*agent, TRAIN, tmp_path, 25, 45]
    with started(*command, **apart) as first:
        wait_for(first, tmp_path / "at25-0")
        with started(*command, **apart) as second:
            wait_for(second, tmp_path / "at45-1")
        (tmp_path / "go").touch()  # the second agent and its rank are dead by now
        finish(first)
    alone, together, alone_again = finished(tmp_path)
    assert alone == (1, [*range(26)])
    assert together in ((2, [*range(26, 45)]), (2, [*range(26, 46)]))
    assert alone_again == (1, [*range(40, 60)])
