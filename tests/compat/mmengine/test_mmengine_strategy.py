import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hooktrain.compat.mmengine import DDPStrategy, SingleDeviceStrategy
from hooktrain.strategy import build_strategy
from hooktrain.utils.logger import close_logger

SGD = {"optimizer": {"type": "SGD", "lr": 0.1}}


def prepared(work_dir: Path, **kwargs: Any) -> SingleDeviceStrategy:
    made = SingleDeviceStrategy(
        work_dir=work_dir, device="cpu", env_kwargs={"seed": 3}, **kwargs
    )
    made.prepare(nn.Linear(2, 1), optim_wrapper=SGD)
    return made


def test_a_run_has_a_name() -> None:
    plain = SingleDeviceStrategy()
    assert plain.experiment_name == plain.timestamp
    made = SingleDeviceStrategy(experiment_name="digits")
    assert made.experiment_name == f"digits_{made.timestamp}"


def test_a_strategy_has_a_seed_before_it_is_set_up() -> None:
    chosen = SingleDeviceStrategy(env_kwargs={"seed": 3}, device="cpu")
    assert (chosen.seed, chosen.launcher, chosen.world_size) == (3, "none", 1)
    drawn = SingleDeviceStrategy(device="cpu")
    seed = drawn.seed
    assert torch.initial_seed() == seed
    drawn.setup()
    assert drawn.seed == seed


def test_a_logger_writes_into_the_folder_of_the_run(tmp_path: Path) -> None:
    made = prepared(tmp_path, log_kwargs={"log_level": "WARNING"})
    try:
        logger = logging.getLogger("hooktrain")
        logger.info("not this")
        logger.warning("but this")
    finally:
        close_logger()
    log = (Path(made.log_dir) / f"{made.timestamp}.log").read_text()
    assert "but this" in log
    assert "not this" not in log


def test_configurations_build_these_strategies() -> None:
    made = build_strategy("auto", experiment_name="digits")
    assert isinstance(made, SingleDeviceStrategy)
    made = build_strategy("DDPStrategy")
    assert isinstance(made, DDPStrategy)
