"""Images and histograms, which are checked and copied to the host before a writer gets them."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = Tensor | NDArray[Any]
Image = tuple[str, Tensor, int]  # a name, an image on the CPU, its iteration
Histogram = dict[str, Any]  # the arguments of SummaryWriter.add_histogram_raw


def new_image(name: str, array: Array, iteration: int) -> Image:
    """Copy an image to host memory; see :meth:`EventStorage.put_image`."""
    image = torch.as_tensor(array).detach()
    if image.dim() != 3 or len(image) not in (1, 3):
        raise ValueError(
            f"image {name!r} must have the shape (channels, height, width) with 1 or 3 "
            f"channels, but has {tuple(image.shape)}"
        )
    copied = image.to("cpu", copy=True)  # host-device synchronisation
    return name, copied, iteration


def new_histogram(name: str, array: Array, iteration: int, bins: int) -> Histogram:
    """Count the elements of a tensor; see :meth:`EventStorage.put_histogram`."""
    tensor = torch.as_tensor(array).detach()
    values = tensor.cpu().double().numpy()  # host-device synchronisation
    counts, edges = np.histogram(values, bins)
    return {
        "tag": name,
        "min": float(values.min()),
        "max": float(values.max()),
        "num": values.size,
        "sum": float(values.sum()),
        "sum_squares": float(np.square(values).sum()),
        "bucket_limits": edges[1:].tolist(),
        "bucket_counts": counts.tolist(),
        "global_step": iteration,
    }
