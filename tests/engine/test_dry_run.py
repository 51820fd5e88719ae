"""A run of two iterations tells what the whole run would take, and leaves nothing behind."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from gloo import run_ranks
from hooktrain.config import LazyConfig
from hooktrain.engine.dry_run import dry_run
from hooktrain.utils import comm

ROOT = Path(__file__).parent.parent.parent


def config(name: str, folder: Path, *overrides: str) -> Any:
    cfg = LazyConfig.load(ROOT / "configs" / name)
    return LazyConfig.apply_overrides(cfg, [f"train.output_dir={folder}", *overrides])


def report(records: list[logging.LogRecord]) -> dict[str, str]:
    [text] = [
        r.getMessage() for r in records if r.getMessage().startswith("The run works:")
    ]
    lines = [re.split(" {2,}", line, maxsplit=1) for line in text.splitlines()[1:]]
    return {name: value for name, value in lines if name}


def test_it_tells_sizes_times_and_results(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = ["model.channels=2", "dataloader.test.batch_size=40"]
    with caplog.at_level(logging.INFO):
        dry_run(config("digits_cnn.py", tmp_path / "new" / "out", *small))
    rows = report(caplog.records)
    evaluated = "Evaluated 2 batches in"
    assert any(message.startswith(evaluated) for message in caplog.messages)
    assert rows["model"] == "464 parameters"
    assert rows["losses"].startswith("total_loss: ")
    assert rows["evaluation"].startswith("classification/accuracy: ")
    assert float(rows["iteration"].split()[0]) > 0
    assert float(rows["checkpoint"].split()[0]) >= 0
    assert "2,000 iterations" in rows["whole run"]
    assert list(tmp_path.iterdir()) == []


def dry_run_of_the_gan(folder: str) -> list[str]:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("hooktrain").addHandler(handler)
    logging.getLogger("hooktrain").setLevel(logging.INFO)
    dry_run(config("digits_gan.py", Path(folder)))
    return list(report(records)) if comm.is_main_process() else []


def test_ranks_share_one_folder(tmp_path: Path) -> None:
    first, second = run_ranks(dry_run_of_the_gan, 2, str(tmp_path / "out"))
    assert second == []
    assert first[:3] == ["model", "losses", "evaluation"]
    assert list(tmp_path.iterdir()) == []
