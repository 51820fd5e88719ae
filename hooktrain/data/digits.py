"""The handwritten digits that come with the package: 1,797 images of 8 by 8 pixels.

*Optical Recognition of Handwritten Digits*, E. Alpaydin and C. Kaynak, UCI Machine Learning
Repository, licence CC BY 4.0; see ``digits_data/README.md``.
"""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["CLASS_NAMES", "DigitsDataset", "RandomShift", "load_digits"]

CLASS_NAMES = ("0", "1", "2", "3", "4", "5", "6", "7", "8", "9")

DIGITS_FILE = Path(__file__).parent / "digits_data" / "digits.npz"


@lru_cache(maxsize=1)
def load_digits(file: Path = DIGITS_FILE) -> tuple[Tensor, Tensor]:
    """All images and labels, in the order of the file. Do not change them in place.

    Returns:
        The images, float32 of shape (1797, 1, 8, 8) with ink from 0 to 1; and the labels, int64 of
        shape (1797,).

    Raises:
        FileNotFoundError: if the file is missing.
        ValueError: if it is not what it should be.
    """
    try:
        with np.load(file, allow_pickle=False) as arrays:
            images, labels = arrays["images"], arrays["labels"]
    except FileNotFoundError:
        raise FileNotFoundError(
            f"the digits are missing; install the package again: {file}"
        ) from None
    except Exception as error:
        # numpy and zipfile raise many kinds of errors for a broken file.
        raise ValueError(f"the file of the digits is damaged: {file}: {error}") from error
    expected = {"images": ((1797, 8, 8), 16), "labels": ((1797,), 9)}
    for (name, (shape, most)), array in zip(expected.items(), (images, labels), strict=True):
        if array.shape != shape or array.dtype != np.uint8 or array.max() > most:
            raise ValueError(
                f"the file of the digits holds something else: {file}: {name} must be uint8 of "
                f"shape {shape} up to {most}, but is {array.dtype} of shape {array.shape}"
            )
    return torch.from_numpy(images)[:, None].float() / 16, torch.from_numpy(labels).long()


class DigitsDataset(Dataset[dict[str, Any]]):
    """The digits, in a fixed split: every fifth image, from the first on, is for testing.

    That makes 360 for testing and 1,437 for training. A sample is a dict with ``image``, float32
    of shape (1, 8, 8) in [0, 1], and ``label``, an int from 0 to 9.

    Args:
        train: which of the two parts.
        transform: applied to each sample.
    """

    def __init__(
        self,
        train: bool,
        transform: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> None:
        images, labels = load_digits()
        for_testing = torch.arange(len(labels)) % 5 == 0
        chosen = ~for_testing if train else for_testing
        self.images = images[chosen]
        self.labels: list[int] = labels[chosen].tolist()
        self.transform = transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = {"image": self.images[index], "label": self.labels[index]}
        return sample if self.transform is None else self.transform(sample)


class RandomShift:
    """Shifts an image by a random number of pixels in both directions, filling up with zeros.

    It draws from torch's global generator.

    Args:
        max_shift: the largest shift in pixels, at least 0.
    """

    def __init__(self, max_shift: int = 1) -> None:
        if max_shift < 0:
            raise ValueError(f"max_shift must not be negative, but got {max_shift!r}")
        self.max_shift = max_shift

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Return a sample with a shifted ``image`` of the same shape (..., H, W)."""
        most = self.max_shift
        image = sample["image"]
        height, width = image.shape[-2:]
        down, right = torch.randint(2 * most + 1, (2,)).tolist()
        padded = torch.nn.functional.pad(image, (most, most, most, most))
        return {**sample, "image": padded[..., down : down + height, right : right + width]}
