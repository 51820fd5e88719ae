"""How well a language model predicts a text."""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hooktrain.evaluation.evaluator import DatasetEvaluator
from hooktrain.utils import comm


class BitsPerCharacterEvaluator(DatasetEvaluator):
    """The bits that a character of a text takes, if it is coded by a model's predictions.

    The sum over all predicted characters, divided by their number: how the text is cut into
    batches and divided among ranks makes no difference but for rounding. Losses are computed and
    summed in float64 (float32 on Apple's devices, which have no other), and stay on the device of
    the outputs until the end, so a batch costs no host-device synchronisation.

    Args:
        target_key: where the targets stand in a batch. Negative ones are not predicted.
    """

    def __init__(self, target_key: str = "targets") -> None:
        self._target_key = target_key
        self.reset()

    def reset(self) -> None:
        """Forget everything: a new evaluation begins."""
        self._nats = torch.zeros((), dtype=torch.float64)
        self._characters = torch.zeros((), dtype=torch.int64)

    @torch.no_grad()
    def process(self, inputs: Mapping[str, Any], outputs: Tensor) -> None:
        """Take in one batch.

        Args:
            inputs: the batch, with integer targets of shape (N, T).
            outputs: logits, shape (N, T, C).

        Raises:
            KeyError: the batch has no targets.
            ValueError: wrong shapes.
        """
        if self._target_key not in inputs:
            raise KeyError(
                f"target_key {self._target_key!r} is not in the batch, which has {list(inputs)}"
            )
        targets = inputs[self._target_key]
        if outputs.dim() != 3 or targets.shape != outputs.shape[:2]:
            raise ValueError(
                f"outputs must be logits of shape (N, T, C) and {self._target_key!r} of shape "
                f"(N, T), but got {tuple(outputs.shape)} and {tuple(targets.shape)}"
            )
        targets = targets.to(outputs.device, non_blocking=True).flatten()
        dtype = torch.float32 if outputs.device.type == "mps" else torch.float64
        logits = outputs.flatten(0, 1).to(dtype)
        predicted = targets >= 0
        targets = torch.where(predicted, targets, -1)
        loss = F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")
        self._nats = self._nats.to(outputs.device, dtype) + loss
        self._characters = self._characters.to(outputs.device) + predicted.sum()

    def evaluate(self) -> dict[str, dict[str, float]]:
        """Sum up the batches of all ranks. Collective.

        Returns:
            ``{"text": {"bits_per_character": ..., "val_loss": ...}}``, the same on every rank to
            the last bit. ``val_loss`` is the mean cross entropy, in nats.

        Raises:
            ValueError: on every rank, if there was nothing to predict at all.
        """
        # The transfers wait for the device: a host-device synchronisation, once an evaluation.
        ranks = comm.all_gather((self._nats.item(), int(self._characters)))
        characters = sum(count for _, count in ranks)
        if characters == 0:
            raise ValueError("there is no character to predict, on any rank")
        loss = math.fsum(nats for nats, _ in ranks) / characters
        return {"text": {"bits_per_character": loss / math.log(2), "val_loss": loss}}
