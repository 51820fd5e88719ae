"""Images and histograms: checked and brought to the host."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = Tensor | NDArray[Any]


def read_image(name: str, image: Array) -> Tensor:
    """A private copy of an image on the host; see ``EventStorage.put_image``."""
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


def make_histogram(name: str, values: Array, bins: int, iteration: int) -> dict[str, Any]:
    """The arguments of ``SummaryWriter.add_histogram_raw``; see ``EventStorage.put_histogram``."""
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
