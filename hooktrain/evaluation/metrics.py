"""The built-in metrics."""

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from hooktrain.evaluation.evaluator import DatasetEvaluator, targets_of
from hooktrain.utils import comm

logger = logging.getLogger(__name__)


class ClassificationEvaluator(DatasetEvaluator):
    """Accuracy and loss of a classifier.

    Counts and the sum of losses stay on the device of the outputs until the end, so a batch costs
    no host-device synchronisation. Losses are computed and summed in float64 (float32 on Apple's
    devices, which have no other): how the data is cut into batches makes no difference except
    for rounding.

    Args:
        class_names: one for each class, in the order of the logits.
        label_key: the key of the labels in a batch that is a dict. In a tuple they come last.
        topk: for each k it is reported how often the label is among the k highest logits.
    """

    def __init__(
        self,
        class_names: Sequence[str],
        label_key: str = "label",
        topk: Sequence[int] = (),
    ) -> None:
        self._class_names = tuple(class_names)
        self._label_key = label_key
        self._topk = tuple(topk)
        # Of what is counted: label * C + prediction, labels that are out of range, and for each
        # place in the order of the logits how often the label has it.
        self._sizes = (len(self._class_names) ** 2, 1, max(self._topk, default=0))
        self.reset()

    def reset(self) -> None:
        """Forget everything: a new evaluation begins."""
        self._counts = torch.zeros(sum(self._sizes), dtype=torch.int64)
        self._loss_sum = torch.zeros((), dtype=torch.float64)

    @torch.no_grad()
    def process(self, inputs: Any, outputs: Tensor) -> None:
        """Take in one batch.

        Args:
            inputs: the batch, with integer labels of shape (N,) in [0, C).
            outputs: logits, shape (N, C).

        Raises:
            ValueError: no labels, wrong shapes or types. Labels out of range are an error of
                :meth:`evaluate`, to save a synchronisation.
        """
        classes, key = len(self._class_names), self._label_key
        labels = torch.as_tensor(targets_of(inputs, key))
        shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs)
        fits = labels.dim() == 1 and shape == (len(labels), classes)
        if not fits or labels.is_floating_point():
            raise ValueError(
                f"outputs must be of shape (N, {classes}), and {key!r} integers of shape (N,), "
                f"but got {shape} and {labels.dtype} of shape {tuple(labels.shape)}"
            )
        labels = labels.to(outputs.device, torch.int64, non_blocking=True)
        in_range = (labels >= 0) & (labels < classes)
        labels = labels.clamp(0, classes - 1)

        cells = torch.where(in_range, labels * classes + outputs.argmax(1), classes**2)
        self._counts = self._counts.to(outputs.device)
        self._counts.scatter_add_(0, cells, torch.ones_like(cells))
        if self._topk:
            highest = outputs.topk(max(self._topk), 1).indices
            self._counts[classes**2 + 1 :] += (highest == labels[:, None]).sum(0)

        dtype = torch.float32 if outputs.device.type == "mps" else torch.float64
        log_probs = outputs.to(dtype).log_softmax(1).gather(1, labels[:, None])
        self._loss_sum = self._loss_sum.to(outputs.device, dtype) - log_probs.sum()

    def evaluate(self) -> dict[str, dict[str, float]]:
        """Sum up the batches of all ranks, and log a table of up to 100 classes. Collective.

        Returns:
            ``{"classification": {"accuracy": ..., "val_loss": ..., "mean_class_accuracy": ...}}``,
            the same on every rank to the last bit, so that all of them can decide by it.
            Accuracies are in percent; that of classes is averaged over those that occur.
            ``val_loss`` is the mean cross entropy. For each ``topk`` there is an ``accuracy@k``.

        Raises:
            ValueError: on every rank, if there was no sample, or a label out of range.
        """
        # The transfers wait for the device: a host-device synchronisation, once an evaluation.
        sums = torch.cat(
            [self._counts.cpu().double(), self._loss_sum.cpu().double()[None]]
        )
        cells, out_of_range, hits, loss = torch.split(
            comm.all_reduce(sums), [*self._sizes, 1]
        )
        classes = len(self._class_names)
        if out_of_range > 0:
            raise ValueError(
                f"{int(out_of_range)} labels are out of range: not in [0, {classes})"
            )
        confusion = cells.long().view(classes, classes)
        images, correct = confusion.sum(1), confusion.diagonal()
        total = int(images.sum())
        if total == 0:
            raise ValueError("there is no sample to evaluate, on any rank")

        accuracies = (
            100 * correct.double() / images
        ).tolist()  # nan for a class without samples
        if comm.is_main_process() and classes <= 100:
            shown = ["n/a" if math.isnan(a) else f"{a:.2f}" for a in accuracies]
            rows = zip(
                self._class_names, images.tolist(), correct.tolist(), shown, strict=True
            )
            headers = ["class", "images", "correct", "accuracy"]
            align = ("left", "right", "right", "right")
            # Without parsing of numbers names stay as they are: "007" is not 7.
            table = tabulate(list(rows), headers, colalign=align, disable_numparse=True)
            logger.debug("Accuracy by class:\n%s", table)
        present = [accuracy for accuracy in accuracies if not math.isnan(accuracy)]
        return {
            "classification": {
                "accuracy": 100 * int(correct.sum()) / total,
                "val_loss": loss.item() / total,
                "mean_class_accuracy": math.fsum(present) / len(present),
                **{
                    f"accuracy@{k}": 100 * hits[:k].sum().item() / total
                    for k in self._topk
                },
            }
        }
