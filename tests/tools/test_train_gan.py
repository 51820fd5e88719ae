"""The configuration of the GAN, run by the script as a user runs it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten

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


def final(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(folder / "model_final.pth", weights_only=True)
    return {"model": state["model"], **state["trainer"]}


def equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


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


def test_each_network_has_its_own_optimizer(
    whole: tuple[Path, str],
) -> None:
    optimizers = final(whole[0])["optimizer"]
    assert {n: o["inner_count"] for n, o in optimizers.items()} == {
        "generator": 6,
        "discriminator": 12,
    }


def test_a_run_that_goes_on_after_a_checkpoint_ends_bit_for_bit_the_same(
    whole: tuple[Path, str], tmp_path: Path
) -> None:
    shutil.copy(whole[0] / "model_0000002.pth", tmp_path)
    (tmp_path / "last_checkpoint").write_text("model_0000002.pth")
    run(tmp_path, "--resume")
    drawn = sorted(path.name for path in (tmp_path / "samples").iterdir())
    assert drawn == ["0000003.png", "0000005.png"]  # it did go on, not begin anew
    expected, resumed = final(whole[0]), final(tmp_path)
    for part in ("model", "optimizer", "hooks", "data", "seed"):
        leaves, structure = tree_flatten(resumed[part])
        expected_leaves, expected_structure = tree_flatten(expected[part])
        assert structure == expected_structure
        assert all(equal(a, b) for a, b in zip(leaves, expected_leaves, strict=True)), (
            part
        )
    last = Path("samples") / "0000005.png"
    assert (tmp_path / last).read_bytes() == (whole[0] / last).read_bytes()
