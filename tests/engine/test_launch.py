import os
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hooktrain.engine.launch import launch
from hooktrain.utils import comm

LIMIT_SECONDS = 60


def place() -> tuple[int, int, int, int]:
    return comm.get_rank(), comm.get_world_size(), comm.get_local_rank(), comm.get_local_size()


def place_and_sum(value: int) -> tuple[Any, ...]:
    tensor = torch.tensor(value + comm.get_rank())
    dist.all_reduce(tensor)
    return place(), tensor, dist.get_backend(), os.getppid()


def test_a_single_process_is_a_plain_call_with_its_result() -> None:
    result = object()
    pid, got, grouped = launch(lambda r: (os.getpid(), r, dist.is_initialized()), args=(result,))
    assert pid == os.getpid()
    assert got is result
    assert not grouped


def test_the_error_of_a_single_process_is_its_own() -> None:
    def fail() -> None:
        raise KeyError("the cause")

    with pytest.raises(KeyError, match="the cause"):
        launch(fail)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_gpus_per_machine": 0}, r"num_gpus_per_machine must be at least 1 .*got 0"),
        ({"num_machines": -1}, r"num_machines must be at least 1 .*got -1"),
        ({"num_machines": 2, "machine_rank": 2}, r"machine_rank must be in \[0, 2\), got 2"),
        ({"num_machines": 2}, r"dist_url=None cannot tell 2 machines .*'tcp://10.0.0.1:29500'"),
        ({"num_machines": 2, "dist_url": "auto"}, r"dist_url='auto' cannot tell 2 machines"),
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        launch(place, **arguments)


def test_more_gpus_than_there_are_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    with pytest.raises(ValueError, match=r"3 processes need a GPU each, and this machine has 2"):
        launch(place, 3)


def set_torchrun(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x",
    "RANK": "0",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


def test_numbers_that_contradict_torchrun_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    set_torchrun(monkeypatch, **TORCHRUN)
    with pytest.raises(ValueError, match="num_gpus_per_machine=3, but torchrun started 2"):
        launch(place, 3)
    with pytest.raises(ValueError, match="num_machines=3, but torchrun started 2"):
        launch(place, 2, 3)


def test_numbers_that_contradict_srun_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    srun = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_NODELIST": "n1"}
    set_torchrun(monkeypatch, **srun)
    with pytest.raises(ValueError, match="num_gpus_per_machine=8, but srun started 2"):
        launch(place, 8)


def test_a_single_task_of_srun_is_a_plain_call(monkeypatch: pytest.MonkeyPatch) -> None:
    set_torchrun(monkeypatch, SLURM_PROCID="0", SLURM_NTASKS="1", SLURM_NODELIST="n1")
    assert launch(dist.is_initialized) is False


def test_half_of_torchruns_variables_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    set_torchrun(monkeypatch, RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    with pytest.raises(ValueError, match="LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_PORT of torchrun"):
        launch(place)


def test_each_process_knows_its_place_and_its_result_comes_back() -> None:
    results = launch(place_and_sum, 2, args=(10,), timeout=timedelta(seconds=LIMIT_SECONDS))
    assert [r[0] for r in results] == [(0, 2, 0, 2), (1, 2, 1, 2)]
    assert all(torch.equal(r[1], torch.tensor(21)) for r in results)
    assert all(r[2:] == ("gloo", os.getpid()) for r in results)


def test_processes_share_the_cores_instead_of_taking_all_of_them_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    alone = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"]
    threads = int(subprocess.run(alone, capture_output=True, check=True).stdout)
    assert launch(torch.get_num_threads, 2) == [max(1, threads // 2)] * 2
