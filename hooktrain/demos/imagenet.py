"""A classifier of photographs with any network, such as torchvision's."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ImageClassifier(nn.Module):
    """A network from images to logits, with its training loss.

    Convolutions compute in the layout ``torch.channels_last``, which is fastest for mixed
    precision on GPUs.

    Args:
        net: the network, which maps images of shape (N, 3, H, W) to logits of shape (N, C).
        label_smoothing: the share of each target that is spread over all classes, in [0, 1]
            (Szegedy et al., arXiv:1512.00567).
    """

    def __init__(self, net: nn.Module, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload, unused-ignore]
        self.label_smoothing = label_smoothing

    def forward(self, batch: Sequence[Tensor]) -> dict[str, Tensor] | Tensor:
        """Compute the loss in training mode, logits in evaluation mode.

        Args:
            batch: images, float, and labels, integers of shape (N,) in [0, C).

        Returns:
            ``{"loss_cls": mean cross entropy, "accuracy": in percent}``, or logits.
        """
        images, labels = batch
        images = images.contiguous(memory_format=torch.channels_last)
        logits: Tensor = self.net(images)
        if not self.training:
            return logits
        loss = F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)
        # A smoothed loss never approaches 0, so the accuracy is easier to interpret.
        is_right = logits.argmax(1) == labels
        accuracy = 100 * is_right.float().mean()
        return {"loss_cls": loss, "accuracy": accuracy}
