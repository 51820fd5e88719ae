"""Data sets in COCO format, and COCO's average precision of boxes."""

import io
import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hooktrain.data import StreamSampler, build_train_loader
from hooktrain.evaluation import DatasetEvaluator
from hooktrain.utils import comm

logger = logging.getLogger(__name__)

# The names of the first numbers in pycocotools' summary.
_NAMES = ["AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100"]
_NAMES += ["ARs", "ARm", "ARl"]

Sample = dict[str, Any]


class CocoDataset(Dataset[Sample]):
    """The images in a folder, with their boxes from a file in COCO format.

    A sample has ``image``, float32 of shape (3, H, W) in [0, 1], read by Pillow; ``boxes``,
    (x1, y1, x2, y2) of shape (K, 4); ``labels``, the ids of their categories; and ``image_id``.
    Crowds are skipped.

    Args:
        root: the folder of the images.
        annotations: the file.
        train: whether to skip images without a box, and to mirror the others with probability
            1/2, drawn from torch's global generator.

    Attributes:
        images: the file's entry for each image.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        annotations: str | os.PathLike[str],
        train: bool,
    ) -> None:
        content = json.loads(Path(annotations).read_text("utf-8"))
        self._root = Path(root)
        self._train = train
        # For each image the boxes (x, y, width, height) and the category of each.
        self._objects: dict[int, list[list[float]]] = {}
        for each in content["annotations"]:
            if not each.get("iscrowd") and min(each["bbox"][2:]) > 0:
                own = self._objects.setdefault(each["image_id"], [])
                own.append([*each["bbox"], each["category_id"]])
        self.images: list[Sample] = [
            image
            for image in content["images"]
            if not train or image["id"] in self._objects
        ]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample:
        from PIL import Image

        image_id = self.images[index]["id"]
        with Image.open(self._root / self.images[index]["file_name"]) as file:
            pixels = np.array(file.convert("RGB"))
        image = torch.from_numpy(pixels).permute(2, 0, 1) / 255
        objects = torch.tensor(self._objects.get(image_id, [])).view(-1, 5)
        boxes = objects[:, :4].clone()
        boxes[:, 2:] += boxes[:, :2]
        if self._train and torch.rand(()) < 0.5:
            image = image.flip(2)
            boxes[:, [0, 2]] = image.shape[2] - boxes[:, [2, 0]]
        labels = objects[:, 4].long()
        return {"image": image, "boxes": boxes, "labels": labels, "image_id": image_id}


class AspectRatioSampler(StreamSampler):
    """Shuffles so that the images in a batch of all ranks have similar shapes.

    Images are grouped by aspect ratio, and each batch is from one group, so little padding is
    needed. Ratios below 1/2 form one group, and so do ratios of 2 and above. A group's last
    batch in an epoch is filled up with images of that group.

    Args:
        ratios: the width of each image divided by its height.
        batch_size: the number of images in a batch of all ranks together.
        groups_in_octave: the number of groups between a ratio and twice that ratio, like
            ``--aspect-ratio-group-factor`` in torchvision's references.
        seed: see :class:`hooktrain.data.StreamSampler`.
    """

    def __init__(
        self,
        ratios: Sequence[float],
        batch_size: int,
        groups_in_octave: int = 3,
        seed: int | None = None,
    ) -> None:
        super().__init__(seed)
        groups = (torch.tensor(ratios).log2() * groups_in_octave).floor()
        self._group_of = groups.clamp(-groups_in_octave - 1, groups_in_octave)
        self._batch_size = batch_size

    def epoch_indices(self, epoch: int) -> Tensor:
        """The order of one epoch, a whole number of batches."""
        generator = self.generator(epoch)
        order = torch.randperm(len(self._group_of), generator=generator)
        batches: list[Tensor] = []
        for group in self._group_of.unique():
            members = order[self._group_of[order] == group]
            missing = -len(members) % self._batch_size
            rounds = -(-missing // len(members))
            filled = members.repeat(1 + rounds)[: len(members) + missing]
            batches += filled.view(-1, self._batch_size)
        shuffled = torch.randperm(len(batches), generator=generator)
        return torch.stack(batches)[shuffled].flatten()


def build_coco_train_loader(
    root: str | os.PathLike[str],
    annotations: str | os.PathLike[str],
    *,
    total_batch_size: int,
    seed: int | None = None,
    **options: Any,
) -> Any:
    """Build a training loader for a :class:`CocoDataset`, with batches of similar shapes.

    Args:
        root: the folder of the images.
        annotations: the file in COCO format.
        total_batch_size: see :func:`hooktrain.data.build_train_loader`.
        seed: see :func:`hooktrain.data.build_train_loader`.
        options: further arguments of torch's ``DataLoader``.
    """
    dataset = CocoDataset(root, annotations, train=True)
    ratios = [image["width"] / image["height"] for image in dataset.images]
    sampler = AspectRatioSampler(ratios, total_batch_size, seed=seed)
    return build_train_loader(
        dataset,
        total_batch_size=total_batch_size,
        sampler=sampler,
        seed=seed,
        **options,
    )


class CocoEvaluator(DatasetEvaluator):
    """Average precision and recall of boxes, computed by pycocotools.

    It needs ``pip install 'hooktrain[detection]'``. Batches have ``"targets"``, a list of dicts
    with an ``"image_id"``. Outputs are in the form of torchvision's detectors, a list of dicts with
    ``"boxes"`` (x1, y1, x2, y2) of shape (K, 4), and ``"scores"`` and ``"labels"``, the ids of
    categories, of shape (K,). Images that were in no batch do not count.

    Args:
        annotations: a file in COCO format, or the content of one.
    """

    def __init__(self, annotations: str | os.PathLike[str] | Mapping[str, Any]) -> None:
        # Imported here, since it is an optional extra.
        from pycocotools import coco, cocoeval

        self._coco: Any = coco.COCO
        self._cocoeval: Any = cocoeval.COCOeval
        if isinstance(annotations, str | os.PathLike):
            annotations = json.loads(Path(annotations).read_text("utf-8"))
        self._truth = self._indexed(annotations)
        self.reset()

    def reset(self) -> None:
        """Forget everything: a new evaluation begins."""
        self._found: dict[int, list[dict[str, Any]]] = {}

    def process(
        self, inputs: Mapping[str, Any], outputs: Sequence[Mapping[str, Tensor]]
    ) -> None:
        """Take in one batch."""
        for target, found in zip(inputs["targets"], outputs, strict=True):
            image_id = int(target["image_id"])
            # Host-device synchronisations, since the boxes are matched on the host.
            rows = zip(
                found["boxes"].tolist(),
                found["scores"].tolist(),
                found["labels"].tolist(),
                strict=True,
            )
            self._found[image_id] = [
                {
                    "image_id": image_id,
                    "category_id": label,
                    "bbox": [x1, y1, x2 - x1, y2 - y1],
                    "area": (x2 - x1) * (y2 - y1),
                    "iscrowd": 0,
                    "score": score,
                }
                for (x1, y1, x2, y2), score, label in rows
            ]

    def evaluate(self) -> dict[str, dict[str, float]]:
        """Match the boxes of all ranks, and log pycocotools' summary. Collective.

        Returns:
            ``{"bbox": {"AP": ..., "AP50": ..., ...}}`` in percent, with detectron2's names,
            equal on all ranks. Metrics without any object, such as ``APl`` if all objects are
            small, are omitted.

        Raises:
            ValueError: on all ranks, if no rank had an image.
        """
        images: dict[int, list[dict[str, Any]]] = {}
        for found in comm.all_gather(self._found):
            images |= found
        if not images:
            raise ValueError("no rank has an image to evaluate")
        rows = [row for image_id in sorted(images) for row in images[image_id]]
        detected = [{**row, "id": number} for number, row in enumerate(rows, 1)]
        results = self._indexed({**self._truth.dataset, "annotations": detected})
        printed = io.StringIO()
        with redirect_stdout(printed):
            matching = self._cocoeval(self._truth, results, "bbox")
            matching.params.imgIds = sorted(images)
            matching.evaluate()
            matching.accumulate()
            matching.summarize()
        if comm.is_main_process():
            logger.info("Boxes:\n%s", printed.getvalue())
        values = zip(_NAMES, matching.stats.tolist(), strict=True)
        return {"bbox": {name: 100 * value for name, value in values if value >= 0}}

    def _indexed(self, content: Any) -> Any:
        coco = self._coco()
        coco.dataset = content
        with redirect_stdout(io.StringIO()):
            coco.createIndex()
        return coco
