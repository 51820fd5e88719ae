"""A small classifier of handwritten digits."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["DigitsCNN"]


class DigitsCNN(nn.Module):
    """Four convolutions and a linear layer for images of 8 by 8 pixels.

    Two stages, with ``channels`` and then ``2 * channels`` maps; each consists of two 3x3
    convolutions, with BatchNorm and ReLU after each, and halves the image at its end, in the manner
    of VGG (Simonyan and Zisserman, arXiv:1409.1556).

    Args:
        channels: maps of the first stage, at least 1.
        dropout: the share of features that training leaves out before the last layer, in [0, 1).
        num_classes: at least 1.

    Raises:
        ValueError: for an argument out of range.
    """

    def __init__(self, channels: int = 32, dropout: float = 0.2, num_classes: int = 10) -> None:
        super().__init__()
        if channels < 1:
            raise ValueError(f"channels must be at least 1, but got {channels!r}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), but got {dropout!r}")
        if num_classes < 1:
            raise ValueError(f"num_classes must be at least 1, but got {num_classes!r}")
        self.stage1 = _stage(1, channels)
        self.stage2 = _stage(channels, 2 * channels)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(2 * channels * 2 * 2, num_classes)

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor] | Tensor:
        """Compute the loss in training mode, logits in evaluation mode.

        Args:
            batch: on any device: ``"image"``, float, shape (N, 1, 8, 8), values in [0, 1]; and in
                training mode ``"label"``, integers of shape (N,) in [0, num_classes).

        Returns:
            ``{"loss_cls": mean cross entropy}``, or logits of shape (N, num_classes).

        Raises:
            ValueError: for wrong shapes.
        """
        device = self.head.weight.device
        images = batch["image"]
        if images.dim() != 4 or images.shape[1:] != (1, 8, 8):
            raise ValueError(f"'image' must have shape (N, 1, 8, 8), but got {tuple(images.shape)}")
        features = self.stage2(self.stage1(images.to(device, non_blocking=True)))
        logits: Tensor = self.head(self.dropout(features.flatten(1)))
        if not self.training:
            return logits
        labels = batch["label"]
        if labels.shape != images.shape[:1]:
            raise ValueError(
                f"'label' must have shape ({len(images)},), one for each image, but got "
                f"{tuple(labels.shape)}"
            )
        return {"loss_cls": F.cross_entropy(logits, labels.to(device, non_blocking=True))}


def _stage(in_channels: int, out_channels: int) -> nn.Sequential:
    """Two convolutions, then half the height and width."""
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
        nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )
