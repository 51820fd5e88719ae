"""Images and histograms: checked and brought to the host; images as files."""

import struct
import zlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hooktrain.utils.file_io import AnyPath, atomic_write

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


def to_pixels(image: Array) -> NDArray[np.uint8]:
    """An image of :func:`read_image`'s kind as uint8 (height, width, channels), values clipped."""
    tensor = torch.as_tensor(image).detach()
    if tensor.is_floating_point():
        tensor = (tensor.clamp(0, 1) * 255).round().to(torch.uint8)
    pixels: NDArray[np.uint8] = tensor.permute(1, 2, 0).cpu().numpy()
    return pixels


def write_png(path: AnyPath, image: Array) -> None:
    """Write an image as a PNG file, all at once and durably.

    Args:
        path: the file; its folder must exist.
        image: as ``EventStorage.put_image`` takes it, on any device.

    Raises:
        OSError: if the file cannot be written.
    """
    pixels = to_pixels(image)
    height, width, channels = pixels.shape
    colour = {1: 0, 3: 2}[channels]  # grey, red-green-blue
    # The format (ISO/IEC 15948): each row begins with its filter, 0 for none.
    rows = np.pad(pixels.reshape(height, -1), ((0, 0), (1, 0)))
    with atomic_write(path) as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        file.write(_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)))
        file.write(_chunk(b"IDAT", zlib.compress(rows.tobytes())))
        file.write(_chunk(b"IEND", b""))


def _chunk(kind: bytes, data: bytes) -> bytes:
    """Length, kind, data, and the checksum of the latter two."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
