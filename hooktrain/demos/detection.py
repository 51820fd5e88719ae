"""Scenes of several handwritten digits, a small detector, and pictures of its detections.

Batches, losses and detections have the form of torchvision's detectors, and boxes are
``(x1, y1, x2, y2)`` in pixels.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from hooktrain.demos.digits import CLASS_NAMES, DigitsDataset, Sample
from hooktrain.demos.samples import SampleWriter

CANVAS = 64  # pixels
SIDES = (14, 27)  # the range of a digit's side before its margins are cut off
MOST_DIGITS = 8
INK = 0.3  # a box encloses all pixels of at least this value
STRIDE = 4  # the side of a cell in the detector's maps, in pixels
SURE = 0.3  # the lowest score that pictures show


class DigitScenes(Dataset[Sample]):
    """Square images with up to eight digits of different sizes that do not overlap.

    A scene is generated on access, from a random generator seeded by its index, so there may be
    any number of scenes. Training and test scenes have the digits of the two parts of
    :class:`hooktrain.demos.DigitsDataset`.

    A sample is a dict with ``image``, float32 of shape (1, 64, 64) in [0, 1]; ``boxes``, float32 of
    shape (K, 4) with K at least 1; ``labels``, int64 of shape (K,), from 0 to 9; and
    ``image_id``, the index.

    Args:
        train: True for digits of the training part, False for those of the test part.
        length: the number of scenes.
    """

    def __init__(self, train: bool, length: int) -> None:
        self._digits = DigitsDataset(train)
        self._train = train
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self._length:
            raise IndexError(
                f"index {index!r} is out of range for {self._length} scenes"
            )
        generator = torch.Generator().manual_seed(2 * index + self._train)

        def draw(low: int, high: int) -> int:
            return int(torch.randint(low, high, (), generator=generator))

        canvas = torch.zeros(1, CANVAS, CANVAS)
        boxes, labels = [], []
        for _ in range(draw(3, MOST_DIGITS + 1)):
            digit = self._digits[draw(0, len(self._digits))]
            side = draw(*SIDES)
            stamp = _enlarged(digit["image"], side)
            _, height, width = stamp.shape
            x = draw(0, CANVAS - width + 1)
            y = draw(0, CANVAS - height + 1)
            place = canvas[:, y : y + height, x : x + width]
            if place.any():
                continue  # another digit is there
            place.copy_(stamp)
            boxes.append([x, y, x + width, y + height])
            labels.append(digit["label"])
        return {
            "image": canvas,
            "boxes": torch.tensor(boxes, dtype=torch.float32),
            "labels": torch.tensor(labels),
            "image_id": index,
        }


def _enlarged(image: Tensor, side: int) -> Tensor:
    """A digit scaled to this side, and then cropped to the box around its ink."""
    large = F.interpolate(image[None], side, mode="bilinear")[0]
    inked = large[0] >= INK
    rows = inked.any(1).nonzero()
    columns = inked.any(0).nonzero()
    top, bottom = int(rows[0]), int(rows[-1]) + 1
    left, right = int(columns[0]), int(columns[-1]) + 1
    return large[:, top:bottom, left:right]


def coco_annotations(
    dataset: DigitScenes, class_names: Sequence[str] = CLASS_NAMES
) -> dict[str, Any]:
    """The annotations of a data set in COCO format, to evaluate with or to write as JSON.

    Args:
        dataset: a data set with samples like those of :class:`DigitScenes`.
        class_names: the names of the labels 0, 1, 2, ....
    """
    images = []
    annotations: list[dict[str, Any]] = []
    for index in range(len(dataset)):
        sample = dataset[index]
        _, height, width = sample["image"].shape
        image = {"id": sample["image_id"], "file_name": f"{index:06d}.png"}
        images.append({**image, "height": height, "width": width})
        for box, label in zip(sample["boxes"], sample["labels"], strict=True):
            x1, y1, x2, y2 = box.tolist()
            annotations.append(
                {
                    "id": len(annotations) + 1,  # to pycocotools, 0 means no match
                    "image_id": image["id"],
                    "category_id": int(label),
                    "bbox": [x1, y1, x2 - x1, y2 - y1],
                    "area": (x2 - x1) * (y2 - y1),
                    "iscrowd": 0,
                }
            )
    categories = [{"id": i, "name": name} for i, name in enumerate(class_names)]
    return {"images": images, "annotations": annotations, "categories": categories}


def collate_detection(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """Collate samples for detectors as lists, since the number of boxes differs between images.

    Returns:
        A dict of keyword arguments, which are ``images``, a list of tensors, and ``targets``, a
        list of dicts with the other items.
    """
    images = [sample["image"] for sample in samples]
    targets = []
    for sample in samples:
        targets.append({k: v for k, v in sample.items() if k != "image"})
    return {"images": images, "targets": targets}


class DigitDetector(nn.Module):
    """An anchor-free detector that finds digits by their centres.

    Seven convolutions compute maps with one cell per 4 x 4 pixels. A heat map per class predicts
    how likely a cell is the centre of such a digit, with the loss and the peaks of
    CenterNet (Zhou et al., arXiv:1904.07850). Four more maps predict the distances from the cell to
    the sides of the box, as in FCOS (Tian et al., arXiv:1904.01355), with the generalised IoU as
    the loss (Rezatofighi et al., arXiv:1902.09630), for the centre cell and its eight neighbours.

    Args:
        channels: the width of the first layers; the last ones have four times as many.
        num_classes: the number of classes, at least 1.
    """

    def __init__(self, channels: int = 16, num_classes: int = 10) -> None:
        super().__init__()
        wide = 4 * channels
        self.num_classes = num_classes
        self.trunk = nn.Sequential(
            *_layer(1, channels),
            *_layer(channels, channels, stride=2),
            *_layer(channels, 2 * channels),
            *_layer(2 * channels, wide, stride=2),
            *_layer(wide, wide),
            *_layer(wide, wide),
            *_layer(wide, wide),
        )
        self.heat = nn.Conv2d(wide, num_classes, kernel_size=1)
        self.sides = nn.Conv2d(wide, 4, kernel_size=1)
        # Initially every cell predicts no digit, which is right almost everywhere.
        nn.init.constant_(self.heat.bias, -4.0)  # type: ignore[arg-type]

    def forward(
        self,
        images: Sequence[Tensor],
        targets: Sequence[Mapping[str, Tensor]] | None = None,
    ) -> dict[str, Tensor] | list[dict[str, Tensor]]:
        """Compute the losses in training mode, detections in evaluation mode.

        Args:
            images: images of one shape (1, H, W), multiples of 4, with values in [0, 1].
            targets: in training mode, one dict per image with ``"boxes"`` of shape (K, 4) and
                ``"labels"``, integers of shape (K,) in [0, num_classes).

        Returns:
            ``{"loss_heat": ..., "loss_box": ...}``, or a dict per image with ``"boxes"``,
            ``"scores"`` and ``"labels"``, from the highest score to the lowest.

        Raises:
            ValueError: in training mode without targets.
        """
        maps = self.trunk(torch.stack(list(images)))
        heat = self.heat(maps)
        # Four distances per cell, at least 0, from its centre: (N, 4, H / 4, W / 4).
        boxes = _boxes_around_cells(F.softplus(self.sides(maps)) * STRIDE)
        if not self.training:
            return _detections(heat, boxes)
        if targets is None:
            raise ValueError("targets are required in training mode, not None")
        return self._losses(heat, boxes, targets)

    def _losses(
        self, heat: Tensor, boxes: Tensor, targets: Sequence[Mapping[str, Tensor]]
    ) -> dict[str, Tensor]:
        wanted = torch.cat([target["boxes"] for target in targets])
        labels = torch.cat([target["labels"] for target in targets])
        # The index of each box's image.
        counts = [len(target["boxes"]) for target in targets]
        owners = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        owners = owners.to(heat.device, non_blocking=True)
        height, width = heat.shape[-2:]
        count = max(1, len(wanted))

        middles = (wanted[:, :2] + wanted[:, 2:]) / 2
        cells = (middles / STRIDE).long()
        hills = _hills(cells, wanted, height, width)
        goal = torch.zeros_like(heat).flatten(2).flatten(0, 1)
        rows = owners * self.num_classes + labels
        hills = hills.flatten(1)
        at = rows[:, None].expand_as(hills)
        goal = goal.flatten(1).scatter_reduce(0, at, hills, "amax")
        loss_heat = _focal_loss(heat, goal.view_as(heat)) / count

        near = torch.cartesian_prod(torch.arange(-1, 2), torch.arange(-1, 2))
        around = cells[:, None] + near.to(cells.device, non_blocking=True)
        x = around[..., 0].clamp(0, width - 1)
        y = around[..., 1].clamp(0, height - 1)
        found = boxes[owners[:, None], :, y, x]
        overlap = _generalised_iou(found, wanted[:, None].expand_as(found))
        loss_box = (1 - overlap).sum() / (count * len(near))
        return {"loss_heat": loss_heat, "loss_box": loss_box}


def _layer(in_channels: int, out_channels: int, stride: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
    ]


def _boxes_around_cells(sides: Tensor) -> Tensor:
    """Boxes from the distances between cell centres and the left, top, right and bottom sides."""
    height, width = sides.shape[-2:]
    y = (torch.arange(height, device=sides.device) + 0.5) * STRIDE
    x = (torch.arange(width, device=sides.device) + 0.5) * STRIDE
    grid = torch.stack(torch.meshgrid(x, y, indexing="xy"))
    left_top, right_bottom = sides.chunk(2, dim=1)
    return torch.cat([grid - left_top, grid + right_bottom], dim=1)


def _hills(cells: Tensor, boxes: Tensor, height: int, width: int) -> Tensor:
    """For each box a map that is 1 at its cell, and falls off around it: (K, height, width)."""
    y = torch.arange(height, device=cells.device)[None, :, None]
    x = torch.arange(width, device=cells.device)[None, None, :]
    middle_x, middle_y = cells[:, :, None, None].unbind(1)
    distances = (x - middle_x) ** 2 + (y - middle_y) ** 2
    # A hill is two thirds of the digit's side wide, in cells, which is about six standard
    # deviations.
    side = (boxes[:, 2:] - boxes[:, :2]).amax(1) / STRIDE
    deviation = (side / 9)[:, None, None]
    return torch.exp(-distances / (2 * deviation**2))


def _focal_loss(logits: Tensor, goal: Tensor) -> Tensor:
    """CenterNet's focal loss, which penalises cells near a centre less."""
    chance = logits.sigmoid()
    right = (1 - chance) ** 2 * F.logsigmoid(logits)
    wrong = (1 - goal) ** 4 * chance**2 * F.logsigmoid(-logits)
    return -torch.where(goal == 1, right, wrong).sum()


def _generalised_iou(a: Tensor, b: Tensor) -> Tensor:
    """The elementwise generalised IoU of boxes of the same shape (..., 4)."""
    inner = torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(
        a[..., :2], b[..., :2]
    )
    outer = torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(
        a[..., :2], b[..., :2]
    )
    common = inner.clamp(min=0).prod(-1)
    union = _area(a) + _area(b) - common
    whole = outer.prod(-1)
    return common / union - (whole - union) / whole


def _area(boxes: Tensor) -> Tensor:
    return (boxes[..., 2:] - boxes[..., :2]).prod(-1)


def _detections(heat: Tensor, boxes: Tensor, most: int = 50) -> list[dict[str, Tensor]]:
    """The highest peaks: cells with the maximum of their class among their neighbours."""
    chances = heat.sigmoid()
    highest = F.max_pool2d(chances, 3, stride=1, padding=1)
    peaks = torch.where(chances == highest, chances, 0)
    scores, places = peaks.flatten(1).topk(most)
    cells = heat[0, 0].numel()
    labels = places // cells
    at = (places % cells)[..., None].expand(-1, -1, 4)
    chosen = boxes.flatten(2).transpose(1, 2).gather(1, at)
    found = zip(chosen, scores, labels, strict=True)
    return [{"boxes": b, "scores": s, "labels": n} for b, s, n in found]


# The digits 0 to 9: five rows of three pixels each, the bits of an octal digit.
FONT = (
    "75557",
    "26227",
    "71747",
    "71717",
    "55711",
    "74717",
    "74757",
    "71111",
    "75757",
    "75717",
)
# Red, green and blue of boxes and labels by class.
COLOURS = (
    "1f77b4",
    "ff7f0e",
    "2ca02c",
    "d62728",
    "9467bd",
    "8c564b",
    "e377c2",
    "7f7f7f",
    "bcbd22",
    "17becf",
)


class DetectionWriter(SampleWriter):
    """Periodically draws the model's detections in a few scenes.

    The label is above the box. See :class:`hooktrain.demos.SampleWriter` for the files.

    Args:
        period: the period in iterations; 0 writes only in the last iteration, which always writes.
        dataset: the data set, whose first scenes are shown.
        output_dir: the folder of the run.
        count: the number of scenes.
        columns: the number of scenes in a row.
        zoom: the side of the square that shows a pixel of a scene.
    """

    def __init__(
        self,
        period: int,
        dataset: DigitScenes,
        output_dir: str,
        *,
        count: int = 8,
        columns: int = 4,
        zoom: int = 4,
    ) -> None:
        images = torch.stack([dataset[i]["image"] for i in range(count)])
        super().__init__(period, images, output_dir, columns=columns)
        self._zoom = zoom

    def draw(self, model: nn.Module) -> Tensor:
        """The scenes with the boxes whose scores are high enough."""
        device = next(model.parameters()).device
        images = self._inputs.to(device, non_blocking=True)
        found = model(images, None)
        drawn = [
            draw_boxes(image, each, self._zoom)
            for image, each in zip(self._inputs, found, strict=True)
        ]
        return torch.stack(drawn)


def draw_boxes(image: Tensor, found: Mapping[str, Tensor], zoom: int = 4) -> Tensor:
    """Draw detected digits into an image.

    Args:
        image: the image, of shape (1, H, W), with values in [0, 1], on the CPU.
        found: ``"boxes"``, ``"scores"`` and ``"labels"``; those with a low score are skipped.
        zoom: the side of the square that shows a pixel.

    Returns:
        An image of shape (3, zoom * H, zoom * W), with values in [0, 1].
    """
    large = image.repeat_interleave(zoom, 1).repeat_interleave(zoom, 2)
    canvas = large.repeat(3, 1, 1)
    _, height, width = canvas.shape
    # Host-device synchronisations, only for pictures.
    chosen = found["scores"] >= SURE
    boxes = (found["boxes"][chosen].cpu() * zoom).round().long()
    for box, label in zip(
        boxes.tolist(), found["labels"][chosen].tolist(), strict=True
    ):
        colour = torch.tensor(list(bytes.fromhex(COLOURS[label]))) / 255
        x1, x2 = (min(max(x, 0), width - 1) for x in box[::2])
        y1, y2 = (min(max(y, 0), height - 1) for y in box[1::2])
        canvas[:, y1 : y2 + 1, [x1, x2]] = colour[:, None, None]
        canvas[:, [y1, y2], x1 : x2 + 1] = colour[:, None, None]
        _write_label(canvas, label, x1, y1, colour)
    return canvas


def _write_label(canvas: Tensor, label: int, x: int, y: int, colour: Tensor) -> None:
    """Write a digit above a point, or below it if the canvas ends there."""
    rows = [[int(row) >> bit & 1 for bit in (2, 1, 0)] for row in FONT[label]]
    glyph = torch.tensor(rows, dtype=torch.bool)
    glyph = glyph.repeat_interleave(2, 0).repeat_interleave(2, 1)
    height, width = glyph.shape
    x = min(x, canvas.shape[2] - width)
    y = y - height - 2
    if y < 0:
        y += height + 5
    canvas[:, y : y + height, x : x + width][:, glyph] = colour[:, None]
