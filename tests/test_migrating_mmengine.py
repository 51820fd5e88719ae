"""The scripts of the migration guide from MMEngine: both sides end with the same weights."""

import runpy
from pathlib import Path

import pytest
import torch

from gloo import run_ranks
from hooktrain.engine import train_loop
from test_migrating import SCRIPTS, Weights, assert_same_weights, run_scripts

PAIRS = ["mmengine", "gan", "two-updates"]


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
    return run_scripts([f"{pair}-after" for pair in PAIRS], folder)


@pytest.mark.parametrize("pair", PAIRS)
def test_mmengines_runner_and_the_trainer_end_with_the_same_weights(
    pair: str, before: dict[str, Weights], after: dict[str, Weights]
) -> None:
    assert_same_weights(after[f"{pair}-after"], before[pair])


def test_a_run_of_mmengine_goes_on_here_from_a_converted_checkpoint(
    folder: Path, before: dict[str, Weights], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hooktrain.utils.logger.setup_logger", lambda output: None)
    monkeypatch.chdir(folder / "mmengine-before+mmengine-convert")
    train = "trainer.train("
    text = SCRIPTS["mmengine-after"].replace(train, f'checkpointer.load("converted.pth")\n{train}')
    Path("resumed.py").write_text(text.replace('"work_dir', '"resumed'))
    trainer = runpy.run_path("resumed.py")["trainer"]
    assert trainer.start_iter == 75
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)
    assert_same_weights(trainer.model.state_dict(), before["mmengine"])


@pytest.mark.parametrize("pair", PAIRS)
def test_the_classes_of_mmengines_script_are_unchanged(pair: str) -> None:
    def classes(name: str) -> list[str]:
        parts = SCRIPTS[name].split("\n\n\n")
        return [part for part in parts if part.startswith(("class ", "@"))]

    theirs = [text.replace("(MMDist", "(StepDist") for text in classes(f"{pair}-before")]
    assert theirs
    assert classes(f"{pair}-after") == theirs


def run_on_this_rank(paths: list[str]) -> list[tuple[str, Weights]]:
    torch.set_num_threads(1)
    train_loop.seed_step = lambda *_: None  # the ranks draw the same numbers
    runs = [runpy.run_path(path) for path in paths]
    return [(type(run["trainer"].model).__name__, run["model"].state_dict()) for run in runs]


def test_two_ranks_with_the_same_data_end_with_the_same_weights_as_one(
    folder: Path, after: dict[str, Weights]
) -> None:
    names = {
        "gan-after": "SeparateDistributedDataParallel",
        "two-updates-after": "CustomDistributedDataParallel",
    }
    paths = [str(folder / name / "script.py") for name in names]
    for of_rank in run_ranks(run_on_this_rank, 2, paths):
        for (name, wrapper), (used, weights) in zip(names.items(), of_rank, strict=True):
            assert used == wrapper
            bare = {key.replace("module.", ""): value for key, value in weights.items()}
            assert_same_weights(bare, after[name])
