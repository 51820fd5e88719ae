import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gloo import run_ranks
from hooktrain.demos import (
    AspectRatioSampler,
    CocoDataset,
    CocoEvaluator,
    build_coco_train_loader,
    collate_detection,
)
from hooktrain.demos.samples import write_png
from hooktrain.utils import comm

pytest.importorskip("pycocotools")

IMAGES = 6
SIZES = (20.0, 60.0)  # small and medium objects, none of them large


def annotations() -> dict[str, Any]:
    """Two objects in each image, of two categories whose ids have a gap."""
    objects = [
        {
            "id": 2 * image + place + 1,
            "image_id": image,
            "category_id": (3, 7)[(image + place) % 2],
            "bbox": [10.0 + 70 * place, 5.0 + image, SIZES[place], SIZES[place] - 4],
            "area": SIZES[place] * (SIZES[place] - 4),
            "iscrowd": int(image == 4 and place == 0),
        }
        for image in range(IMAGES)
        for place in range(2)
    ]
    return {
        "images": [{"id": i, "height": 200, "width": 200} for i in range(IMAGES)],
        "annotations": objects,
        "categories": [{"id": 3, "name": "cat"}, {"id": 7, "name": "dog"}],
    }


def detections(seed: int = 0) -> list[dict[str, Tensor]]:
    """For each image its objects, displaced, and one box of nothing."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for image in range(IMAGES):
        own = [a for a in annotations()["annotations"] if a["image_id"] == image]
        boxes = torch.tensor([a["bbox"] for a in own] + [[150.0, 150.0, 30.0, 30.0]])
        boxes += 4 * torch.rand(boxes.shape, generator=generator)
        boxes[:, 2:] += boxes[:, :2]
        labels = torch.tensor([a["category_id"] for a in own] + [3])
        scores = torch.rand(3, generator=generator)
        found.append({"boxes": boxes, "scores": scores, "labels": labels})
    return found


def evaluator_of(images: list[int], truth: Any = None) -> CocoEvaluator:
    evaluator, found = CocoEvaluator(truth or annotations()), detections()
    for batch in (images[:2], images[2:]):
        targets = [{"image_id": i} for i in batch]
        evaluator.process({"targets": targets}, [found[i] for i in batch])
    return evaluator


def summary_of_pycocotools(folder: Path) -> list[float]:
    """What the tools say when they read the objects and the detections from files."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    rows = []
    for image, found in enumerate(detections()):
        for box, score, label in zip(*found.values(), strict=True):
            x1, y1, x2, y2 = box.tolist()
            bbox = [x1, y1, x2 - x1, y2 - y1]
            row = {"image_id": image, "category_id": label.item(), "bbox": bbox}
            rows.append({**row, "score": score.item()})
    (folder / "truth.json").write_text(json.dumps(annotations()))
    (folder / "found.json").write_text(json.dumps(rows))
    with redirect_stdout(io.StringIO()):
        truth = COCO(str(folder / "truth.json"))
        found = truth.loadRes(str(folder / "found.json"))
        evaluation = COCOeval(truth, found, "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return list(evaluation.stats.tolist())


def test_the_metrics_are_those_of_pycocotools_own_summary(tmp_path: Path) -> None:
    stats = summary_of_pycocotools(tmp_path)
    names = ["AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100"]
    expected = {
        name: 100 * value
        for name, value in zip([*names, "ARs", "ARm", "ARl"], stats, strict=True)
        if value >= 0
    }
    results = evaluator_of(list(range(IMAGES))).evaluate()
    assert results == {"bbox": expected}
    assert 0 < expected["AP"] < 100
    assert "APm" in expected
    assert "APl" not in expected
    of_file = evaluator_of(list(range(IMAGES)), tmp_path / "truth.json")
    assert of_file.evaluate() == results


def test_only_images_that_were_seen_count_and_nothing_found_is_zero() -> None:
    evaluator = evaluator_of([0, 1])
    some = evaluator.evaluate()["bbox"]
    assert some != evaluator_of(list(range(IMAGES))).evaluate()["bbox"]
    evaluator.reset()
    with pytest.raises(ValueError, match="no rank has an image"):
        evaluator.evaluate()
    nothing = {"boxes": torch.zeros(0, 4), "scores": torch.zeros(0)}
    nothing["labels"] = torch.zeros(0, dtype=torch.int64)
    evaluator.process({"targets": [{"image_id": torch.tensor(2)}]}, [nothing])
    assert evaluator.evaluate()["bbox"]["AP"] == 0.0


def _evaluate_on_ranks() -> dict[str, dict[str, float]]:
    # Both have image 2, as with a sampler that fills up the last batch.
    return evaluator_of([[0, 2, 4], [1, 3, 5, 2]][comm.get_rank()]).evaluate()


def test_ranks_share_the_images_and_get_the_same_results() -> None:
    expected = evaluator_of(list(range(IMAGES))).evaluate()
    assert run_ranks(_evaluate_on_ranks, 2) == [expected, expected]


def coco_folder(folder: Path) -> tuple[Path, Path]:
    """Four wide images and two high ones; the last has a crowd only."""
    content = annotations()
    for i, image in enumerate(content["images"]):
        height, width = (40, 80) if i < 4 else (80, 40)
        image |= {"file_name": f"{i}.png", "height": height, "width": width}
        write_png(folder / f"{i}.png", torch.full((1, height, width), i / 5))
    for each in content["annotations"]:
        each["iscrowd"] = int(each["image_id"] == 5)
    path = folder / "truth.json"
    path.write_text(json.dumps(content))
    return folder, path


def test_images_are_read_with_their_boxes_and_half_of_them_are_mirrored(
    tmp_path: Path,
) -> None:
    folder, path = coco_folder(tmp_path)
    tested = CocoDataset(folder, path, train=False)
    assert len(tested) == 6
    sample = tested[3]
    assert sample["image_id"] == 3
    assert sample["image"].shape == (3, 40, 80)
    assert sample["image"].unique().tolist() == [pytest.approx(0.6)]
    assert sample["boxes"].tolist() == [[10, 8, 30, 24], [80, 8, 140, 64]]
    assert sample["labels"].tolist() == [7, 3]
    assert tested[5]["boxes"].shape == (0, 4)

    trained = CocoDataset(folder, path, train=True)
    assert len(trained) == 5
    torch.manual_seed(0)
    seen = [trained[3]["boxes"][0].tolist() for _ in range(100)]
    assert 30 < seen.count([10, 8, 30, 24]) < 70
    assert seen.count([10, 8, 30, 24]) + seen.count([50, 8, 70, 24]) == 100


def test_each_batch_is_of_one_shape_and_an_epoch_has_every_image(
    tmp_path: Path,
) -> None:
    ratios = [2.0] * 7 + [0.5] * 2 + [1.0]
    sampler = AspectRatioSampler(ratios, batch_size=4, seed=0)
    epochs = [sampler.epoch_indices(epoch) for epoch in range(2)]
    assert not torch.equal(*epochs)
    for order in epochs:
        assert sorted(set(order.tolist())) == list(range(10))
        batches = order.view(-1, 4).tolist()
        assert len(batches) == 4
        for batch in batches:
            assert len({ratios[index] for index in batch}) == 1
    again = AspectRatioSampler(ratios, batch_size=4, seed=0)
    assert torch.equal(again.epoch_indices(1), epochs[1])

    # The groups of torchvision's create_aspect_ratio_groups(k=3), by one ratio or two of each.
    groups = [[0.3, 0.49], [0.51], [0.7], [0.9], [1.01], [1.3], [1.7], [2.01, 4.0]]
    ratios = [ratio for group in groups for ratio in group]
    order = AspectRatioSampler(ratios, batch_size=2, seed=0).epoch_indices(0)
    pairs = {frozenset(ratios[i] for i in pair) for pair in order.view(-1, 2).tolist()}
    assert pairs == set(map(frozenset, groups))

    loader = build_coco_train_loader(
        *coco_folder(tmp_path), total_batch_size=2, seed=0, collate_fn=collate_detection
    )
    for _, batch in zip(range(6), loader, strict=False):
        first, second = batch["images"]
        assert first.shape == second.shape
