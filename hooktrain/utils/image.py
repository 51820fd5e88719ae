"""Images as files and grids, without any further package."""

import os
import struct
import zlib

import torch
from torch import Tensor

from hooktrain.utils.file_io import atomic_write

__all__ = ["make_grid", "write_png"]

_COLOUR_TYPES = {1: 0, 3: 2}  # grey, red-green-blue


def make_grid(images: Tensor, columns: int = 10, scale: int = 1, padding: int = 1) -> Tensor:
    """Put images side by side into one, row by row, the first at the top left.

    Args:
        images: shape (N, C, H, W), N at least 1, values in [0, 1] or uint8.
        columns: images in a row, at least 1; fewer if there are fewer images.
        scale: draw each pixel as a square of this side, at least 1.
        padding: the width in pixels (before scaling) of the black lines between images and around
            the grid, at least 0.

    Returns:
        Shape (C, height, width), on the images' device. Places without an image are black.

    Raises:
        ValueError: for another shape, or a number out of range.
    """
    if images.dim() != 4 or len(images) == 0:
        raise ValueError(f"images must have shape (N, C, H, W), but got {tuple(images.shape)}")
    if columns < 1 or scale < 1 or padding < 0:
        raise ValueError(
            "columns and scale must be at least 1, and padding at least 0, but got "
            f"columns={columns!r}, scale={scale!r}, padding={padding!r}"
        )
    count, channels, height, width = images.shape
    columns = min(columns, count)
    rows = -(-count // columns)
    # Cells with their line at the top and left; the last line of each direction comes after.
    cells = images.new_zeros(rows * columns, channels, height + padding, width + padding)
    cells[:count, :, padding:, padding:] = images
    cells = cells.view(rows, columns, *cells.shape[1:])
    grid = cells.permute(2, 0, 3, 1, 4).flatten(3).flatten(1, 2)
    grid = torch.nn.functional.pad(grid, (0, padding, 0, padding))
    return grid.repeat_interleave(scale, 1).repeat_interleave(scale, 2)


def write_png(path: str | os.PathLike[str], image: Tensor) -> None:
    """Write an image as a PNG file, all at once and durably.

    Args:
        path: the file; its folder must exist.
        image: shape (C, H, W) with 1 channel (grey) or 3 (red, green, blue); uint8, or floating
            point with values in [0, 1] (what lies outside is clipped).

    Raises:
        TypeError: for another type.
        ValueError: for another shape.
        OSError: if the file cannot be written.
    """
    if image.dim() != 3 or image.shape[0] not in _COLOUR_TYPES or image.numel() == 0:
        raise ValueError(
            f"image must have shape (C, H, W) with 1 or 3 channels, but got {tuple(image.shape)}"
        )
    if image.is_floating_point():
        image = (image.clamp(0, 1) * 255).round().to(torch.uint8)
    elif image.dtype != torch.uint8:
        raise TypeError(f"image must be uint8 or floating point, but it is {image.dtype}")
    channels, height, width = image.shape
    pixels = image.permute(1, 2, 0).flatten(1)
    # The format (ISO/IEC 15948): each row begins with its filter, 0 for none.
    rows = torch.nn.functional.pad(pixels, (1, 0)).cpu()  # host-device synchronisation
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPES[channels], 0, 0, 0)
    with atomic_write(path) as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        file.write(_chunk(b"IHDR", header))
        file.write(_chunk(b"IDAT", zlib.compress(rows.numpy().tobytes())))
        file.write(_chunk(b"IEND", b""))


def _chunk(kind: bytes, data: bytes) -> bytes:
    """Length, kind, data, and the checksum of the latter two."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
