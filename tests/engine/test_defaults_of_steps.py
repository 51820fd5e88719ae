"""DefaultTrainer for models that own their step, with several optimizers, from a configuration."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gloo import run_ranks
from hooktrain.config import LazyConfig
from hooktrain.engine import DefaultTrainer, StepTrainer, create_ddp_model, default_setup, hooks
from hooktrain.engine.defaults import default_argument_parser
from hooktrain.evaluation import DatasetEvaluator, inference_on_dataset
from hooktrain.model import BaseModel, SeparateDistributedDataParallel
from hooktrain.solver import AmpOptimWrapper, OptimWrapper, OptimWrapperDict
from hooktrain.utils.folder_lock import unlock_folder
from hooktrain.utils.logger import close_logger
from toy import LinearLoss

CONFIGS = Path(__file__).parent.parent.parent / "configs"


def config(name: str, folder: Path, *overrides: str) -> Any:
    cfg = LazyConfig.load(str(CONFIGS / name))
    small = [f"train.output_dir={folder}", "train.max_iter=3", "train.log_period=2"]
    return LazyConfig.apply_overrides(cfg, [*small, *overrides])


def gan(folder: Path, *overrides: str) -> Any:
    small = ["model.hidden_size=8", "dataloader.test.dataset.count=20"]
    quick = ["+dataloader.evaluator.classifier.epochs=1", "dataloader.evaluator.real=null"]
    return config("digits_gan.py", folder, *small, *quick, *overrides)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "out"
    unlock_folder(tmp_path / "out")
    close_logger()


def test_several_optimizers_and_schedules_come_from_the_configuration(folder: Path) -> None:
    faster = "optim_wrapper.generator.optimizer.lr=8.0"
    slower = "optim_wrapper.discriminator.optimizer.lr=4.0"
    amp = "optim_wrapper.generator.type=AmpOptimWrapper"
    trainer = DefaultTrainer(gan(folder, amp, faster, slower))
    wrappers = trainer.optim_wrapper
    assert isinstance(wrappers, OptimWrapperDict)
    assert isinstance(wrappers["generator"], AmpOptimWrapper)
    assert type(wrappers["discriminator"]) is OptimWrapper
    results = trainer.train()
    assert set(results) == {"samples", "ema"}
    assert [w.inner_count for w in wrappers.values()] == [3, 6]
    rates = {n: [v for v, _ in trainer.storage.history(f"{n}.lr").values()] for n in wrappers}
    assert rates == {"generator": [8.0, 4.0, 0.0], "discriminator": [4.0, 2.0, 0.0]}
    assert {"loss_generator", "loss_discriminator"} <= set(trainer.storage.latest())


def test_hooks_of_the_configuration_run_right_before_the_evaluation(folder: Path) -> None:
    trainer = DefaultTrainer(gan(folder))
    table = trainer.describe_hooks()
    assert table.index("LRScheduler") < table.index("EMA") < table.index("SampleWriter")
    assert table.index("SampleWriter") < table.index("EvalHook")
    trainer.train()
    assert list((folder / "samples").glob("*.png"))


def test_a_configuration_with_two_ways_to_say_one_thing_is_refused(folder: Path) -> None:
    cfg = gan(folder)
    cfg.optimizer = cfg.optim_wrapper
    with pytest.raises(ValueError, match="both optimizer and optim_wrapper"):
        DefaultTrainer(cfg)
    cfg = gan(folder)
    cfg.lr_multiplier = {}
    with pytest.raises(ValueError, match="both lr_multiplier and param_scheduler"):
        DefaultTrainer(cfg)


def stop_at(count: int, trainer: Any) -> None:
    if trainer.iter + 1 == count:
        trainer.request_stop("to go on later")


def test_the_gan_resumes_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    def weights(trainer: DefaultTrainer) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])

    args = default_argument_parser().parse_args([])
    more = ["train.max_iter=6", "train.checkpointer.period=2"]
    amp = [f"optim_wrapper.{n}.type=AmpOptimWrapper" for n in ("generator", "discriminator")]
    more += [*amp, "+optim_wrapper.generator.dtype=float16"]
    more += ["+optim_wrapper.discriminator.accumulative_counts=4"]

    def run(output: Path, *stops: int) -> DefaultTrainer:
        for stop in (*stops, 6):
            cfg = gan(output, *more)
            default_setup(cfg, args)
            trainer = DefaultTrainer(cfg)
            trainer.resume_or_load(resume=True)
            at = partial(stop_at, stop)
            trainer.register_hooks([hooks.CallbackHook(after_step=at)])
            trainer.train()
            unlock_folder(output)
        return trainer

    whole = run(tmp_path / "whole")
    parts = run(folder, 2, 4)
    assert torch.equal(weights(parts), weights(whole))
    kept = whole.optim_wrapper["discriminator"].state_dict()  # type: ignore[index]
    assert parts.optim_wrapper["discriminator"].inner_count == kept["inner_count"] == 12  # type: ignore[index]


def test_yacs_keys_that_would_be_ignored_are_refused(tmp_path: Path) -> None:
    args = default_argument_parser().parse_args([])
    with pytest.raises(ValueError, match=r"\['OUTPUT_DIR'\] would not be used.*train\.output_dir"):
        default_setup({"OUTPUT_DIR": str(tmp_path)}, args)


class OwnSteps(LinearLoss):
    def train_step(self, data: Any, optim_wrapper: OptimWrapper) -> dict[str, Any]:
        return {}

    def val_step(self, data: Any) -> str:
        return f"val {data}"

    def test_step(self, data: Any) -> str:
        return f"test {data}"


class Based(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(1, 1)

    def forward(self, inputs: Any, data_samples: Any = None, mode: str = "tensor") -> Any:
        return self.fc(inputs)


class Collect(DatasetEvaluator):
    def reset(self) -> None:
        self.outputs: list[Any] = []

    def process(self, inputs: Any, outputs: Any) -> None:
        self.outputs.append(outputs)

    def evaluate(self) -> dict[str, Any]:
        return {"outputs": self.outputs}


def test_evaluation_calls_the_step_of_a_model_that_has_one() -> None:
    assert inference_on_dataset(OwnSteps(), [1], Collect()) == {"outputs": ["test 1"]}
    assert inference_on_dataset(OwnSteps(), [1], Collect(), step="val_step") == {
        "outputs": ["val 1"]
    }
    assert inference_on_dataset(nn.Identity(), [1], Collect()) == {"outputs": [1]}


def wrapped_models() -> list[str]:
    two = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)})
    models = [
        create_ddp_model(nn.Linear(1, 1)),
        create_ddp_model(Based(), find_unused_parameters=True),
        create_ddp_model(OwnSteps()),
        create_ddp_model(two, type="SeparateDistributedDataParallel", fp16_compression=True),
    ]
    return [type(model).__name__ for model in models]


def test_the_wrapper_for_several_ranks_fits_the_model_or_is_chosen_by_name() -> None:
    names = ["NamingDistributed", "StepDistributed", "SeparateDistributed", "SeparateDistributed"]
    expected = [f"{name}DataParallel" for name in names]
    assert run_ranks(wrapped_models, 2) == [expected, expected]
    with pytest.raises(KeyError, match="'SeparateDistributedDataParallel'"):
        create_ddp_model(nn.Linear(1, 1), type="SeperateDistributedDataParallel")


def test_a_wrapper_that_hides_the_step_of_its_model_is_refused() -> None:
    hidden = nn.Sequential()
    hidden.module = OwnSteps()
    with pytest.raises(TypeError, match="StepDistributedDataParallel does not hide the train_step"):
        StepTrainer(hidden, [], torch.optim.SGD(hidden.parameters(), lr=0.1))


def gan_on_ranks(folder: str) -> tuple[torch.Tensor, list[str]]:
    cfg = gan(Path(folder), "train.ema.enabled=true", "train.checkpointer.period=2")
    trainer = DefaultTrainer(cfg)
    assert isinstance(trainer.model, SeparateDistributedDataParallel)
    trainer.train()
    weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    assert hooks.EMA in [type(hook) for hook in trainer._hooks]
    return weights, list(trainer.model.module.state_dict())


def test_the_gan_trains_on_two_ranks_and_its_checkpoint_loads_in_one_process(
    tmp_path: Path,
) -> None:
    (first, _), (second, _) = run_ranks(gan_on_ranks, 2, str(tmp_path))
    assert torch.equal(first, second)
    alone = DefaultTrainer(gan(tmp_path))
    alone.resume_or_load(resume=True)
    loaded = torch.cat([p.detach().flatten() for p in alone.model.parameters()])
    assert torch.equal(loaded, first)
