"""Images and histograms: checked and brought to the host."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = Tensor | NDArray[Any]


def read_image(name: str, image: Array) -> Array:
    """A private copy of an image on the host, array or tensor; see ``EventStorage.put_image``."""
    tensor = torch.as_tensor(image).detach()
    can_be_shown = tensor.dtype == torch.uint8 or tensor.is_floating_point()
    if not can_be_shown or tensor.dim() != 3 or tensor.shape[0] not in (1, 3) or not tensor.numel():
        raise ValueError(
            f"image {name!r} must be uint8 (0..255) or floating point (0..1), of shape (channels, "
            f"height, width) with 1 or 3 channels, but is {tensor.dtype}, {tuple(tensor.shape)}"
        )
    copy = tensor.to("cpu", copy=True)  # host-device synchronisation, if it is on a device
    return copy if isinstance(image, Tensor) else copy.numpy()


def make_histogram(name: str, values: Array, bins: int, iteration: int) -> dict[str, Any]:
    """The arguments of ``SummaryWriter.add_histogram_raw``; see ``EventStorage.put_histogram``."""
    # Host-device synchronisation, if the values are on a device.
    array = torch.as_tensor(values).detach().cpu().double().numpy()
    counts, edges = np.histogram(array, bins)  # refuses values that are not finite
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
