"""Judges drawn images by what a classifier recognises in them."""

import logging
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from hooktrain.evaluation.evaluator import DatasetEvaluator, inference_context
from hooktrain.utils import comm

__all__ = ["SampleQualityEvaluator"]

logger = logging.getLogger(__name__)


class SampleQualityEvaluator(DatasetEvaluator):
    """Shows samples of a generative model to a classifier of real data.

    Good samples are recognised with confidence, and all classes are among them: a model that draws
    one perfect image again and again has one class and no entropy. (The inception score,
    arXiv:1606.03498, puts both into one number.)

    Args:
        classifier: logits of shape (N, C) from a batch ``{"image": samples}``. It is used in
            evaluation mode, on the samples' device.
        class_names: one for each of the C classes.
        real: batches with ``"image"`` and ``"label"``, each rank's own share: how good the
            classifier itself is on them is reported too. None leaves that out.
    """

    def __init__(
        self,
        classifier: nn.Module,
        class_names: Sequence[str],
        real: Iterable[Mapping[str, Any]] | None = None,
    ) -> None:
        if isinstance(class_names, str) or len(class_names) == 0:
            raise ValueError(f"class_names must be a list of names, but got {class_names!r}")
        self._classifier = classifier
        self._class_names = tuple(class_names)
        self._real = real
        self.reset()

    def reset(self) -> None:
        """Forget everything: a new evaluation begins."""
        self._counts = torch.zeros(len(self._class_names), dtype=torch.int64)
        self._confidence = torch.zeros(())

    def process(self, inputs: Any, outputs: Tensor) -> None:
        """Take in one batch.

        Args:
            inputs: not looked at.
            outputs: samples, as the classifier takes them, first dimension N.

        Raises:
            ValueError: if the classifier knows another number of classes.
        """
        confidences, classes = self._classify(outputs)
        self._counts = self._counts.to(classes.device)
        self._counts += torch.bincount(classes, minlength=len(self._counts))
        self._confidence = self._confidence.to(classes.device) + confidences.sum()

    def evaluate(self) -> dict[str, OrderedDict[str, float]]:
        """Sum up the batches of all ranks, and log a table of the classes. Collective.

        Returns:
            ``{"samples": ...}`` with these, the same on every rank: ``classes``, how many occur;
            ``confidence``, the mean of the largest probability, from 0 to 1; ``entropy`` of the
            classes in nats, from 0 to log(C) for equal shares; ``count``, the number of samples;
            and with ``real`` the ``classifier_accuracy`` on it, from 0 to 1.

        Raises:
            ValueError: on every rank, if there was no sample at all, or no real image.
        """
        # The transfers wait for the device: a host-device synchronisation, once an evaluation.
        ranks = comm.all_gather((self._counts.tolist(), self._confidence.item(), self._judge()))
        counts = [sum(column) for column in zip(*(rank[0] for rank in ranks), strict=True)]
        total = sum(counts)
        if total == 0:
            raise ValueError("there is no sample to evaluate, on any rank")
        if comm.is_main_process():
            rows = list(zip(self._class_names, counts, strict=True))
            logger.info("Samples by class:\n%s", tabulate(rows, ["class", "samples"], "pipe"))
        shares = [count / total for count in counts if count]
        quality: OrderedDict[str, float] = OrderedDict(
            classes=len(shares),
            confidence=math.fsum(rank[1] for rank in ranks) / total,
            entropy=-math.fsum(share * math.log(share) for share in shares) + 0.0,
            count=total,
        )
        if self._real is not None:
            correct, images = (sum(rank[2][i] for rank in ranks) for i in range(2))
            if images == 0:
                raise ValueError(f"real gave no image, on any rank: {self._real!r}")
            quality["classifier_accuracy"] = correct / images
        return {"samples": quality}

    def _judge(self) -> tuple[int, int]:
        """How many of the real images the classifier recognises, and how many there are."""
        correct = images = 0
        for batch in self._real or ():
            _, classes = self._classify(batch["image"].to(self._counts.device))
            # Host-device synchronisation, for each batch.
            correct += int((classes.cpu() == batch["label"].cpu()).sum())
            images += len(classes)
        return correct, images

    @torch.no_grad()
    def _classify(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The largest probability of each image, and its class."""
        classifier = self._classifier.to(images.device)
        with inference_context(classifier):
            logits: Tensor = classifier({"image": images})
        if logits.dim() != 2 or logits.shape[1] != len(self._class_names):
            raise ValueError(
                f"the classifier must give logits of shape (N, {len(self._class_names)}), as there "
                f"are {len(self._class_names)} class_names, but gave {tuple(logits.shape)}"
            )
        confidences, classes = logits.float().softmax(1).max(1)
        return confidences, classes
