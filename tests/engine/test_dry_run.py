"""A run of two iterations tells what the whole run would take, and leaves nothing behind."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from gloo import run_ranks
from hooktrain.config import LazyConfig
from hooktrain.engine import DefaultTrainer
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


def test_it_tells_sizes_times_and_results_of_two_iterations_and_two_batches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    built: list[Any] = []

    def build(cfg: Any) -> DefaultTrainer:
        built.append(DefaultTrainer(cfg))
        return built[0]

    small = [
        "model.channels=2",
        "dataloader.test.batch_size=40",
        "train.checkpointer.period=1 epoch",
    ]
    expected = "train.expected_results=[('classification', 'accuracy', 99.0, 1.0)]"
    with caplog.at_level(logging.INFO):
        dry_run(
            config("digits_cnn.py", tmp_path / "new" / "out", *small, expected), build
        )
    rows = report(caplog.records)
    trainer = built[0]
    assert trainer.iter == 2
    assert any(
        message.startswith("Evaluated 2 batches in") for message in caplog.messages
    )
    assert rows["model"] == "464 parameters, 464 to train"
    assert rows["batch"].startswith(
        "{'image': Tensor((64, 1, 8, 8), torch.float32, cpu)"
    )
    loss = f"{trainer.storage.history('total_loss').latest():.4g}"
    assert rows["losses"] == f"total_loss: {loss}, loss_cls: {loss}"
    assert rows["evaluation"].startswith("classification/accuracy: ")
    assert float(rows["iteration"].split()[0]) > 0
    assert rows["whole run"].endswith(": 2,000 iterations, 9 evaluations")
    # Three periodic ones, the last one and the best one.
    kept, free = map(float, re.findall(r"[\d.]+", rows["disk"].replace(",", "")))
    assert kept == pytest.approx(5 * float(rows["checkpoint"].split()[0]), abs=0.3)
    assert 0 < kept < free
    assert list(tmp_path.iterdir()) == []


def dry_run_of_the_gan(folder: str) -> list[str]:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("hooktrain").addHandler(handler)
    logging.getLogger("hooktrain").setLevel(logging.INFO)
    dry_run(config("digits_gan.py", Path(folder)))
    return list(report(records)) if comm.is_main_process() else []


def test_ranks_share_one_folder_and_models_with_a_step_work_too(tmp_path: Path) -> None:
    first, second = run_ranks(dry_run_of_the_gan, 2, str(tmp_path / "out"))
    assert second == []
    assert first[:4] == ["model", "batch", "losses", "evaluation"]
    assert list(tmp_path.iterdir()) == []
