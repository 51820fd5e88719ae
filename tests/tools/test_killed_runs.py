"""Runs killed with SIGKILL and resumed, compared bit for bit with one that nobody disturbed."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from loading import load_tool

from equality import assert_same_end, final_checkpoint, metrics
from hooktrain.engine import HookBase, build_trainer
from hooktrain.engine.hooks import CallbackHook
from processes import end, start

ROOT = Path(__file__).parent.parent.parent

# Checkpoints at 8, 16, ...: evaluations, log lines and epochs of 23 iterations fall between them.
SETTINGS = [
    "train.max_iter=60",
    "train.checkpointer.period=8",
    "train.eval_period=12",
    "train.log_period=5",
    "train.ema.enabled=true",
    "train.clip_grad={'max_norm': 1.0}",
    "model.channels=4",
    "model.dropout=0.5",
]


def train(folder: Path, workers: int, kill_at: str, extra: list[str]) -> None:
    """Run tools/train_net.py --resume in this process, which kills itself at "event iteration"."""
    train_net = load_tool("train_net")

    def kill_if(event: str) -> Any:
        def kill(trainer: Any) -> None:
            if f"{event} {trainer.iter}" == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

        return kill

    def build_killed(cfg: Any) -> Any:
        trainer = build_trainer(cfg)
        first = CallbackHook(
            before_step=kill_if("before_step"), after_backward=kill_if("after_backward")
        )
        last = CallbackHook(
            after_step=kill_if("after_step"), after_train=kill_if("after_train")
        )
        trainer.register_hooks([first], before=HookBase)
        trainer.register_hooks([last])
        return trainer

    train_net.build_trainer = build_killed
    config = str(ROOT / "configs" / "digits_cnn.py")
    own = [f"train.output_dir={folder}", f"dataloader.train.num_workers={workers}"]
    train_net.main(
        train_net.argument_parser().parse_args(
            ["--resume", "--config-file", config, *SETTINGS, *own, *extra]
        )
    )


def run(
    folder: Path, workers: int = 0, kill_at: str = "", extra: list[str] | None = None
) -> None:
    code = end(start(train, folder, workers, kill_at, extra or []))
    assert code == (-signal.SIGKILL if kill_at else 0)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    run(folder)
    return folder


@pytest.mark.parametrize(
    ("workers", "kills"),
    [
        # Before any checkpoint; at one.
        (0, ["after_backward 5", "after_step 23"]),
        # In the first and in the second epoch.
        (2, ["before_step 17", "after_backward 45"]),
        # At one; after the final evaluation.
        (2, ["after_step 31", "after_train 60"]),
    ],
)
def test_a_run_that_is_killed_twice_ends_bit_for_bit_like_an_undisturbed_one(
    tmp_path: Path, undisturbed: Path, workers: int, kills: list[str]
) -> None:
    for kill in kills:
        run(tmp_path, workers, kill)
    run(tmp_path, workers)
    assert_same_end(tmp_path, undisturbed)
    assert [line["iteration"] for line in metrics(tmp_path)][-2:] == [54, 59]


def test_all_parts_of_the_run_really_take_part(undisturbed: Path) -> None:
    assert final_checkpoint(undisturbed)["trainer"]["data"]["loader"]["batches"] == 60
    before_last, last = metrics(undisturbed)[-2:]
    assert "grad_norm" in before_last
    assert "classification/accuracy" in last
    assert "ema/classification/accuracy" in last
