"""configs/imagenet_resnet50.py on small generated images, with a small network of torchvision's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import runs
import vision  # noqa: F401
from equality import metrics
from hooktrain.config import LazyConfig, instantiate, resolve
from hooktrain.engine.build import build_optimizer
from hooktrain.engine.hooks import EMA
from hooktrain.solver import LRMultiplier

pytest.importorskip("torchvision")

CONFIG = Path(__file__).parent.parent.parent / "configs" / "imagenet_resnet50.py"
CLASSES = 6
NET = {"_target_": "torchvision.models.shufflenet_v2_x0_5", "num_classes": CLASSES}
SMALL = [
    f"model.net={NET}",
    "dataloader.train.dataset.transform.transforms.0.size=32",
    "dataloader.test.dataset.transform.transforms.0.size=40",
    "dataloader.test.dataset.transform.transforms.1.size=32",
    "dataloader.train.total_batch_size=16",
    "dataloader.train.num_workers=0",
    "dataloader.test.batch_size=5",
    "dataloader.test.num_workers=0",
    "optimizer.lr=0.05",
    # Three batches an epoch.
    "train.max_epochs=8",
    "train.checkpointer.period=2 epochs",
    "train.eval_period=4 epochs",
    "train.log_period=4",
    "train.ema.decay=0.5",
]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noise around a colour for each class: 8 images for training, 3 for validation."""
    folder, generator = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for name in range(CLASSES):
        colour = generator.uniform(60, 200, 3)
        for i in range(11):
            path = folder / ("train" if i < 8 else "val") / f"n{name}" / f"{i}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = colour + generator.normal(0, 30, (48, 56, 3))
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path)
    return folder


def config(images: Path, output: Path, *overrides: str) -> Any:
    folders = [f"dataloader.root={images}", f"train.output_dir={output}"]
    return LazyConfig.apply_overrides(
        LazyConfig.load(CONFIG), [*SMALL, *folders, *overrides]
    )


def train(images: Path, output: Path, *overrides: str, resume: bool = False) -> Any:
    return runs.train(config(images, output, *overrides), resume)


@pytest.fixture(scope="module")
def undisturbed(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return train(images, tmp_path_factory.mktemp("undisturbed"))


def test_a_run_is_judged_by_the_five_highest(images: Path, undisturbed: Any) -> None:
    folder = Path(undisturbed.checkpointer.save_dir)
    losses = [line["loss_cls"] for line in metrics(folder) if "loss_cls" in line]
    assert losses[-1] < losses[0]
    results = runs.last_results(undisturbed)
    (ema,) = [hook for hook in undisturbed.hooks if isinstance(hook, EMA)]
    averaged = ema.average.module
    batches = list(instantiate(config(images, folder).dataloader.test))
    labels = torch.cat([labels for _, labels in batches])
    assert len(labels) == 3 * CLASSES
    for found, model in (
        (results, undisturbed.model.eval()),
        (results["ema"], averaged),
    ):
        highest = torch.cat([model(batch) for batch in batches]).topk(5).indices
        right = (highest == labels[:, None]).any(1).double().mean().item()
        assert found["classification"]["accuracy_top5"] == pytest.approx(100 * right)
    assert (folder / "model_best.pth").is_file()


def test_norms_and_biases_do_not_decay(undisturbed: Any) -> None:
    decays = {
        parameter: group["weight_decay"]
        for group in undisturbed.optimizer.param_groups
        for parameter in group["params"]
    }
    for module in undisturbed.model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            decaying = isinstance(module, nn.Conv2d | nn.Linear) and name == "weight"
            assert decays.pop(parameter) == (1e-4 if decaying else 0.0)
    assert decays == {}


def test_the_rate_climbs_before_it_falls() -> None:
    cfg = LazyConfig.load(CONFIG)
    resolve(cfg)
    assert cfg.train.max_epochs == 90
    optimizer = build_optimizer(cfg, instantiate(cfg.model)).optimizer
    scheduler = LRMultiplier(optimizer, instantiate(cfg.lr_multiplier), 90 * 1252)
    expected = {0: 0.0, 1: 0.4 / 6260, 3130: 0.2, 6260: 0.4, 59470: 0.2, 112680: 0.0}
    for iteration, rate in expected.items():
        scheduler.step(iteration)
        used = optimizer.param_groups[0]["lr"]
        assert used == pytest.approx(rate, rel=1e-6)
    cfg.dataloader.train.total_batch_size = 512
    resolve(cfg)
    assert build_optimizer(cfg, instantiate(cfg.model)).optimizer.defaults["lr"] == 0.2


def test_the_network_is_resnet_50_whose_branches_begin_at_zero() -> None:
    cfg = LazyConfig.load(CONFIG)
    model = instantiate(cfg.model)
    assert sum(p.numel() for p in model.parameters()) == 25_557_032
    assert model.label_smoothing == 0.1
    assert not model.net.layer4[2].bn3.weight.any()
    assert model.net.layer4[2].bn2.weight.all()
