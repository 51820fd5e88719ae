"""Images and histograms, checked and brought to the host when they are put."""

import logging
from collections import deque
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Array", "MediaQueues"]

logger = logging.getLogger(__name__)

Array = Tensor | NDArray[Any]

_MAX_LENGTH = 64


class MediaQueues:
    """The images and histograms that wait for a writer, at most 64 of each.

    Attributes:
        images: (name, tensor on the host, iteration) of each.
        histograms: the arguments of ``SummaryWriter.add_histogram_raw`` for each.
    """

    def __init__(self) -> None:
        self.images: deque[tuple[str, Tensor, int]] = deque(maxlen=_MAX_LENGTH)
        self.histograms: deque[dict[str, Any]] = deque(maxlen=_MAX_LENGTH)
        self._warned = False

    def add_image(self, name: str, image: Array, iteration: int) -> None:
        """Check and queue an image; see ``EventStorage.put_image``."""
        self._append(self.images, (name, _read_image(name, image), iteration))

    def add_histogram(self, name: str, values: Array, bins: int, iteration: int) -> None:
        """Count and queue a histogram; see ``EventStorage.put_histogram``."""
        self._append(self.histograms, _make_histogram(name, values, bins, iteration))

    def _append(self, queue: deque[Any], item: Any) -> None:
        if len(queue) == _MAX_LENGTH and not self._warned:
            self._warned = True
            logger.warning(
                "More than %d images or histograms wait for a writer: from now on the oldest are "
                "dropped. A TensorboardXWriter takes them whenever it writes.",
                _MAX_LENGTH,
            )
        queue.append(item)


def _read_image(name: str, image: Array) -> Tensor:
    """A private copy on the host."""
    if not isinstance(image, Tensor | np.ndarray):
        raise TypeError(f"image {name!r} must be a tensor or an array, but got {image!r}")
    tensor = torch.as_tensor(image).detach()
    if tensor.dtype != torch.uint8 and not tensor.is_floating_point():
        raise TypeError(
            f"image {name!r} must be uint8 (0..255) or floating point (0..1), "
            f"but it is {tensor.dtype}"
        )
    if tensor.dim() != 3 or tensor.shape[0] not in (1, 3) or not tensor.numel():
        raise ValueError(
            f"image {name!r} must have the shape (channels, height, width) with 1 or 3 channels, "
            f"but its shape is {tuple(tensor.shape)}"
        )
    return tensor.to("cpu", copy=True)  # host-device synchronisation, if it is on a device


def _make_histogram(name: str, values: Array, bins: int, iteration: int) -> dict[str, Any]:
    """Count the elements in intervals of equal width between the extremes."""
    if bins < 1:
        raise ValueError(f"histogram {name!r} needs at least 1 bin, but got bins={bins!r}")
    # Host-device synchronisation, if the values are on a device.
    array = torch.as_tensor(values).detach().cpu().double().numpy()
    if not array.size or not np.isfinite(array).all():
        raise ValueError(
            f"histogram {name!r} needs finite values, at least one, but got {values!r}"
        )
    counts, edges = np.histogram(array, bins)
    return {
        "tag": name,
        "min": float(array.min()),
        "max": float(array.max()),
        "num": int(array.size),
        "sum": float(array.sum()),
        "sum_squares": float(np.square(array).sum()),
        "bucket_limits": edges[1:].tolist(),
        "bucket_counts": counts.tolist(),
        "global_step": iteration,
    }
