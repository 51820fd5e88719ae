import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hooktrain.checkpoint import load_file
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


def test_callbacks_change_what_is_saved_and_loaded(tmp_path: Path) -> None:
    made = prepared(tmp_path)
    path = tmp_path / "a.pth"
    made.save_checkpoint(path, callback=lambda state: state.update(mine=1))
    assert load_file(path)["mine"] == 1
    made.save_checkpoint(tmp_path / "b.pth", tag=False)
    assert "mine" not in load_file(tmp_path / "b.pth")

    def other_bias(state: dict[str, Any]) -> None:
        state["model"]["bias"] = torch.tensor([5.0])

    for load in (made.load_checkpoint, made.resume):
        made.model.bias.data.zero_()
        rest = load(path, callback=other_bias)
        assert rest["mine"] == 1
        assert made.model.bias.item() == 5
    made.resume(None, callback=lambda state: state["model"]["bias"].fill_(7))
    assert made.model.bias.item() == 7
    made.resume(path)
    assert made.model.bias.item() not in (5, 7)


def test_a_run_has_a_name() -> None:
    plain = SingleDeviceStrategy()
    assert plain.experiment_name == plain.timestamp
    made = SingleDeviceStrategy(experiment_name="digits")
    assert made.experiment_name == f"digits_{made.timestamp}"


def test_the_seed_is_told_as_it_was_configured() -> None:
    made = SingleDeviceStrategy(env_kwargs={"randomness": {"seed": 3}})
    expected = {"seed": 3, "diff_rank_seed": False, "deterministic": False}
    assert made.randomness == expected


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


def test_the_environment_tells_of_machine_and_run(tmp_path: Path) -> None:
    machine, run = prepared(tmp_path).collect_env()
    assert machine["torch"] == torch.__version__
    assert run.items() >= {"seed": 3, "GPU number": 1}.items()


def test_configurations_build_these_strategies() -> None:
    made = build_strategy("auto", experiment_name="digits")
    assert isinstance(made, SingleDeviceStrategy)
    made = build_strategy("DDPStrategy", fp16_compression=True)
    assert isinstance(made, DDPStrategy)
    assert made.fp16_compression
