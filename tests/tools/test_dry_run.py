"""A run of two iterations tells what the whole run would take, and leaves nothing behind."""

import logging
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from loading import load_tool

from gloo import run_ranks
from hooktrain.config import LazyConfig

ROOT = Path(__file__).parent.parent.parent


def config(name: str, folder: Path, *overrides: str) -> Any:
    cfg = LazyConfig.load(ROOT / "configs" / name)
    return LazyConfig.apply_overrides(cfg, [f"train.output_dir={folder}", *overrides])


REPORT = (
    r"The run works: \d\.\d{4} s an iteration, about \d+:\d\d:\d\d for all 2,000, "
    "without evaluations; .*"
)


def test_it_evaluates_and_tells_times(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = ["model.channels=2", "dataloader.test.batch_size=40"]
    with caplog.at_level(logging.INFO):
        cfg = config("digits_cnn.py", tmp_path / "new" / "out", *small)
        load_tool("train_net").dry_run(cfg)
    assert re.fullmatch(REPORT, caplog.messages[-1])
    evaluated = "Evaluated 2 batches in"
    assert any(message.startswith(evaluated) for message in caplog.messages)
    assert list(tmp_path.iterdir()) == []


def test_of_several_loaders_two_batches_each_are_evaluated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = config("digits_cnn.py", tmp_path, "dataloader.test.batch_size=40")
    cfg.train.best_metric = None
    test = cfg.dataloader.test
    cfg.dataloader.test = {"val": test, "ood": deepcopy(test)}
    with caplog.at_level(logging.INFO):
        load_tool("train_net").dry_run(cfg)
    evaluated = [m for m in caplog.messages if m.startswith("Evaluated 2 batches in")]
    assert len(evaluated) == 2


def dry_run_of_the_gan(folder: str) -> list[Path]:
    small = ["model.hidden_size=8", "+dataloader.evaluator.classifier.epochs=1"]
    load_tool("train_net").dry_run(config("digits_gan.py", Path(folder), *small))
    return list(Path(folder).parent.iterdir())


def test_ranks_share_one_folder(tmp_path: Path) -> None:
    assert run_ranks(dry_run_of_the_gan, 2, str(tmp_path / "out")) == [[], []]
