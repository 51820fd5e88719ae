import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gloo import run_ranks
from hooktrain.demos import CocoEvaluator
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
    with pytest.raises(ValueError, match="no image"):
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
