"""configs/digits_detection.py at a small size, beside a plain loop."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import runs
from equality import assert_equal, metrics
from hooktrain.config import LazyConfig, instantiate
from hooktrain.data import build_train_loader
from hooktrain.demos import DigitDetector, DigitScenes, collate_detection
from hooktrain.evaluation import inference_on_dataset
from hooktrain.utils.env import seed_all_rng
from test_readme import GUIDE

pytest.importorskip("pycocotools")

CONFIG = Path(__file__).parent.parent.parent / "configs" / "digits_detection.py"
STEPS, BATCH = 40, 4
SMALL = [
    "model.channels=4",
    f"dataloader.train.total_batch_size={BATCH}",
    "dataloader.test.dataset.length=12",
    "optimizer.lr=0.01",
    "train.seed=3",
    "train.device=cpu",
    f"train.max_iter={STEPS}",
    "train.eval_period=20",
    f"train.checkpointer.period={STEPS}",
    "train.log_period=20",
    "hooks.0.period=20",
]


def config(output: Path) -> Any:
    cfg = LazyConfig.load(CONFIG)
    return LazyConfig.apply_overrides(cfg, [*SMALL, f"train.output_dir={output}"])


def plain_loop(cfg: Any, seed: int) -> nn.Module:
    """The same training without a trainer."""
    torch.manual_seed(seed)
    seed_all_rng(seed)
    model = DigitDetector(channels=4)
    optimizer = instantiate({**cfg.optimizer, "params": _groups(model, cfg)})
    batches = build_train_loader(
        DigitScenes(train=True, length=20_000),
        total_batch_size=BATCH,
        collate_fn=collate_detection,
        seed=seed,
    )
    multiplier = instantiate(cfg.lr_multiplier)
    for step, batch in zip(range(STEPS), batches, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * multiplier(step / STEPS)
        losses = model(batch["images"], batch["targets"])
        optimizer.zero_grad()
        sum(losses.values()).backward()
        optimizer.step()
    return model


def _groups(model: nn.Module, cfg: Any) -> list[dict[str, Any]]:
    decaying = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": decaying}, {"params": others, "weight_decay": 0.0}]


def test_a_run_equals_a_plain_loop_and_keeps_the_best_model_by_ap(
    tmp_path: Path,
) -> None:
    cfg = config(tmp_path)
    trainer = runs.train(cfg)
    expected = plain_loop(cfg, seed=3)
    assert_equal(dict(trainer.model.state_dict()), dict(expected.state_dict()))

    loader = instantiate(cfg.dataloader.test)
    evaluator = instantiate(cfg.dataloader.evaluator)
    results = inference_on_dataset(expected, loader, evaluator)
    assert runs.last_results(trainer) == results
    measured = [row["bbox/AP"] for row in metrics(tmp_path) if "bbox/AP" in row]
    best = torch.load(tmp_path / "model_best.pth", weights_only=True)
    expected.load_state_dict(best["model"])
    evaluated = inference_on_dataset(expected, loader, evaluator)
    assert evaluated["bbox"]["AP"] == max(measured)
    names = sorted(path.name for path in (tmp_path / "samples").iterdir())
    assert names == ["0000019.png", "0000039.png"]


def test_after_the_short_run_of_the_guide_precise_statistics_give_an_ap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (program,) = re.findall(r"```py\n(# short_run\.py\n.*?)```", GUIDE, re.DOTALL)
    quick = ["dataloader.train.total_batch_size=2", "dataloader.test.dataset.length=10"]
    quick += ["optimizer.lr=0.01", "train.device=cpu"]
    cfg = LazyConfig.apply_overrides(LazyConfig.load(CONFIG), quick)
    monkeypatch.setattr(LazyConfig, "load", lambda file: cfg)
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    without, precise = re.findall(r"^AP ([\d.]+)$", capsys.readouterr().out, re.M)
    assert float(without) < 5 < 10 < float(precise)


def test_missing_tools_are_told_before_the_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pycocotools", None)
    with pytest.raises(ImportError, match="pycocotools"):
        LazyConfig.load(CONFIG)
