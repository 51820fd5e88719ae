"""Scalars that were put and not read yet: queued without waiting, fetched all at once."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Pending", "Scalar", "fetch", "read_scalar"]

# What a metric's value may be; arrays and tensors must have one element.
Scalar = float | np.integer[Any] | np.floating[Any] | np.bool_ | NDArray[Any] | Tensor


# A value (a number, or a tensor that read_scalar returned) and its iteration.
Pending = tuple[float | Tensor, int]


def fetch(queues: Iterable[list[Pending]]) -> None:
    """Replace the tensors in the queues by their values: one transfer for each device."""
    by_device: dict[torch.device, list[tuple[list[Pending], int, Tensor]]] = {}
    for queue in queues:
        for index, (value, _) in enumerate(queue):
            if type(value) is not float:
                assert isinstance(value, Tensor)
                by_device.setdefault(value.device, []).append((queue, index, value))
    for places in by_device.values():
        values = _fetch([tensor for _, _, tensor in places])
        for (queue, index, _), number in zip(places, values, strict=True):
            queue[index] = (number, queue[index][1])


def read_scalar(name: str, value: Scalar) -> float | Tensor:
    """The value as a float; of a tensor on a device, a private copy there.

    Args:
        name: the metric, for the messages.
        value: a number, a bool, or a tensor or array with one element.

    Raises:
        TypeError: for something that is no real number.
        ValueError: for more or fewer elements than one.
    """
    if isinstance(value, int | float | np.integer | np.floating | np.bool_):
        return float(value)
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if not isinstance(value, Tensor) or value.is_complex():
        raise TypeError(
            f"metric {name!r} must be a real number or a tensor with one, but got {value!r}"
        )
    if value.numel() != 1:
        raise ValueError(
            f"metric {name!r} must have exactly one element, but its shape is {tuple(value.shape)}"
        )
    if _is_on_host(value):
        return float(value.item())
    # Double holds all that the other types do; MPS does not have it. The copy is queued on the
    # device, so the host does not wait, and what is written into the original later has no effect.
    dtype = torch.float32 if value.device.type == "mps" else torch.float64
    return value.detach().reshape(()).to(dtype, copy=True)


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _fetch(tensors: list[Tensor]) -> list[float]:
    """The values of tensors of one device, in one transfer."""
    values: list[float] = torch.stack(tensors).tolist()  # host-device synchronisation
    return values
