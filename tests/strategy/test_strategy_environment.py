import logging
import multiprocessing
import os
import random
import re
import resource
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hooktrain.strategy import DDPStrategy, Environment, SingleDeviceStrategy
from hooktrain.utils.env import get_rng_state
from hooktrain.utils.logger import close_logger


def set_up(**kwargs: Any) -> SingleDeviceStrategy:
    strategy = SingleDeviceStrategy(device="cpu", **kwargs)
    strategy.setup()
    return strategy


def process_state() -> Any:
    return (
        multiprocessing.get_start_method(allow_none=True),
        resource.getrlimit(resource.RLIMIT_NOFILE),
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        dict(os.environ),
        logging.getLogger("hooktrain").handlers,
    )


def test_setting_up_changes_nothing_but_the_random_state(tmp_path: Path) -> None:
    before = process_state()
    strategy = set_up(work_dir=tmp_path / "runs")
    assert process_state() == before
    assert not (tmp_path / "runs").exists()
    assert (strategy.rank, strategy.world_size, strategy.distributed) == (0, 1, False)
    assert strategy.launcher == "none"


def test_what_is_asked_for_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "to be removed")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    for name in ("benchmark", "deterministic"):
        monkeypatch.setattr(torch.backends.cudnn, name, False)
    method = multiprocessing.get_start_method(allow_none=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        set_up(env_kwargs={"cudnn_benchmark": True})
        assert torch.backends.cudnn.benchmark
        set_up(
            env_kwargs={
                "resource_limit": 300,
                "mp_cfg": {"mp_start_method": "spawn", "opencv_num_threads": 0},
                "randomness": {"deterministic": True},
                "cudnn_benchmark": True,
            }
        )
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300, hard)
        assert multiprocessing.get_start_method() == "spawn"
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.backends.cudnn.deterministic
        assert not torch.backends.cudnn.benchmark
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
        torch.use_deterministic_algorithms(False)
        multiprocessing.set_start_method(method, force=True)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_limit_of_open_files_is_never_lowered() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    set_up(env_kwargs={"resource_limit": 10})
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


def test_all_generators_are_seeded() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    assert set_up(env_kwargs={"seed": 5}).seed == 5
    first = draw()
    assert set_up(env_kwargs={"randomness": {"seed": 5}}).seed == 5
    assert draw() == first
    assert set_up(env_kwargs=Environment(seed=6)).seed == 6
    assert draw() != first


def test_a_seed_stays_with_its_strategy(tmp_path: Path) -> None:
    first = set_up(env_kwargs={"seed": 5}, work_dir=tmp_path)
    first.prepare(torch.nn.Linear(1, 1))
    first.save_checkpoint(tmp_path / "a.pth")
    second = set_up()
    second.prepare(torch.nn.Linear(1, 1))
    second.resume(tmp_path / "a.pth")
    assert second.seed == 5
    third = set_up()
    assert third.seed != 5
    none = {"seed": None, "diff_rank_seed": False, "deterministic": False}
    assert second.randomness == third.randomness == none
    assert first.randomness == {**none, "seed": 5}


def test_setting_up_twice_is_setting_up_once() -> None:
    strategy = set_up(env_kwargs={"seed": 5})
    torch.rand(1)
    state = get_rng_state()["torch"]
    strategy.setup()
    assert torch.equal(get_rng_state()["torch"], state)


def test_mmengines_settings_and_ours_are_the_same() -> None:
    nested = {
        "launcher": "slurm",
        "cudnn_benchmark": True,
        "mp_cfg": {"mp_start_method": "fork", "opencv_num_threads": 0},
        "dist_cfg": {"backend": "gloo", "timeout": 90, "port": 29501},
        "resource_limit": 4096,
        "randomness": {"seed": 1, "diff_rank_seed": True, "deterministic": True},
    }
    assert Environment.of(nested) == Environment(
        launcher="slurm",
        backend="gloo",
        timeout=timedelta(seconds=90),
        port=29501,
        seed=1,
        diff_rank_seed=True,
        deterministic=True,
        cudnn_benchmark=True,
        resource_limit=4096,
        mp_start_method="fork",
    )
    assert Environment.of({"dist_cfg": None, "seed": 2}) == Environment(seed=2)


def test_settings_that_nobody_knows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"env_kwargs has no 'bakend'; did you mean 'backend'"):
        SingleDeviceStrategy(env_kwargs={"dist_cfg": {"bakend": "gloo"}})
    with pytest.raises(ValueError, match="env_kwargs has 'seed' twice"):
        SingleDeviceStrategy(env_kwargs={"seed": 1, "randomness": {"seed": 2}})
    with pytest.raises(TypeError, match="env_kwargs must be a dict or an Environment, but got 3"):
        SingleDeviceStrategy(env_kwargs=3)  # type: ignore[arg-type]


def test_folders_are_named_after_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    strategy, other = set_up(work_dir="runs"), set_up(experiment_name="digits")
    assert re.fullmatch(r"\d{8}_\d{6}", strategy.timestamp)
    assert strategy.work_dir == str(tmp_path / "runs")
    assert strategy.log_dir == str(tmp_path / "runs" / strategy.timestamp)
    assert strategy.experiment_name == strategy.timestamp
    assert other.experiment_name == f"digits_{other.timestamp}"


def test_logs_go_to_a_file_if_they_are_asked_for(tmp_path: Path) -> None:
    try:
        strategy = set_up(work_dir=tmp_path, log_kwargs={"log_level": "WARNING"})
        logger = logging.getLogger("hooktrain.some.part")
        logger.info("hidden")
        logger.warning("shown")
        text = Path(strategy.log_dir, f"{strategy.timestamp}.log").read_text()
        assert text.endswith("hooktrain.some.part WARNING: shown\n")
        assert "hidden" not in text
        strategy.build_logger(log_file=tmp_path / "other.txt")
        logger.info("elsewhere")
        assert "elsewhere" in (tmp_path / "other.txt").read_text()
    finally:
        close_logger()


def test_the_environment_is_told() -> None:
    system, run = set_up(env_kwargs={"seed": 5}).collect_env()
    assert system["torch"].startswith(torch.__version__)
    assert run["seed"] == 5
    assert run["Distributed launcher"] == "none"
    assert run["Distributed training"] is False
    assert run["GPU number"] == 1
    assert run["Device"] == "cpu"


def test_one_of_several_processes_is_not_for_a_single_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in torchrun(world_size=2).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=r"SingleDeviceStrategy in one of 2 processes"):
        set_up()


def test_a_device_that_is_not_there_is_refused() -> None:
    strategy = SingleDeviceStrategy(device="hpu")
    with pytest.raises(ValueError, match="device='hpu' is not there"):
        strategy.setup()


def torchrun(world_size: int = 1) -> dict[str, str]:
    """The variables of torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {
        "RANK": "0",
        "WORLD_SIZE": f"{world_size}",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": f"{world_size}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{port}",
    }


def test_a_process_of_torchrun_joins_and_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in torchrun().items():
        monkeypatch.setenv(name, value)
    strategy = DDPStrategy(device="cpu")
    strategy.setup()
    assert (strategy.launcher, strategy.distributed, strategy.world_size) == ("pytorch", True, 1)
    assert dist.get_backend() == "gloo"
    second = DDPStrategy(device="cpu")
    second.setup()
    second.teardown()
    assert dist.is_initialized()  # it belongs to the first
    strategy.teardown()
    assert not dist.is_initialized()
    strategy.teardown()
