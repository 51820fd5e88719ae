"""Average precision of detected boxes, as the COCO benchmark measures it."""

import io
import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from torch import Tensor

from hooktrain.evaluation import DatasetEvaluator
from hooktrain.utils import comm

logger = logging.getLogger(__name__)

# What the first numbers of pycocotools' summary are.
_NAMES = ["AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100"]
_NAMES += ["ARs", "ARm", "ARl"]


class CocoEvaluator(DatasetEvaluator):
    """Average precision and recall of boxes, computed by pycocotools.

    It needs ``pip install 'hooktrain[detection]'``. Batches have ``"targets"``, a list of dicts
    with an ``"image_id"``. Outputs are a list of dicts with ``"boxes"`` (x1, y1, x2, y2) of shape
    (K, 4), ``"scores"`` and ``"labels"``, the ids of categories, of shape (K,): the form of
    torchvision's detectors. Images that no batch had do not count.

    Args:
        annotations: a file in COCO format, or what is in one.
    """

    def __init__(self, annotations: str | os.PathLike[str] | Mapping[str, Any]) -> None:
        # Here, so that nobody trains for hours before hearing that it is missing.
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
            ``{"bbox": {"AP": ..., "AP50": ..., ...}}`` in percent, with the names of detectron2,
            the same on every rank. What there is no object for, such as ``APl`` where all are
            small, is left out.

        Raises:
            ValueError: on every rank, if no rank had an image.
        """
        images: dict[int, list[dict[str, Any]]] = {}
        for found in comm.all_gather(self._found):
            images |= found
        if not images:
            raise ValueError("there is no image to evaluate, on any rank")
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
