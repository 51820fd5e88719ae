"""Runs whose machine is lost: the same command goes on from the store, in an empty folder."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from loading import load_tool

from equality import assert_same_end, metrics
from hooktrain.checkpoint.loading import read_checkpoint
from hooktrain.engine import HookBase, build_trainer
from processes import end, start

ROOT = Path(__file__).parent.parent.parent
SETTINGS = [
    "train.max_iter=24",
    "train.checkpointer.period=5",
    "train.eval_period=8",
    "train.log_period=3",
    "model.channels=2",
    "model.dropout=0.5",
    "dataloader.train.total_batch_size=16",
]


class Kill(HookBase):
    """Kills the process when the upload of an iteration is there, and not sooner."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def after_step(self) -> None:
        if self.trainer.iter == self.iteration:
            self.trainer.checkpointer.give_up()
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, kill_at: int, *extra: str) -> None:
    """Run tools/train_net.py --resume in this process, which may kill itself."""
    train_net = load_tool("train_net")

    def build(cfg: Any) -> Any:
        trainer = build_trainer(cfg)
        trainer.register_hooks([Kill(kill_at)])
        return trainer

    train_net.build_trainer = build
    config = str(ROOT / "configs" / "digits_cnn.py")
    options = ["--resume", "--config-file", config, f"train.output_dir={folder}"]
    train_net.main(
        train_net.argument_parser().parse_args([*options, *SETTINGS, *extra])
    )


def run(folder: Path, *extra: str, kill_at: int = -1) -> None:
    code = end(start(train, folder, kill_at, *extra))
    assert code == (0 if kill_at < 0 else -signal.SIGKILL)


@pytest.mark.parametrize("background", ["true", "false"])
def test_a_run_whose_folder_is_lost_twice_ends_as_an_undisturbed_one(
    background: str, tmp_path: Path
) -> None:
    (tmp_path / "store").mkdir()
    store = (
        f"train.store=file://{tmp_path}/store",
        f"train.checkpointer.background={background}",
    )
    run(tmp_path / "lost", *store, "train.seed=null", kill_at=11)
    seed = read_checkpoint(str(tmp_path / "lost" / "model_0000009.pth"))["trainer"][
        "seed"
    ]
    shutil.rmtree(tmp_path / "lost")
    run(tmp_path / "lost", *store, "train.seed=null", kill_at=20)
    shutil.rmtree(tmp_path / "lost")
    run(tmp_path / "lost", *store, "train.seed=null")
    run(tmp_path / "undisturbed", f"train.seed={seed}")
    assert_same_end(tmp_path / "lost", tmp_path / "undisturbed")
    best = [
        read_checkpoint(str(tmp_path / folder / "model_best.pth"))["best"]
        for folder in ("lost", "undisturbed")
    ]
    assert best[0] == best[1]
    # At its end all of it is in the store.
    shutil.rmtree(tmp_path / "lost")
    run(tmp_path / "lost", *store, "train.seed=null")
    assert_same_end(tmp_path / "lost", tmp_path / "undisturbed")
    assert metrics(tmp_path / "lost")[-1]["iteration"] == 24
    assert len(list((tmp_path / "lost").glob("events.out.tfevents.*"))) >= 2
