import os
import socket
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gloo import run_ranks
from hooktrain.utils import comm
from hooktrain.utils.launchers import (
    Place,
    destroy_process_group,
    infer_launcher,
    init_process_group,
    resolve,
    restart_count,
)

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "fe80::1",
    "MASTER_PORT": "4000",
}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_NODELIST": "node[07-08]"}
STEP = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}


@pytest.fixture
def started_by(monkeypatch: pytest.MonkeyPatch) -> Any:
    def started(*environments: dict[str, str], **more: str) -> None:
        for environment in (*environments, more):
            for name, value in environment.items():
                monkeypatch.setenv(name, value)

    return started


@pytest.fixture
def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


@pytest.mark.parametrize(
    ("environments", "launcher"),
    [
        ([], "none"),
        ([TORCHRUN], "pytorch"),
        ([TORCHRUN, SLURM, STEP], "pytorch"),  # srun torchrun ...
        ([SLURM], "slurm"),
        ([SLURM, STEP], "slurm"),
        ([SLURM, MPICH], "slurm"),  # srun --mpi=pmi2 ...
        ([SLURM, {"SLURM_JOB_ID": "1"}], "none"),  # the batch script
        ([OPEN_MPI], "mpi"),
        ([SLURM, STEP, OPEN_MPI], "mpi"),  # mpirun, whose daemons are tasks of srun
        ([MPICH], "mpi"),
    ],
)
def test_the_launcher_is_inferred_from_what_it_sets(
    started_by: Any, environments: list[dict[str, str]], launcher: str
) -> None:
    started_by(*environments)
    assert infer_launcher() == launcher


def test_torchrun_says_everything(started_by: Any) -> None:
    started_by(TORCHRUN)
    assert resolve("pytorch") == Place(3, 1, 4, 2, "fe80::1", 4000)


def test_torchrun_counts_its_restarts(started_by: Any) -> None:
    assert restart_count() == 0
    started_by(TORCHELASTIC_RESTART_COUNT="2")
    assert restart_count() == 2


@pytest.mark.parametrize(
    ("more", "place"),
    [
        ({}, Place(3, 3, 4, 4, "node07")),
        ({"SLURM_NNODES": "2"}, Place(3, 1, 4, 2, "node07")),
        ({"SLURM_LOCALID": "0", "SLURM_NNODES": "2"}, Place(3, 0, 4, 2, "node07")),
        (
            {"SLURM_TASKS_PER_NODE": "3,1", "SLURM_NODEID": "1", "SLURM_LOCALID": "0"},
            Place(3, 0, 4, 1, "node07"),
        ),
        ({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "99"}, Place(3, 3, 4, 4, "10.0.0.1", 99)),
        (
            {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NODELIST": "node08"},
            Place(3, 3, 8, 8, "node08"),
        ),
    ],
)
def test_slurm_says_who_and_its_first_node_is_where(
    started_by: Any, more: dict[str, str], place: Place
) -> None:
    started_by(SLURM, **more)
    assert resolve("slurm") == place


def test_a_port_that_is_given_goes_before_the_environment(started_by: Any) -> None:
    started_by(SLURM, MASTER_PORT="99")
    assert resolve("slurm").port == 99
    assert resolve("slurm", port=7).port == 7


def test_mpi_on_one_machine_needs_no_address(started_by: Any) -> None:
    started_by(OPEN_MPI)
    assert resolve("mpi") == Place(1, 1, 2, 2, "127.0.0.1", 29500)


def test_mpi_on_several_machines_does(started_by: Any) -> None:
    started_by(MPICH)
    with pytest.raises(ValueError, match="started 2 processes, 1 of them here: set MASTER_ADDR"):
        resolve("mpi")
    started_by(MASTER_ADDR="head")
    assert resolve("mpi") == Place(1, 0, 2, 1, "head", 29500)


@pytest.mark.parametrize(
    ("launcher", "environment", "message"),
    [
        ("pytorch", {"RANK": "1", "WORLD_SIZE": "2"}, "LOCAL_RANK, .*MASTER_PORT of torchrun"),
        ("slurm", {"SLURM_NTASKS": "2"}, "SLURM_PROCID of srun's .* missing"),
        ("slurm", {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, "SLURM_NODELIST is missing"),
        ("slurm", {**SLURM, "SLURM_PROCID": "x"}, "SLURM_PROCID must be a number, got 'x'"),
        ("mpi", {"PMI_RANK": "0", "PMI_SIZE": "2"}, "MPI_LOCALRANKID, MPI_LOCALNRANKS of MPI"),
        ("slrum", {}, r"launcher must be one of \('none', 'pytorch', .* got 'slrum'"),
    ],
)
def test_what_is_missing_or_wrong_is_named(
    started_by: Any, launcher: Any, environment: dict[str, str], message: str
) -> None:
    started_by(environment)
    with pytest.raises(ValueError, match=message):
        resolve(launcher)


def test_without_a_launcher_there_is_no_group() -> None:
    assert init_process_group("none") == Place()
    assert not dist.is_initialized()
    destroy_process_group()


JOIN = """
import os
import torch, torch.distributed as dist
from hooktrain.utils import comm
from hooktrain.utils.launchers import destroy_process_group, infer_launcher, init_process_group
before = dict(os.environ)
init_process_group(infer_launcher())
assert dict(os.environ) == before
torch.optim.SGD([torch.ones(1, requires_grad=True)])  # imports modules that know process groups
total = torch.ones(1)
dist.all_reduce(total)
print(comm.get_rank(), comm.get_local_rank(), comm.get_local_size(), total.item())
destroy_process_group()
tasks = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
assert not any("gloo" in task for task in tasks), tasks
"""


def test_the_tasks_of_srun_meet_and_leave_no_thread_and_no_word_in_their_environment(
    free_port: int,
) -> None:
    tasks = []
    for rank in range(2):
        task = {
            **SLURM,
            "SLURM_PROCID": str(rank),
            "SLURM_NTASKS": "2",
            "SLURM_NODELIST": "localhost",
            "MASTER_PORT": str(free_port),
        }
        command = [sys.executable, "-c", JOIN]
        environment = {**os.environ, **task, "OMP_NUM_THREADS": "1"}
        tasks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    assert [task.communicate(timeout=60)[0] for task in tasks] == ["0 0 2 2.0\n", "1 1 2 2.0\n"]
    assert [task.returncode for task in tasks] == [0, 0]


def threads_of_gloo() -> int:
    names = [f"/proc/self/task/{task}/comm" for task in os.listdir("/proc/self/task")]
    return sum("gloo" in open(name).read() for name in names)


def threads_before_and_after() -> tuple[bool, int]:
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    model.itself = [model]  # type: ignore[assignment]
    model(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(model.parameters()).step()  # imports modules that know process groups
    comm.create_local_process_group(2)
    before = threads_of_gloo()
    del model
    destroy_process_group()
    return before > 0, threads_of_gloo()


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="counts threads as Linux does")
def test_no_thread_of_a_group_outlives_it() -> None:
    assert run_ranks(threads_before_and_after, 2) == [(True, 0)] * 2
