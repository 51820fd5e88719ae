"""configs/text_gpt.py as a user runs it, at a tiny size."""

import signal
from pathlib import Path

import pytest
import torch

from equality import assert_same_end, final_checkpoint, metrics
from hooktrain.config import LazyConfig, instantiate
from hooktrain.demos import python_docs_vocabulary
from processes import run_program

ROOT = Path(__file__).parent.parent.parent
CONFIG = str(ROOT / "configs" / "text_gpt.py")
TINY = [
    "model.size=tiny",
    "model.dropout=0.1",
    "dataloader.train.dataset.block_size=32",
    "dataloader.train.total_batch_size=8",
    "dataloader.test.batch_size=400",
    "train.max_iter=20",
    "train.checkpointer.period=6",
    "train.eval_period=10",
    "train.log_period=4",
    "hooks.0.length=20",
]


def run(folder: Path, *args: str, exit_code: int = 0) -> str:
    script = ROOT / "tools" / "train_net.py"
    settings = [*TINY, f"train.output_dir={folder}", *args]
    done = run_program(script, "--config-file", CONFIG, *settings)
    assert done.returncode == exit_code, done.stdout
    return done.stdout


def samples(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (folder / "samples").iterdir()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("undisturbed")
    return folder, run(folder)


def test_a_run_learns_to_write(undisturbed: tuple[Path, str]) -> None:
    folder, printed = undisturbed
    lines = metrics(folder)
    losses = [line["loss_lm"] for line in lines if "loss_lm" in line]
    assert losses[-1] < losses[0]
    assert "grad_norm" in lines[0]
    last = lines[-1]
    for name in ("text", "ema/text"):
        bits, nats = last[f"{name}/bits_per_character"], last[f"{name}/val_loss"]
        assert 3 < bits < 6.7
        assert bits == pytest.approx(nats * 1.442695040888963)
    assert sorted(samples(folder)) == ["0000009.txt", "0000019.txt"]
    text = samples(folder)["0000019.txt"]
    assert text.startswith("The ")
    assert text in printed

    evaluated = run(folder, "--eval-only", "--resume")
    assert f"copypaste: {last['text/bits_per_character']:.4f}," in evaluated


def test_a_run_that_is_killed_ends_bit_for_bit_like_an_undisturbed_one(
    tmp_path: Path, undisturbed: tuple[Path, str]
) -> None:
    hooks = [
        {
            "_target_": "hooktrain.demos.TextSampler",
            "period": "${train.eval_period}",
            "vocabulary": {"_target_": "hooktrain.demos.python_docs_vocabulary"},
            "output_dir": "${train.output_dir}",
            "prompt": "The ",
            "length": 20,
        },
        {"_target_": "killing.Kill", "iteration": 15},
    ]
    run(tmp_path, f"hooks={hooks}", exit_code=-signal.SIGKILL)
    printed = run(tmp_path, "--resume", "dataloader.train.num_workers=2")
    assert "Starting training from iteration 12" in printed
    expected_folder, _ = undisturbed
    assert_same_end(tmp_path, expected_folder)
    assert final_checkpoint(tmp_path)["trainer"]["data"]["loader"]["batches"] == 40
    assert samples(tmp_path) == samples(expected_folder)


@pytest.mark.parametrize(("size", "millions"), [("medium", 19.0), ("large", 85.1)])
def test_one_override_makes_it_larger(size: str, millions: float) -> None:
    cfg = LazyConfig.apply_overrides(LazyConfig.load(CONFIG), [f"model.size={size}"])
    with torch.device("meta"):
        model = instantiate(cfg.model)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(
        millions, abs=0.1
    )


def test_one_override_changes_the_block_size_everywhere() -> None:
    cfg = LazyConfig.load(CONFIG)
    LazyConfig.apply_overrides(
        cfg, ["dataloader.train.dataset.block_size=48", "model.size=tiny"]
    )
    train, test = (instantiate(cfg.dataloader[name]) for name in ("train", "test"))
    assert next(iter(test))["tokens"].shape[1] == 48
    assert next(iter(train))["targets"].shape[1] == 48
    model = instantiate(cfg.model)
    assert model.block_size == 48
    assert model.head.out_features == len(python_docs_vocabulary())
