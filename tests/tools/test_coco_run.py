"""configs/coco_fasterrcnn.py on digits in COCO format, with a small detector of torchvision's."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import runs
import vision  # noqa: F401
from equality import metrics
from hooktrain.config import LazyConfig, instantiate, resolve
from hooktrain.demos import DigitScenes, coco_annotations
from hooktrain.demos.samples import write_png
from hooktrain.solver import LRMultiplier

pytest.importorskip("torchvision")
pytest.importorskip("pycocotools")

CONFIG = Path(__file__).parent.parent.parent / "configs" / "coco_fasterrcnn.py"
SMALL = [
    "model._target_=torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn",
    "model.weights_backbone=null",
    "+model.min_size=64",
    "+model.max_size=64",
    "+model.box_batch_size_per_image=16",
    "+model.rpn_pre_nms_top_n_train=60",
    "+model.rpn_post_nms_top_n_train=30",
    "+model.rpn_pre_nms_top_n_test=60",
    "+model.rpn_post_nms_top_n_test=30",
    "dataloader.train.total_batch_size=2",
    "dataloader.train.num_workers=0",
    "dataloader.test.num_workers=0",
    "train.device=cpu",
    "train.max_epochs=null",
    "train.max_iter=3",
    "train.eval_period=0",
    "train.checkpointer.period=3",
    "train.log_period=1",
]


def plain_nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """torchvision's operator, which is missing beside a torch of another index than its own."""
    kept: list[int] = []
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    left = scores.argsort(descending=True)
    while len(left):
        first, left = left[0], left[1:]
        kept.append(int(first))
        low = torch.maximum(boxes[first, :2], boxes[left, :2])
        high = torch.minimum(boxes[first, 2:], boxes[left, 2:])
        common = (high - low).clamp(min=0).prod(1)
        iou = common / (areas[first] + areas[left] - common)
        left = left[iou <= iou_threshold]
    return torch.tensor(kept, dtype=torch.int64)


@pytest.fixture(scope="module")
def coco(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("coco")
    (root / "annotations").mkdir()
    for part, count in (("train", 4), ("val", 2)):
        scenes = DigitScenes(train=part == "train", length=count)
        content = coco_annotations(scenes)
        for each in content["annotations"]:
            each["category_id"] += 1  # 0 is the background
        for each in content["categories"]:
            each["id"] += 1
        path = root / "annotations" / f"instances_{part}2017.json"
        path.write_text(json.dumps(content))
        (root / f"{part}2017").mkdir()
        for index, image in enumerate(content["images"]):
            target = root / f"{part}2017" / image["file_name"]
            write_png(target, scenes[index]["image"])
    return root


def test_a_few_iterations_train_and_evaluate_a_detector_of_torchvision(
    coco: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boxes: Any = pytest.importorskip("torchvision.ops.boxes")
    monkeypatch.setattr(boxes, "nms", plain_nms)
    # torchvision's replacement for its operator roi_align is compiled, which takes a minute.
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    folders = [f"dataloader.root={coco}", f"train.output_dir={tmp_path}"]
    cfg = LazyConfig.apply_overrides(LazyConfig.load(CONFIG), [*SMALL, *folders])
    trainer = runs.train(cfg)
    rows = [row for row in metrics(tmp_path) if "loss_classifier" in row]
    assert len(rows) == 3
    names = {"loss_classifier", "loss_box_reg", "loss_objectness", "loss_rpn_box_reg"}
    first = rows[0]  # later rows have medians
    total = sum(first[name] for name in names)
    assert first["total_loss"] == pytest.approx(total, rel=1e-5)
    assert "AP" in runs.last_results(trainer)["bbox"]
    assert (tmp_path / "model_best.pth").is_file()
    decays = {
        parameter: group["weight_decay"]
        for group in trainer.optimizer.param_groups
        for parameter in group["params"]
    }
    for module in trainer.model.modules():
        for parameter in module.parameters(recurse=False):
            is_norm = isinstance(module, torch.nn.BatchNorm2d)
            assert decays[parameter] == (0.0 if is_norm else 1e-4)


def test_the_recipe_is_that_of_the_references() -> None:
    cfg = LazyConfig.load(CONFIG)
    resolve(cfg)
    optimizer = {**cfg.optimizer, "params": [torch.zeros(1)]}
    sgd = instantiate(optimizer)
    expected: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "weight_decay": 1e-4}
    assert sgd.defaults == {**sgd.defaults, **expected, "nesterov": False}
    assert cfg.dataloader.train.total_batch_size == 8 * 2
    assert cfg.train.max_epochs == 26

    length = 26 * 117_266 // 16
    scheduler = LRMultiplier(sgd, instantiate(cfg.lr_multiplier), length)
    rates = {0: 2e-5, 500: 0.01001, 1000: 0.02}
    rates |= {117_265: 0.02, 117_266: 2e-3}  # epoch 16 begins
    rates |= {161_240: 2e-3, 161_241: 2e-4, length - 1: 2e-4}  # epoch 22
    for iteration, rate in rates.items():
        scheduler.step(iteration)
        assert sgd.param_groups[0]["lr"] == pytest.approx(rate)


def test_the_figures_are_those_that_torchvision_reports() -> None:
    detection: Any = pytest.importorskip("torchvision.models.detection")
    rcnn = detection.FasterRCNN_ResNet50_FPN_Weights.COCO_V1.meta
    retina = detection.RetinaNet_ResNet50_FPN_Weights.COCO_V1.meta
    cfg = LazyConfig.load(CONFIG)
    assert cfg.model.num_classes == len(rcnn["categories"])
    text = " ".join(str(ast.get_docstring(ast.parse(CONFIG.read_text()))).split())
    for meta, told in ((rcnn, "a box AP of {}."), (retina, "a box AP of {}, takes")):
        assert told.format(meta["_metrics"]["COCO-val2017"]["box_map"]) in text
