import os
import random
import resource
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from gloo import run_ranks, torchrun
from hooktrain.strategy import (
    DDPStrategy,
    Environment,
    SingleDeviceStrategy,
    build_strategy,
    environment as joining,
)
from hooktrain.strategy.environment import (
    RankInfo,
    get_rank_info,
    infer_launcher,
    leave_processes,
    restart_count,
)
from hooktrain.utils import comm
from releases import needs_records, without_gloo

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_GTIDS": "2,3",
    "SLURM_NODELIST": "node[07-08]",
}
STEP = {"SLURM_STEP_NUM_TASKS": "4"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}

SUBMITIT = {
    "SUBMITIT_LOCAL_GLOBALID": "1",
    "SUBMITIT_LOCAL_LOCALID": "1",
    "SUBMITIT_LOCAL_NTASKS": "2",
}


@pytest.fixture
def started_by(monkeypatch: pytest.MonkeyPatch) -> Any:
    def started(*environments: dict[str, str], **more: str) -> None:
        for environment in (*environments, more):
            for name, value in environment.items():
                monkeypatch.setenv(name, value)

    return started


@pytest.mark.parametrize(
    ("environments", "launcher"),
    [
        ([], "none"),
        ([TORCHRUN], "pytorch"),
        ([TORCHRUN, SLURM, STEP], "pytorch"),  # srun torchrun ...
        ([SLURM, STEP], "slurm"),
        ([SLURM], "none"),  # the batch script
        ([OPEN_MPI], "mpi"),
        ([SLURM, STEP, OPEN_MPI], "mpi"),  # mpirun, whose daemons are tasks of srun
        ([SUBMITIT], "submitit"),
        ([SLURM, STEP, SUBMITIT], "submitit"),
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
    assert get_rank_info("pytorch") == RankInfo(3, 1, 4, 2)
    assert restart_count() == 2


def test_a_job_of_slurm_that_was_requeued_is_a_restart(started_by: Any) -> None:
    started_by(SLURM, SLURM_RESTART_COUNT="3")
    assert restart_count() == 3


@pytest.mark.parametrize("launcher", ["mpi", "submitit"])
def test_two_processes_of_one_machine_are_two_ranks(
    started_by: Any, launcher: Any
) -> None:
    started_by(OPEN_MPI, SUBMITIT)
    assert get_rank_info(launcher) == RankInfo(1, 1, 2, 2)


def test_of_a_single_process_a_launcher_need_not_say_more(started_by: Any) -> None:
    started_by(WORLD_SIZE="1")
    assert get_rank_info("pytorch") == RankInfo(0, 0, 1, 1)


def test_the_processes_of_several_machines_need_an_address(
    started_by: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {})
    started_by(SLURM, STEP)
    info = get_rank_info("slurm")
    assert info == RankInfo(3, 1, 4, 2)
    limit = timedelta(seconds=9)
    with pytest.raises(ValueError, match="MASTER_ADDR expected, but not set"):
        joining._store(info, limit)
    found: Any = [dist.HashStore()]
    monkeypatch.setattr(dist, "rendezvous", lambda *args, **options: iter([found]))
    joining._store(replace(info, local_world_size=4), limit)
    assert os.environ["MASTER_ADDR"] == "127.0.0.1"
    assert os.environ["MASTER_PORT"] == "29500"
    started_by(MASTER_ADDR="fe80::1", MASTER_PORT="99")
    joining._store(info, limit)
    assert os.environ["MASTER_ADDR"] == "fe80::1"
    assert os.environ["MASTER_PORT"] == "99"


@pytest.mark.parametrize(("tasks", "expected"), [("0,1,2", 3), ("3", 1)])
def test_machines_of_slurm_may_have_different_numbers_of_tasks(
    started_by: Any, tasks: str, expected: int
) -> None:
    started_by(SLURM, STEP, SLURM_GTIDS=tasks)
    assert get_rank_info("slurm").local_world_size == expected


@pytest.mark.parametrize(
    ("launcher", "environment", "message"),
    [
        (
            "pytorch",
            {"RANK": "1", "WORLD_SIZE": "2"},
            r"lacks \['LOCAL_RANK', 'LOCAL_WORLD_SIZE'\].*'WORLD_SIZE'.*LOCAL_RANK=0",
        ),
        ("pytorch", {"WORLD_SIZE": "2"}, "lacks .'RANK'.*unset WORLD_SIZE"),
        ("slurm", {**SLURM, **STEP, "SLURM_PROCID": "x"}, "'x'"),
        ("slrum", {}, "'slrum'"),
    ],
)
def test_what_is_missing_or_wrong_is_named(
    started_by: Any, launcher: Any, environment: dict[str, str], message: str
) -> None:
    started_by(environment)
    with pytest.raises(ValueError, match=message):
        get_rank_info(launcher)


JOINS_AND_ENDS = """
import os, sys
import torch, torch.distributed as dist
from hooktrain.strategy import DDPStrategy
from hooktrain.utils import comm
before = {*os.environ}
DDPStrategy(device="cpu").setup()
found = os.environ.keys() - before
assert found == {"LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"}
total = torch.ones(1)
dist.all_reduce(total)
print(comm.get_rank(), comm.get_local_rank(), comm.get_local_size(), total.item())
sys.setswitchinterval(100)  # so that threads of gloo wait long for the interpreter
for _ in range(20):
    dist.all_reduce(torch.ones(2))
"""


def test_the_tasks_of_srun_meet_and_a_script_that_never_leaves_ends_without_an_abort() -> (
    None
):
    port = torchrun()["MASTER_PORT"]
    shared = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_GTIDS": "0,1", "MASTER_PORT": port}
    tasks = []
    for rank in ("0", "1"):
        own = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank}
        task = subprocess.Popen(
            [sys.executable, "-c", JOINS_AND_ENDS],
            env={**os.environ, **shared, **own},
            stdout=subprocess.PIPE,
            text=True,
        )
        tasks.append(task)
    printed = [without_gloo(task.communicate(timeout=60)[0]) for task in tasks]
    assert printed == ["0 0 2 2.0\n", "1 1 2 2.0\n"]
    assert [task.returncode for task in tasks] == [0, 0]


def join_again(port: str) -> bool:
    """Leave, and join as under torchrun; whether the limit of open files is raised."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    dist.destroy_process_group()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    os.environ.update(zip(names, (rank, rank, size, size), strict=True))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most - 1, most))
    joining.join_processes("pytorch", "gloo")
    assert comm.all_reduce(torch.ones(1)).item() == 3
    assert comm.all_gather(rank) == list("012")
    return resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)


def test_ranks_that_join_may_open_as_many_files_as_allowed() -> None:
    assert run_ranks(join_again, 3, torchrun()["MASTER_PORT"]) == [True] * 3


def set_up_as_a_guest() -> tuple[str, bool]:
    """Join a group that a notebook or Ray has made, of whose ranks no variable tells."""
    os.environ.update(WORLD_SIZE="2")  # and no more, as if by accident
    world = dist.group.WORLD
    strategy = build_strategy("auto", device="cpu")
    strategy.setup()
    assert comm.all_gather(dist.get_rank()) == [0, 1, 2]
    return type(strategy).__name__, dist.group.WORLD is world


def test_a_strategy_joins_the_group_that_is_there() -> None:
    assert run_ranks(set_up_as_a_guest, 3) == [("DDPStrategy", True)] * 3


def threads_of_gloo() -> int:
    names = [f"/proc/self/task/{task}/comm" for task in os.listdir("/proc/self/task")]
    return sum("gloo" in open(name).read() for name in names)


def threads_before_and_after() -> tuple[bool, int]:
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    model.itself = [model]  # type: ignore[assignment]
    model(torch.ones(1, 2)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.step()  # imports modules that may keep the process group
    dist.new_group([0, 1])
    before = threads_of_gloo()
    del model
    leave_processes()
    return before > 0, threads_of_gloo()


@needs_records
@pytest.mark.skipif(
    not os.path.exists("/proc/self/task"), reason="counts threads as Linux does"
)
def test_no_thread_of_a_group_outlives_it() -> None:
    assert run_ranks(threads_before_and_after, 2) == [(True, 0)] * 2


def set_up(**kwargs: Any) -> SingleDeviceStrategy:
    strategy = SingleDeviceStrategy(device="cpu", **kwargs)
    strategy.setup()
    return strategy


def test_setting_up_changes_nothing_but_the_random_state() -> None:
    before = dict(os.environ), torch.are_deterministic_algorithms_enabled()
    strategy = set_up()
    assert (dict(os.environ), torch.are_deterministic_algorithms_enabled()) == before
    assert strategy.launcher == "none"


def test_what_is_asked_for_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "to be removed")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    try:
        torch.backends.cudnn.benchmark = True
        set_up(deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.backends.cudnn.benchmark
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
        torch.use_deterministic_algorithms(False)


def test_all_generators_are_seeded_once() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    assert set_up(seed=5).seed == 5
    first = draw()
    assert set_up(seed=5).seed == 5
    assert draw() == first
    other = set_up(seed=6)
    assert draw() != first
    state = torch.get_rng_state()
    other.setup()
    assert torch.equal(torch.get_rng_state(), state)


def test_an_unknown_setting_is_refused() -> None:
    assert SingleDeviceStrategy(seed=2).environment == Environment(seed=2)
    with pytest.raises(TypeError, match="'bakend'"):
        SingleDeviceStrategy(bakend="gloo")


def test_a_device_that_is_not_there_is_refused() -> None:
    # Torch's own error is another one on a machine with an accelerator.
    with pytest.raises((RuntimeError, ImportError), match=r"accelerator|hpu"):
        SingleDeviceStrategy(device="hpu").prepare(torch.nn.Linear(1, 1))


def test_the_number_0_is_an_accelerator_and_not_left_out() -> None:
    # A build of torch for CUDA knows which accelerator would have this number.
    with pytest.raises(RuntimeError, match="accelerator"):
        joining.choose_device(0)


@pytest.mark.parametrize(
    ("visible", "backend", "expected"),
    [(1, None, "cuda:0"), (4, None, "cuda:2"), (2, "gloo", None)],
)
def test_a_process_takes_the_device_of_its_local_rank_or_the_only_one_it_sees(
    monkeypatch: pytest.MonkeyPatch, visible: int, backend: str, expected: str
) -> None:
    taken: list[int] = []
    joined: dict[str, Any] = {}
    accelerator: Any = torch.accelerator
    for name, value in {
        "current_accelerator": lambda check_available: torch.device("cuda"),
        "device_count": lambda: visible,
        "set_device_index": taken.append,
        "current_device_index": lambda: taken[-1],
    }.items():
        monkeypatch.setattr(accelerator, name, value)
    info = joining.RankInfo(rank=2, local_rank=2, world_size=4, local_world_size=4)
    monkeypatch.setattr(joining, "get_rank_info", lambda launcher: info)
    monkeypatch.setattr(joining, "_store", lambda *args: None)
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **options: joined.update(options)
    )
    monkeypatch.setattr(comm, "object_group", lambda timeout: None)
    for variable in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(variable, "")  # to be as it was at the end
    joining.join_processes("pytorch", backend)
    assert taken == [2 % visible]
    device = joined["device_id"]
    assert (device and str(device)) == expected


def test_objects_wait_as_long_as_tensors(
    started_by: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started_by(torchrun())
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    joining.join_processes("pytorch", "gloo", timeout=77)
    group = comm.object_group()
    assert group is not dist.group.WORLD
    backend: Any = group._get_backend(torch.device("cpu"))
    assert backend.options._timeout.total_seconds() == 77
    leave_processes()


def test_a_process_of_torchrun_joins_the_others(started_by: Any) -> None:
    started_by(torchrun())
    strategy = DDPStrategy(device="cpu", timeout=90)
    strategy.setup()
    assert (strategy.launcher, strategy.world_size) == ("pytorch", 1)
    assert dist.get_backend() == "gloo"
    second = DDPStrategy(device="cpu")
    second.setup()  # the processes have joined each other already
    leave_processes()
    assert not dist.is_initialized()
