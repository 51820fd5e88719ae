"""The scripts of the migration guide from MMEngine: both sides end with the same weights."""

import runpy
from pathlib import Path

import pytest
import torch

import mmengine_itself  # noqa: F401  # for its pickled objects
from gloo import run_ranks
from hooktrain.checkpoint import CorruptCheckpointError, load_checkpoint
from hooktrain.engine import train_loop
from recipes import after_recipe
from test_migrating import SCRIPTS, Weights, assert_same_weights, run_scripts

# Another model, whose step makes two updates: a wrapper for several processes has this step too.
SCRIPTS["two-updates-before"] = """
import torch
from torch import nn
from torch.utils.data import DataLoader

from mmengine.model import BaseDataPreprocessor, BaseModel, MMDistributedDataParallel
from mmengine.registry import MODEL_WRAPPERS
from mmengine.runner import Runner

torch.manual_seed(0)
train_dataset = [(torch.ones(1), torch.ones(1))] * 50
train_dataloader = DataLoader(train_dataset, batch_size=2)


class Noise(BaseDataPreprocessor):
    def forward(self, data, training=False):
        img, label = super().forward(data, training)
        return (img + 0.1 * torch.randn_like(img) if training else img), label


class CustomModel(BaseModel):
    def __init__(self):
        super().__init__(data_preprocessor=Noise(), init_cfg=None)
        self.linear = nn.Linear(1, 1)

    def forward(self, img, label, mode="tensor"):
        feat = self.linear(img)
        return dict(loss=(feat - label).pow(2)) if mode == "loss" else feat

    def train_step(self, data, optim_wrapper):
        for training in (True, False):
            img, label = self.data_preprocessor(data, training)
            loss, log_vars = self.parse_losses(self(img, label, mode="loss"))
            optim_wrapper.update_params(loss)
        return log_vars


@MODEL_WRAPPERS.register_module()
class CustomDistributedDataParallel(MMDistributedDataParallel):
    def train_step(self, data, optim_wrapper):
        for training in (True, False):
            img, label = self.module.data_preprocessor(data, training)
            loss, log_vars = self.module.parse_losses(self(img, label, mode="loss"))
            optim_wrapper.update_params(loss)
        return log_vars


model = CustomModel()
runner = Runner(
    model=model,
    work_dir="work_dir",
    train_dataloader=train_dataloader,
    train_cfg=dict(by_epoch=True, max_epochs=2),
    optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.01)),
    randomness=dict(seed=1),
)
runner.train()
"""
SCRIPTS["two-updates-after"] = """
from hooktrain.engine import StepTrainer, create_ddp_model

torch.manual_seed(1)
parallel = create_ddp_model(model, wrapper=CustomDistributedDataParallel)
trainer = StepTrainer(parallel, train_dataloader, torch.optim.SGD(model.parameters(), lr=0.01))
trainer.train(max_iter=2 * len(train_dataloader))
"""
PAIRS = ["mmengine", "gan", "two-updates"]

# The first pair with momenta, rules for parameters, and schedules in iterations and in epochs.
RULES = {
    'dict(type="SGD", lr=0.01)': (
        'dict(type="AdamW", lr=0.01, weight_decay=0.1), paramwise_cfg=dict(bias_decay_mult=0.0)'
    ),
    "milestones=[2, 3]": "milestones=[2, 4]",
    'dict(type="MultiStepLR"': (
        'dict(type="LinearLR", begin=10, end=90, by_epoch=False), dict(type="MultiStepLR"'
    ),
}


def ported(pair: str) -> str:
    """The script before, by the recipe, up to its runner; then what takes that one's place."""
    text = SCRIPTS[f"{pair}-before"].replace("from mmengine.runner import Runner\n", "")
    model, found, _ = text.partition("runner = Runner(")
    assert found
    changed = after_recipe("mmengine", model)
    assert "from mmengine" not in changed
    return changed + SCRIPTS[f"{pair}-after"]


for _pair in PAIRS:
    SCRIPTS[f"{_pair}-ported"] = ported(_pair)


def with_rules(script: str) -> str:
    """A script with other optimizers and schedules."""
    for old, new in RULES.items():
        assert old in script
        script = script.replace(old, new)
    opening = (
        "param_scheduler=" if "runner =" in script else "build_param_scheduler(\n    "
    )
    script = script.replace(f"{opening}dict(", f"{opening}[dict(")
    return script.replace("milestones=[2, 4])", "milestones=[2, 4])]")


for _kind in ("before", "ported"):
    SCRIPTS[f"rules-{_kind}"] = with_rules(SCRIPTS[f"mmengine-{_kind}"])
PAIRS.append("rules")


def resumed(script: str) -> str:
    """A script of MMEngine that goes on with a checkpoint of ours."""
    options = 'load_from="epoch_3.pth", resume=True)\nrunner.train()'
    return script.replace(")\nrunner.train()", f"    {options}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mmengine")


@pytest.fixture(scope="module")
def before(folder: Path) -> dict[str, Weights]:
    # In a process of its own: it sets environment variables, loggers and registries.
    names = [f"{pair}-before" for pair in PAIRS]
    names[0] += "+mmengine-convert"
    weights = run_scripts(names, folder, warnings="ignore")
    return dict(zip(PAIRS, weights.values(), strict=True))


@pytest.fixture(scope="module")
def after(folder: Path) -> dict[str, Weights]:
    return run_scripts([f"{pair}-ported" for pair in PAIRS], folder)


@pytest.mark.parametrize("pair", PAIRS)
def test_the_trainer_ends_with_the_weights_of_mmengines_runner(
    pair: str, before: dict[str, Weights], after: dict[str, Weights]
) -> None:
    assert_same_weights(after[f"{pair}-ported"], before[pair])


def test_a_run_of_mmengine_goes_on_here_from_a_converted_checkpoint(
    folder: Path, before: dict[str, Weights], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hooktrain.utils.logger.setup_logger", lambda output: None)
    monkeypatch.chdir(folder / "mmengine-before+mmengine-convert")
    train = "trainer.train("
    text = SCRIPTS["mmengine-ported"].replace(
        train, f'checkpointer.load("converted.pth")\n{train}'
    )
    Path("resumed.py").write_text(text.replace('"work_dir', '"resumed'))
    trainer = runpy.run_path("resumed.py")["trainer"]
    assert trainer.start_iter == 75
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)
    assert_same_weights(trainer.model.state_dict(), before["mmengine"])


def test_a_file_of_mmengines_runner_gives_its_weights_when_it_is_converted(
    folder: Path, before: dict[str, Weights]
) -> None:
    run = folder / "mmengine-before+mmengine-convert"
    model = torch.nn.Module()
    model.linear = torch.nn.Linear(1, 1)
    # As docs/migrating.md says of the files of a runner.
    with pytest.raises(CorruptCheckpointError, match=r"epoch_3\.pth.*HistoryBuffer"):
        load_checkpoint(model, run / "work_dir" / "epoch_3.pth")
    load_checkpoint(model, run / "converted.pth")
    saved = torch.load(run / "work_dir" / "epoch_3.pth", weights_only=False)
    assert_same_weights(model.state_dict(), saved["state_dict"])


def test_a_run_of_ours_goes_on_in_mmengine_from_a_converted_checkpoint(
    tmp_path: Path, before: dict[str, Weights], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, back = SCRIPTS["mmengine-ported"], SCRIPTS["mmengine-back"]
    parts = [ours, back, resumed(SCRIPTS["mmengine-before"])]
    monkeypatch.setitem(SCRIPTS, "ours", "\n".join(parts))
    # In a process of its own: MMEngine names its loggers by the second in which a run begins.
    weights = run_scripts(["ours"], tmp_path, warnings="ignore")
    log = next((tmp_path / "ours/work_dir").glob("*/*.log")).read_text()
    assert "resumed epoch: 3, iter: 75" in log
    assert_same_weights(weights["ours"], before["mmengine"])


def run_on_this_rank(paths: list[str]) -> list[tuple[str, Weights]]:
    torch.set_num_threads(1)
    train_loop.seed_step = lambda *_: None  # the ranks draw the same numbers
    runs = [runpy.run_path(path) for path in paths]
    return [
        (type(run["trainer"].model).__name__, run["model"].state_dict()) for run in runs
    ]


def test_two_ranks_with_the_same_data_end_with_the_same_weights_as_one(
    folder: Path, after: dict[str, Weights]
) -> None:
    names = {
        "gan-ported": "SeparateDistributedDataParallel",
        "two-updates-ported": "CustomDistributedDataParallel",
    }
    paths = [str(folder / name / "script.py") for name in names]
    for of_rank in run_ranks(run_on_this_rank, 2, paths):
        for (name, wrapper), (used, weights) in zip(
            names.items(), of_rank, strict=True
        ):
            assert used == wrapper
            bare = {key.replace("module.", ""): value for key, value in weights.items()}
            assert_same_weights(bare, after[name])
