"""The handwritten digits that come with the package, and a small classifier.

*Optical Recognition of Handwritten Digits*, E. Alpaydin and C. Kaynak, UCI Machine Learning
Repository, licence CC BY 4.0; see ``digits_data/README.md``.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, Dataset

CLASS_NAMES = tuple("0123456789")

Sample = dict[str, Any]

DIGITS_FILE = Path(__file__).parent / "digits_data" / "digits.npz"


@lru_cache(maxsize=1)
def load_digits() -> tuple[Tensor, Tensor]:
    """All images and labels, in the order of the file. Do not change them in place.

    Returns:
        The images, float32 of shape (1797, 1, 8, 8) with values in [0, 1], where 1 is ink; and the
        labels, int64 of shape (1797,).
    """
    with np.load(DIGITS_FILE, allow_pickle=False) as arrays:
        images = torch.from_numpy(arrays["images"])
        labels = torch.from_numpy(arrays["labels"])
    ink = images.unsqueeze(1).float()
    return ink / 16, labels.long()


class DigitsDataset(Dataset[Sample]):
    """The digits, in a fixed split: every fifth image, starting with the first, is for testing.

    That gives 360 test and 1,437 training images. A sample is a dict with ``image``, float32
    of shape (1, 8, 8) in [0, 1], and ``label``, an int from 0 to 9.

    Args:
        train: True for the training part, False for the test part.
        transform: a function to apply to each sample.
    """

    def __init__(
        self, train: bool, transform: Callable[[Sample], Sample] | None = None
    ) -> None:
        images, labels = load_digits()
        numbers = torch.arange(len(labels))
        chosen = numbers % 5 == 0
        if train:
            chosen = ~chosen
        self.images = images[chosen]
        self.labels: list[int] = labels[chosen].tolist()
        self.transform = transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        sample = {"image": self.images[index], "label": self.labels[index]}
        if self.transform is None:
            return sample
        return self.transform(sample)


class RandomShift:
    """Shifts an image by a random number of pixels in both directions, and pads with zeros.

    It draws from torch's global generator.

    Args:
        max_shift: the largest shift in pixels, at least 0.
    """

    def __init__(self, max_shift: int = 1) -> None:
        self.max_shift = max_shift

    def __call__(self, sample: Sample) -> Sample:
        """Return a sample with a shifted ``image`` of the same shape (..., H, W)."""
        most = self.max_shift
        image = sample["image"]
        height, width = image.shape[-2:]
        down, right = torch.randint(2 * most + 1, (2,)).tolist()
        padded = F.pad(image, (most,) * 4)
        shifted = padded[..., down : down + height, right : right + width]
        return {**sample, "image": shifted}


class DigitsCNN(nn.Module):
    """Four convolutions and a linear layer for images of 8 by 8 pixels.

    It has two stages, with ``channels`` and then ``2 * channels`` maps. Each stage has two 3x3
    convolutions, each with BatchNorm and ReLU, and halves the image at its end, in the style of
    VGG (Simonyan and Zisserman, arXiv:1409.1556).

    Args:
        channels: the number of maps of the first stage, at least 1.
        dropout: the dropout probability before the last layer, in [0, 1).
        num_classes: the number of classes, at least 1.
    """

    def __init__(
        self, channels: int = 32, dropout: float = 0.2, num_classes: int = 10
    ) -> None:
        super().__init__()
        self.stage1 = _stage(1, channels)
        self.stage2 = _stage(channels, 2 * channels)
        self.dropout = nn.Dropout(dropout)
        pixels = 2 * 2
        self.head = nn.Linear(2 * channels * pixels, num_classes)

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor] | Tensor:
        """Compute the loss in training mode, logits in evaluation mode.

        Args:
            batch: ``"image"``, float, shape (N, 1, 8, 8), values in [0, 1]; and in
                training mode ``"label"``, integers of shape (N,) in [0, num_classes).

        Returns:
            ``{"loss_cls": mean cross entropy}``, or logits of shape (N, num_classes).
        """
        images = batch["image"]
        maps = self.stage1(images)
        maps = self.stage2(maps)
        features = self.dropout(maps.flatten(1))
        logits: Tensor = self.head(features)
        if not self.training:
            return logits
        loss = F.cross_entropy(logits, batch["label"])
        return {"loss_cls": loss}


def _stage(in_channels: int, out_channels: int) -> nn.Sequential:
    """A stage: two convolutions, then a pooling that halves height and width."""
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
        nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


def trained_digits_cnn(
    dataset: Dataset[Mapping[str, Any]],
    *,
    epochs: int = 12,
    channels: int = 16,
    seed: int = 0,
) -> DigitsCNN:
    """Train a small :class:`DigitsCNN` on the CPU, in a second or two.

    The same arguments give the same classifier. The state of torch's global generator is restored
    at the end, so that an ongoing run is not disturbed.

    Args:
        dataset: digits with ``"image"`` and ``"label"``.
        epochs: the number of passes over the data set, at least 1.
        channels: see :class:`DigitsCNN`.
        seed: the seed of the initial weights, of the order of the samples, and of random
            transforms.

    Returns:
        The network, in evaluation mode, without gradients.
    """
    with torch.random.fork_rng(devices=[]):
        # Only the CPU's generator is seeded, since only its state is restored.
        torch.default_generator.manual_seed(seed)
        model = DigitsCNN(channels=channels)
        order = torch.Generator().manual_seed(seed)
        loader = DataLoader(dataset, batch_size=64, shuffle=True, generator=order)
        optimizer = Adam(model.parameters(), lr=3e-3)
        schedule = LinearLR(
            optimizer, start_factor=1.0, end_factor=0.0, total_iters=epochs
        )
        with torch.enable_grad():  # evaluations run without gradients
            for _ in range(epochs):
                for batch in loader:
                    optimizer.zero_grad()
                    losses = model(batch)
                    losses["loss_cls"].backward()
                    optimizer.step()
                schedule.step()
    model.eval()
    return model.requires_grad_(False)
