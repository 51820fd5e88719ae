"""The configuration of the GAN, run by the script as a user runs it."""

import json
from pathlib import Path

import pytest

from processes import run_program

ROOT = Path(__file__).parent.parent.parent
SETTINGS = [
    "train.max_iter=6",
    "train.checkpointer.period=3",
    "train.log_period=2",
    "hooks.0.period=2",
    "model.hidden_size=16",
]


def run(folder: Path, *args: str) -> str:
    config = ["--config-file", ROOT / "configs" / "digits_gan.py"]
    done = run_program(
        ROOT / "tools" / "train_net.py",
        *args,
        *config,
        f"train.output_dir={folder}",
        *SETTINGS,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder)


def test_it_says_what_a_classifier_recognises(
    whole: tuple[Path, str],
) -> None:
    folder, printed = whole
    samples = sorted(path.name for path in (folder / "samples").iterdir())
    assert samples == ["0000001.png", "0000003.png", "0000005.png"]
    last = json.loads((folder / "metrics.json").read_text().splitlines()[-1])
    for task in (
        "samples",
        "ema/samples",
    ):  # of the raw weights and of the averaged ones
        assert last[f"{task}/count"] == 500
        assert last[f"{task}/classifier_accuracy"] > 0.97
        assert f"{task}/confidence: {last[f'{task}/confidence']:.4g}" in printed
