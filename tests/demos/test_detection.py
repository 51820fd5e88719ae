from typing import Any

import pytest
import torch
from torch import Tensor

from hooktrain.demos import (
    DigitDetector,
    DigitScenes,
    coco_annotations,
    collate_detection,
    draw_boxes,
)


def detector() -> DigitDetector:
    torch.manual_seed(0)
    return DigitDetector(channels=4)


def batch(count: int = 3) -> dict[str, list[Any]]:
    scenes = DigitScenes(train=True, length=count)
    return collate_detection([scenes[i] for i in range(count)])


def test_a_scene_is_the_same_each_time_and_its_boxes_touch_the_ink() -> None:
    scenes = DigitScenes(train=True, length=20)
    assert len(scenes) == 20
    for index in range(20):
        first, again = scenes[index], scenes[index]
        assert torch.equal(first["image"], again["image"])
        assert first["image_id"] == index
        assert first["image"].shape == (1, 64, 64)
        left = first["image"][0].clone()
        for x1, y1, x2, y2 in first["boxes"].int().tolist():
            inside = first["image"][0, y1:y2, x1:x2] >= 0.3
            for side in (inside[0], inside[-1], inside[:, 0], inside[:, -1]):
                assert side.any()
            left[y1:y2, x1:x2] = 0
        assert not left.any()
    other = DigitScenes(train=False, length=20)[0]
    assert not torch.equal(other["image"], scenes[0]["image"])
    with pytest.raises(IndexError, match="20 scenes"):
        scenes[20]


def test_annotations_say_what_the_scenes_have() -> None:
    scenes = DigitScenes(train=False, length=3)
    content = coco_annotations(scenes)
    assert [each["name"] for each in content["categories"]] == list("0123456789")
    assert [each["id"] for each in content["images"]] == [0, 1, 2]
    assert content["images"][1]["file_name"] == "000001.png"
    objects = content["annotations"]
    assert [each["id"] for each in objects] == list(range(1, len(objects) + 1))
    for index in range(3):
        own = [each for each in objects if each["image_id"] == index]
        assert [each["category_id"] for each in own] == scenes[index]["labels"].tolist()
        for each, box in zip(own, scenes[index]["boxes"].tolist(), strict=True):
            x, y, width, height = each["bbox"]
            assert [x, y, x + width, y + height] == box
            assert each["area"] == width * height


def test_losses_are_small_for_perfect_maps_and_large_for_others() -> None:
    model, data = detector().train(), batch(1)
    losses = model(**data)
    assert set(losses) == {"loss_heat", "loss_box"}
    sum(losses.values()).backward()
    assert all(p.grad.any() for p in model.parameters())
    perfect = _perfect_maps(data["targets"][0])
    assert model._losses(*perfect, data["targets"])["loss_heat"].item() < 1e-3
    wrong = (-perfect[0], perfect[1])
    assert model._losses(*wrong, data["targets"])["loss_heat"].item() > 10


def _perfect_maps(target: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A heat that is sure of the middle cells alone, and the boxes there."""
    heat, boxes = torch.full((1, 10, 16, 16), -20.0), torch.zeros(1, 4, 16, 16)
    for box, label in zip(target["boxes"], target["labels"], strict=True):
        x, y = ((box[:2] + box[2:]) / 8).int().tolist()
        heat[0, label, y, x] = 20.0
        boxes[0, :, y, x] = box
    return heat, boxes


def test_a_detector_learns_one_scene_by_heart() -> None:
    model, data = detector().train(), batch(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(120):
        optimizer.zero_grad()
        sum(model(**data).values()).backward()
        optimizer.step()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 1.0
    model(**data)  # the statistics of this scene
    with torch.no_grad():
        (found,) = model.eval()(**data)
    (target,) = data["targets"]
    count = len(target["boxes"])
    assert found["scores"].tolist() == sorted(found["scores"].tolist(), reverse=True)
    for box, label in zip(target["boxes"], target["labels"], strict=True):
        errors = (found["boxes"][:count] - box).abs().amax(1)
        assert errors.min() < 2.0
        assert found["labels"][errors.argmin()] == label
    assert found["scores"][count - 1] > 0.5
    assert found["scores"][count] < 0.3


def test_images_without_digits_are_a_loss_of_the_heat_alone() -> None:
    empty = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)}
    losses = detector().train()([torch.zeros(1, 64, 64)], [empty])
    assert losses["loss_heat"] > 0
    assert losses["loss_box"] == 0


def test_boxes_that_are_sure_are_drawn_with_their_labels() -> None:
    image = torch.zeros(1, 32, 32)
    found = {
        "boxes": torch.tensor([[8.0, 12.0, 20.0, 28.0], [1.0, 1.0, 9.0, 9.0]]),
        "scores": torch.tensor([0.9, 0.1]),
        "labels": torch.tensor([1, 2]),
    }
    drawn = draw_boxes(image, found, zoom=2)
    assert drawn.shape == (3, 64, 64)
    inked = drawn.any(0)
    assert inked[24, 16:41].all()
    assert inked[56, 16:41].all()
    assert inked[24:57, 16].all()
    assert inked[24:57, 40].all()
    assert not inked[25:56, 17:40].any()
    # A "1" of twice the size above the box, and nothing of the other one.
    one = inked[12:22:2, 16:22:2].int().tolist()
    assert one == [[0, 1, 0], [1, 1, 0], [0, 1, 0], [0, 1, 0], [1, 1, 1]]
    assert not inked[:12].any()


def test_training_without_targets_is_refused() -> None:
    with pytest.raises(ValueError, match="targets"):
        DigitDetector(channels=4)([torch.zeros(1, 64, 64)])
