"""The scripts of the migration guide from a plain loop, MMCV and detectron2, run as they stand."""

import copy
import json
import logging
import math
import os
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from gloo import run_ranks
from hooktrain.checkpoint import Checkpointer
from hooktrain.compat.mmengine import StepTrainer
from hooktrain.data import TrainingSampler
from hooktrain.utils import comm
from processes import run_program
from recipes import after_recipe
from test_migrating import (
    SCRIPTS,
    Weights,
    assert_same_weights,
    run_scripts,
    write_script,
)

NAMES = ["plain-before", "plain-ported", "mmcv-ported", "detectron2-ported"]


# The plain script up to its loop; then the trainer.
_BEFORE = SCRIPTS["plain-before"].partition("iteration = 0")[0]
SCRIPTS["plain-ported"] = _BEFORE + SCRIPTS["plain-after"]
# The script of MMCV without its imports, up to its runner; then what takes that one's place.
_BEFORE = re.sub(r"from mmcv.*\n", "", SCRIPTS["mmcv-before"]).partition(
    "runner = Runner("
)[0]
SCRIPTS["mmcv-ported"] = _BEFORE + SCRIPTS["mmcv-after"]
SCRIPTS["detectron2-ported"] = after_recipe("detectron2", SCRIPTS["detectron2-before"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scripts")


@pytest.fixture(scope="module")
def weights(folder: Path) -> dict[str, Weights]:
    return run_scripts(NAMES, folder)


def test_the_trainer_ends_with_the_weights_of_the_plain_loop(
    weights: dict[str, Weights],
) -> None:
    assert_same_weights(weights["plain-ported"], weights["plain-before"])


def test_a_trainer_that_was_started_again_ends_with_the_same_weights(
    tmp_path: Path, weights: dict[str, Weights], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write_script("plain-ported", tmp_path).parent)
    monkeypatch.setattr("hooktrain.utils.logger.setup_logger", lambda: None)
    updates, step = [], torch.optim.SGD.step

    def failing_step(self: torch.optim.SGD) -> Any:
        updates.append(1)
        return step(self) if len(updates) <= 100 else 1 / 0

    monkeypatch.setattr(torch.optim.SGD, "step", failing_step)
    with pytest.raises(ZeroDivisionError):
        runpy.run_path("script.py")
    monkeypatch.setattr(torch.optim.SGD, "step", step)
    trainer = runpy.run_path("script.py")["trainer"]
    assert trainer.start_iter == 80
    assert_same_weights(trainer.model.state_dict(), weights["plain-before"])


def test_the_weights_of_the_plain_loop_load(
    folder: Path, weights: dict[str, Weights]
) -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    path = folder / "plain-before" / "checkpoint_160.pth"
    Checkpointer(model).load(path, checkpointables=[])
    assert_same_weights(model.state_dict(), weights["plain-before"])


class MMCVRunner:
    """What MMCV's runner does with the hooks that the guide's script registers."""

    def __init__(
        self, model: Any, optimizer: Any, max_epochs: int, **kwargs: Any
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.max_epochs = max_epochs

    def register_training_hooks(self, lr_config: Any, **others: Any) -> None:
        assert others["optimizer_config"] == {"grad_clip": None}
        assert lr_config == {"policy": "step", "step": [2, 3]}

    def run(self, loaders: list[Any], workflow: list[tuple[str, int]]) -> None:
        (loader,) = loaders
        (group,) = self.optimizer.param_groups
        for epoch in range(self.max_epochs):
            if epoch in (2, 3):
                group["lr"] *= 0.1
            for data in loader:
                outputs = self.model.train_step(data, self.optimizer)
                self.optimizer.zero_grad()
                outputs["loss"].backward()
                self.optimizer.step()


@pytest.fixture(scope="module")
def mmcv_weights(folder: Path) -> Weights:
    runner, log = ModuleType("mmcv.runner"), ModuleType("mmcv.utils.logging")
    runner.Runner, log.get_logger = MMCVRunner, logging.getLogger  # type: ignore[attr-defined]
    path = write_script("mmcv-before", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "mmcv.runner", runner)
        patch.setitem(sys.modules, "mmcv.utils.logging", log)
        for package in ("mmcv", "mmcv.utils"):
            patch.setitem(sys.modules, package, ModuleType(package))
        state: Weights = runpy.run_path(str(path))["model"].state_dict()
    return state


def test_the_model_of_mmcv_is_trained_as_its_runner_does(
    weights: dict[str, Weights], mmcv_weights: Weights
) -> None:
    assert_same_weights(weights["mmcv-ported"], mmcv_weights)


def of_one_process(name: str) -> str:
    """A script from or to Lightning with equal first weights and batches, for one process."""
    changes = {
        "super().__init__()": "super().__init__(); torch.manual_seed(0)",
        "batch_size=32, shuffle=True": "batch_size=32",
        "total_batch_size=64": "total_batch_size=32, shuffle=False",
        'strategy="ddp"': 'accelerator="cpu"',
        "devices=2": "devices=1",
        ", num_gpus_per_machine=2": "",
    }
    program = SCRIPTS[name]
    for old, new in changes.items():
        program = program.replace(old, new)
    return program.replace(
        '    trainer.fit(model, train_loader, val_loader, ckpt_path="last")\n',
        '    trainer.fit(model, train_loader, val_loader, ckpt_path="last")\n'
        "    torch.save(model.state_dict(), 'weights.pth')\n",
    ).replace(
        "    trainer.train(max_epochs=10)\n",
        "    trainer.train(max_epochs=10)\n"
        "    torch.save(model.state_dict(), 'weights.pth')\n",
    )


# What Lightning does with a module, in the one process of the guide's script.
LIGHTNING = """
from types import SimpleNamespace
import torch


class LightningModule(torch.nn.Module):
    def log(self, name, value, **options):
        pass


class Trainer:
    def __init__(self, max_epochs, accumulate_grad_batches, gradient_clip_val, **others):
        assert others["precision"] == "bf16-mixed"
        self.counts = max_epochs, accumulate_grad_batches, gradient_clip_val

    def fit(self, model, train_loader, val_loader, ckpt_path):
        epochs, passes, norm = self.counts
        [optimizer], [schedule] = model.configure_optimizers()
        for _ in range(epochs):
            for index, batch in enumerate(train_loader):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model.training_step(batch, index)
                (loss / passes).backward()
                if (index + 1) % passes == 0:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
                    optimizer.step()
                    optimizer.zero_grad()
                    schedule["scheduler"].step()

    def validate(self, model, loader):
        pass

    @torch.no_grad()
    def predict(self, model, loader):
        with torch.autocast("cpu", torch.bfloat16):
            return [model.predict_step(batch, index) for index, batch in enumerate(loader)]


def seed_everything(seed):
    pass


def EarlyStopping(*_, **__):
    pass


ModelCheckpoint = LearningRateMonitor = EarlyStopping
"""


@pytest.fixture(scope="module")
def ported_from_lightning(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("after")
    (folder / "train.py").write_text(of_one_process("lightning-after"))
    done = run_program(folder / "train.py", folder=folder)
    assert done.returncode == 0, done.stdout
    return folder


@pytest.mark.parametrize("itself", [False, True])
def test_the_port_ends_with_the_weights_and_predictions_of_lightning(
    itself: bool, ported_from_lightning: Path, tmp_path: Path
) -> None:
    if itself:
        if find_spec("pytorch_lightning") is None:
            pytest.skip("needs Lightning")
    else:
        package = tmp_path / "pytorch_lightning"
        package.mkdir()
        (package / "__init__.py").write_text(LIGHTNING)
        (package / "callbacks.py").write_text("from pytorch_lightning import *")
    (tmp_path / "train.py").write_text(of_one_process("lightning-before"))
    command = [sys.executable, "train.py"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=150)
    weights, predictions = (
        [torch.load(folder / name) for folder in (ported_from_lightning, tmp_path)]
        for name in ("weights.pth", "predictions.pt")
    )
    assert_same_weights(*weights)
    assert len(predictions[0]) == 128
    assert torch.equal(*predictions)


def test_the_port_from_lightning_is_one_run_of_two_processes_and_goes_on(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPTS["lightning-after"])
    whole, first = (tmp_path / name for name in ("whole", "first"))
    for folder in (whole, first):
        folder.mkdir()
    stopped = SCRIPTS["lightning-after"].replace("max_epochs=10", "max_iter=15")
    (first / "train.py").write_text(stopped)
    for path, folder in ((script, whole), (first / "train.py", first), (script, first)):
        done = run_program(path, folder=folder)
        assert done.returncode == 0, done.stdout
    ends = [
        torch.load(folder / "output" / "model_final.pth", weights_only=True)
        for folder in (first, whole)
    ]
    assert ends[0]["trainer"]["iteration"] == ends[1]["trainer"]["iteration"] == 39
    assert_same_weights(ends[0]["model"], ends[1]["model"])
    assert torch.load(whole / "predictions.pt").shape == (128,)


class OwnUpdate(nn.Module):
    """A model of MMCV's kind that makes its update itself, as GANs do there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def train_step(self, data: torch.Tensor, optimizer: Any) -> dict[str, Any]:
        loss = self.linear(data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"log_vars": {"loss_disc": loss.item()}, "num_samples": len(data)}


def test_a_model_of_mmcv_that_makes_its_update_itself_makes_it_once() -> None:
    model = OwnUpdate()
    expected = copy.deepcopy(model)
    data = [torch.randn(3, 2) for _ in range(4)]
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for batch in data:
        expected.train_step(batch, optimizer)
    trainer = StepTrainer(model, data, torch.optim.SGD(model.parameters(), lr=0.1))
    trainer.train(max_iter=4)
    assert_same_weights(model.state_dict(), expected.state_dict())
    assert trainer.storage.latest()["loss_disc"][1] == 3


_WRAPPER = """
from hooktrain.engine import create_ddp_model
from hooktrain.model import StepDistributedDataParallel

class ToyDistributedDataParallel(StepDistributedDataParallel):
    def train_step(self, data, optimizer=None):
        return self(*data)

"""


def run_in_ranks(folder: str, text: str) -> Weights:
    os.chdir(folder)
    torch.set_num_threads(1)
    Path(f"script{comm.get_rank()}.py").write_text(text)
    names = runpy.run_path(f"script{comm.get_rank()}.py")
    assert type(names["trainer"].model).__name__ == "ToyDistributedDataParallel"
    state: Weights = names["model"].state_dict()
    return state


def test_two_ranks_train_the_model_of_mmcv_as_one_does(
    tmp_path: Path, weights: dict[str, Weights]
) -> None:
    wrapped = "create_ddp_model(model, wrapper=ToyDistributedDataParallel)"
    text = _WRAPPER + SCRIPTS["mmcv-ported"].replace(
        "StepTrainer(model", f"StepTrainer({wrapped}"
    )
    for state in run_ranks(run_in_ranks, 2, str(tmp_path), text):
        assert_same_weights(state, weights["mmcv-ported"])


def test_what_the_model_of_mmcv_logs_is_written_down(
    folder: Path, weights: dict[str, Weights]
) -> None:
    text = (folder / "mmcv-ported" / "work_dir" / "metrics.json").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["iteration"] for line in lines] == [*range(9, 125, 10), 124]
    assert {"loss", "loss1", "loss2", "lr"} <= set(lines[-1])
    rates = {line["iteration"]: line["lr"] for line in lines}
    assert [rates[i] for i in (49, 59, 79)] == pytest.approx([1e-2, 1e-3, 1e-4])


def test_the_script_of_detectron2_trains_by_the_recipe_alone_as_its_trainer_does(
    folder: Path, weights: dict[str, Weights]
) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(64, 8)
    targets = inputs.sum(dim=1, keepdim=True)
    fc = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(fc.parameters(), lr=0.05, momentum=0.9)
    order = list(islice(TrainingSampler(64, seed=0), 1600))
    for iteration in range(100):
        optimizer.param_groups[0]["lr"] = (
            0.05 * 0.5 * (1 + math.cos(math.pi * iteration / 100))
        )
        batch = order[16 * iteration : 16 * iteration + 16]
        error = fc(inputs[batch]) - targets[batch]
        optimizer.zero_grad()
        (error.square().mean() + 0.1 * error.abs().mean()).backward()
        optimizer.step()
    output = folder / "detectron2-ported" / "output"
    names = {path.name for path in output.glob("*.pth")}
    assert names == {"model_0000039.pth", "model_0000079.pth", "model_final.pth"}
    state = torch.load(output / "model_final.pth")["model"]
    assert_same_weights(
        state, {f"fc.{key}": value for key, value in fc.state_dict().items()}
    )
