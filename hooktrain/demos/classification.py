"""Accuracy and loss of a classifier."""

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor

from hooktrain.evaluation.evaluator import DatasetEvaluator, targets_of
from hooktrain.utils import comm

logger = logging.getLogger(__name__)


class ClassificationEvaluator(DatasetEvaluator):
    """Accuracy and loss of a classifier.

    Counts and the sum of losses stay on the device of the outputs until the end, so a batch costs
    no host-device synchronisation. They and the losses are float64 (float32 on Apple's devices,
    which have no float64), so the results depend on the division into batches only by rounding.

    Args:
        class_names: the names of the classes, in the order of the logits.
        label_key: the key of the labels, if a batch is a dict, or their index, if it is a tuple; by
            default the labels are a tuple's last item.
        topk: the values of k for which to report how often the label is among the k highest logits.
    """

    def __init__(
        self,
        class_names: Sequence[str],
        label_key: str | int = "label",
        topk: Sequence[int] = (),
    ) -> None:
        self._class_names = tuple(class_names)
        self._label_key = label_key
        self._topk = tuple(topk)
        self._most = max(self._topk, default=0)
        self.reset()

    def reset(self) -> None:
        """Forget everything: a new evaluation begins."""
        # One vector holds the number of samples per cell, label * C + prediction; then how often
        # the label ranks first, second, ... among the logits; then the sum of losses.
        cells = len(self._class_names) ** 2
        self._sizes = [cells, self._most, 1]
        self._sums = torch.zeros(sum(self._sizes), dtype=torch.float64)

    @torch.no_grad()
    def process(self, inputs: Any, outputs: Tensor) -> None:
        """Take in one batch.

        Args:
            inputs: the batch, with integer labels of shape (N,) in [0, C).
            outputs: logits, shape (N, C).

        Raises:
            ValueError: if shapes or types are wrong.
        """
        device = outputs.device
        classes = len(self._class_names)
        labels = torch.as_tensor(targets_of(inputs, self._label_key))
        if outputs.shape[1:] != (classes,) or labels.is_floating_point():
            raise ValueError(
                f"outputs must be of shape (N, {classes}) and labels integers of shape (N,), "
                f"but got {outputs.shape} and {labels.dtype} of {labels.shape}"
            )
        labels = labels.to(device, torch.int64, non_blocking=True)
        dtype = torch.float64
        if device.type == "mps":
            dtype = torch.float32
        # torch refuses labels of other shapes or out of range.
        losses = F.cross_entropy(outputs.to(dtype), labels, reduction="none")
        self._sums = self._sums.to(device, dtype)
        counts, ranked, loss = torch.split(self._sums, self._sizes)
        loss += losses.sum()

        cells = labels * classes + outputs.argmax(1)
        counts.scatter_add_(0, cells, torch.ones_like(losses))
        if self._most:
            highest = outputs.topk(self._most, 1).indices
            hits = highest == labels[:, None]
            ranked += hits.sum(0)

    def evaluate(self) -> dict[str, dict[str, float]]:
        """Compute the results of all ranks, and log a table of up to 100 classes. Collective.

        Returns:
            ``{"classification": {"accuracy": ..., "val_loss": ..., "mean_class_accuracy": ...}}``,
            equal on all ranks to the last bit, so that the ranks can base decisions on it.
            Accuracies are in percent. ``mean_class_accuracy`` is averaged over the classes that
            occur. ``val_loss`` is the mean cross entropy. For each k of ``topk`` there is
            ``accuracy_topk``.

        Raises:
            ValueError: on every rank, if no rank had a sample.
        """
        classes = len(self._class_names)
        # A host-device synchronisation, once per evaluation.
        own = self._sums.cpu()
        copied = own.to(torch.float64, copy=True)
        sums = comm.all_reduce(copied)
        cells, hits, loss = torch.split(sums, self._sizes)
        confusion = cells.view(classes, classes)
        images = confusion.sum(1)
        correct = confusion.diagonal()
        total = images.sum().item()
        if total == 0:
            raise ValueError("no rank has a sample to evaluate")

        by_class = 100 * correct / images  # nan for a class without samples
        self._log_table(images, correct, by_class)
        present = by_class[images > 0].tolist()
        right = correct.sum().item()
        results = {
            "accuracy": 100 * right / total,
            "val_loss": loss.item() / total,
            "mean_class_accuracy": math.fsum(present) / len(present),
        }
        for k in self._topk:
            right = hits[:k].sum().item()
            results[f"accuracy_top{k}"] = 100 * right / total
        return {"classification": results}

    def _log_table(self, images: Tensor, correct: Tensor, by_class: Tensor) -> None:
        if len(self._class_names) > 100 or not comm.is_main_process():
            return
        columns = {
            "class": self._class_names,
            "images": images.tolist(),
            "correct": correct.tolist(),
            "accuracy": by_class.tolist(),
        }
        # Class names are not parsed as numbers: "007" is not 7.
        formats = ("", ".0f", ".0f", ".2f")
        table = tabulate(columns, "keys", floatfmt=formats, disable_numparse=[0])
        logger.debug("Accuracy by class:\n%s", table)
