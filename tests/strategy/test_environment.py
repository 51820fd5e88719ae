import os
import random
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from gloo import run_ranks
from hooktrain.strategy import DDPStrategy, Environment, SingleDeviceStrategy
from hooktrain.strategy.environment import (
    Place,
    find_place,
    infer_launcher,
    leave_processes,
    restart_count,
)
from hooktrain.utils import comm

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_NODELIST": "node[07-08]",
}
STEP = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "MPI_LOCALRANKID": "0",
    "MPI_LOCALNRANKS": "1",
}


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
    assert restart_count() == 0
    started_by(TORCHRUN, TORCHELASTIC_RESTART_COUNT="2")
    assert find_place("pytorch") == Place(3, 1, 4, 2, "env://")
    assert restart_count() == 2


def test_scontrol_says_where_the_tasks_of_slurm_meet(
    started_by: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started_by(SLURM)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="set MASTER_ADDR to the address"):
        find_place("slurm")
    script = tmp_path / "scontrol"
    script.write_text(
        '#!/bin/sh\n[ "$*" = "show hostnames node[07-08]" ] && echo node07 node08\n'
    )
    script.chmod(0o755)
    assert find_place("slurm") == Place(3, 1, 4, 2, "tcp://node07:29500")
    started_by(MASTER_ADDR="fe80::1", MASTER_PORT="99")
    assert find_place("slurm").url == "tcp://[fe80::1]:99"


def test_mpi_needs_an_address_on_several_machines(
    started_by: Any,
) -> None:
    started_by(MPICH)
    with pytest.raises(ValueError, match="set MASTER_ADDR to the address"):
        find_place("mpi")
    started_by(OPEN_MPI)
    assert find_place("mpi") == Place(1, 1, 2, 2, "tcp://127.0.0.1:29500")
    started_by(OPEN_MPI, OMPI_COMM_WORLD_LOCAL_SIZE="1", MASTER_ADDR="head")
    assert find_place("mpi") == Place(1, 1, 2, 1, "tcp://head:29500")


@pytest.mark.parametrize(
    ("launcher", "environment", "message"),
    [
        (
            "pytorch",
            {"RANK": "1", "WORLD_SIZE": "2"},
            "LOCAL_RANK",
        ),
        ("slurm", {"SLURM_NTASKS": "2"}, "SLURM_PROCID"),
        ("slurm", {**SLURM, "SLURM_PROCID": "x"}, "'x'"),
        (
            "mpi",
            {"PMI_RANK": "0", "PMI_SIZE": "2"},
            "MPI_LOCALRANKID",
        ),
        ("slrum", {}, "launcher must be 'none', .* got 'slrum'"),
    ],
)
def test_what_is_missing_or_wrong_is_named(
    started_by: Any, launcher: Any, environment: dict[str, str], message: str
) -> None:
    started_by(environment)
    with pytest.raises((KeyError, ValueError), match=message):
        find_place(launcher)


JOIN = """
import os
import torch, torch.distributed as dist
from hooktrain.utils import comm
from hooktrain.strategy.environment import infer_launcher, join_processes, leave_processes
before = dict(os.environ)
join_processes(infer_launcher())
assert dict(os.environ) == before
torch.optim.SGD([torch.ones(1, requires_grad=True)])  # imports modules that know process groups
total = torch.ones(1)
dist.all_reduce(total)
print(comm.get_rank(), comm.get_local_rank(), comm.get_local_size(), total.item())
leave_processes()
tasks = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
assert not any("gloo" in task for task in tasks), tasks
"""


def test_the_tasks_of_srun_meet(
    free_port: int,
) -> None:
    tasks = []
    for rank in range(2):
        task = {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "SLURM_NTASKS": "2",
        }
        task |= {"SLURM_TASKS_PER_NODE": "2", "MASTER_PORT": str(free_port)}
        command = [sys.executable, "-c", JOIN]
        environment = {**os.environ, **SLURM, **task, "OMP_NUM_THREADS": "1"}
        tasks.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, text=True
            )
        )
    assert [task.communicate(timeout=60)[0] for task in tasks] == [
        "0 0 2 2.0\n",
        "1 1 2 2.0\n",
    ]
    assert [task.returncode for task in tasks] == [0, 0]


def threads_of_gloo() -> int:
    names = [f"/proc/self/task/{task}/comm" for task in os.listdir("/proc/self/task")]
    return sum("gloo" in open(name).read() for name in names)


def threads_before_and_after() -> tuple[bool, int]:
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    model.itself = [model]  # type: ignore[assignment]
    model(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(
        model.parameters()
    ).step()  # imports modules that know process groups
    comm.create_local_process_group(2)
    before = threads_of_gloo()
    del model
    leave_processes()
    return before > 0, threads_of_gloo()


@pytest.mark.skipif(
    not os.path.exists("/proc/self/task"), reason="counts threads as Linux does"
)
def test_no_thread_of_a_group_outlives_it() -> None:
    assert run_ranks(threads_before_and_after, 2) == [(True, 0)] * 2


def set_up(**kwargs: Any) -> SingleDeviceStrategy:
    strategy = SingleDeviceStrategy(device="cpu", **kwargs)
    strategy.setup()
    return strategy


def test_setting_up_changes_nothing_but_the_random_state(tmp_path: Path) -> None:
    before = dict(os.environ), torch.are_deterministic_algorithms_enabled()
    strategy = set_up(work_dir=tmp_path / "runs")
    assert (dict(os.environ), torch.are_deterministic_algorithms_enabled()) == before
    assert not (tmp_path / "runs").exists()
    assert (strategy.rank, strategy.world_size, strategy.distributed) == (0, 1, False)
    assert strategy.launcher == "none"


def test_what_is_asked_for_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "to be removed")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    for name in ("benchmark", "deterministic"):
        monkeypatch.setattr(torch.backends.cudnn, name, False)
    try:
        set_up(env_kwargs={"cudnn_benchmark": True})
        assert torch.backends.cudnn.benchmark
        set_up(env_kwargs={"randomness": {"deterministic": True}})
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.backends.cudnn.deterministic
        assert not torch.backends.cudnn.benchmark
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
        torch.use_deterministic_algorithms(False)


def test_all_generators_are_seeded_once() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    assert set_up(env_kwargs={"seed": 5}).seed == 5
    first = draw()
    assert set_up(env_kwargs={"randomness": {"seed": 5}}).seed == 5
    assert draw() == first
    other = set_up(env_kwargs=Environment(seed=6))
    assert draw() != first
    state = torch.get_rng_state()
    other.setup()
    assert torch.equal(torch.get_rng_state(), state)


def test_mmengines_settings_are_understood() -> None:
    nested = {
        "launcher": "slurm",
        "cudnn_benchmark": True,
        "mp_cfg": {"mp_start_method": "fork", "opencv_num_threads": 0},
        "dist_cfg": {"backend": "gloo", "timeout": timedelta(90)},
        "randomness": {"seed": 1, "diff_rank_seed": True, "deterministic": True},
    }
    assert Environment.of(nested) == Environment(
        launcher="slurm",
        backend="gloo",
        timeout=timedelta(90),
        seed=1,
        diff_rank_seed=True,
        deterministic=True,
        cudnn_benchmark=True,
    )
    assert Environment.of({"dist_cfg": None, "seed": 2}) == Environment(seed=2)
    with pytest.raises(TypeError, match="'bakend'"):
        SingleDeviceStrategy(env_kwargs={"dist_cfg": {"bakend": "gloo"}})


def test_a_single_device_is_for_one_process(
    started_by: Any,
) -> None:
    with pytest.raises(ValueError, match="device='hpu' is not there"):
        SingleDeviceStrategy(device="hpu").setup()
    started_by(torchrun(world_size=2))
    with pytest.raises(
        RuntimeError, match=r"SingleDeviceStrategy in one of 2 processes"
    ):
        set_up()


def torchrun(world_size: int = 1) -> dict[str, str]:
    """The variables of torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    size = str(world_size)
    who = {"RANK": "0", "WORLD_SIZE": size, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": size}
    return {**who, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}


def test_a_process_of_torchrun_joins_the_others(started_by: Any) -> None:
    started_by(torchrun())
    strategy = DDPStrategy(device="cpu", env_kwargs={"dist_cfg": {"timeout": 90}})
    strategy.setup()
    assert (strategy.launcher, strategy.distributed, strategy.world_size) == (
        "pytorch",
        True,
        1,
    )
    assert dist.get_backend() == "gloo"
    second = DDPStrategy(device="cpu")
    second.setup()
    second.teardown()
    assert dist.is_initialized()  # it belongs to the first
    strategy.teardown()
    assert not dist.is_initialized()
    strategy.teardown()
