"""The configuration of the GAN, run by the script as a user runs it."""

from pathlib import Path

from equality import metrics
from processes import run_program

ROOT = Path(__file__).parent.parent.parent
SETTINGS = [
    "train.max_iter=6",
    "train.checkpointer.period=3",
    "train.log_period=2",
    "hooks.0.period=2",
    "model.hidden_size=16",
    "+dataloader.evaluator.classifier.epochs=2",
]


def run(folder: Path) -> str:
    script = ROOT / "tools" / "train_net.py"
    config = ROOT / "configs" / "digits_gan.py"
    settings = [*SETTINGS, f"train.output_dir={folder}"]
    done = run_program(script, "--config-file", config, *settings)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_it_says_what_a_classifier_recognises(tmp_path: Path) -> None:
    printed = run(tmp_path)
    samples = sorted(path.name for path in (tmp_path / "samples").iterdir())
    assert samples == ["0000001.png", "0000003.png", "0000005.png"]
    last = metrics(tmp_path)[-1]
    for task in ("samples", "ema/samples"):  # of the raw weights and of the averages
        assert last[f"{task}/count"] == 500
        assert last[f"{task}/classifier_accuracy"] > 0.97
        assert f"{task}/confidence: {last[f'{task}/confidence']:.4g}" in printed
