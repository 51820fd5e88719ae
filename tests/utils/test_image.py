import struct
import zlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hooktrain.utils.image import make_grid, write_png


def read_png(path: Path) -> tuple[tuple[int, ...], Tensor]:
    """A reader of our own: the numbers of the header, and the pixels as (H, W, C)."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, place = {}, 8
    while place < len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        kind, content = data[place + 4 : place + 8], data[place + 8 : place + 8 + length]
        (checksum,) = struct.unpack(">I", data[place + 8 + length : place + 12 + length])
        assert checksum == zlib.crc32(kind + content)
        chunks[kind] = content
        place += 12 + length
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    header = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    channels = {0: 1, 2: 3}[header[3]]
    rows = torch.frombuffer(bytearray(zlib.decompress(chunks[b"IDAT"])), dtype=torch.uint8)
    rows = rows.view(header[1], 1 + header[0] * channels)
    assert torch.equal(rows[:, 0], torch.zeros(header[1], dtype=torch.uint8))
    return header, rows[:, 1:].reshape(header[1], header[0], channels)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_png_holds_the_pixels(tmp_path: Path, channels: int) -> None:
    image = torch.randint(256, (channels, 5, 7), dtype=torch.uint8)
    write_png(tmp_path / "a.png", image)
    header, pixels = read_png(tmp_path / "a.png")
    assert header == (7, 5, 8, {1: 0, 3: 2}[channels], 0, 0, 0)
    assert torch.equal(pixels, image.permute(1, 2, 0))
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


def test_others_read_it_too(tmp_path: Path) -> None:
    image_module = pytest.importorskip("PIL.Image")
    image = torch.randint(256, (3, 4, 6), dtype=torch.uint8)
    write_png(tmp_path / "a.png", image)
    read = image_module.open(tmp_path / "a.png")
    assert (read.size, read.mode) == ((6, 4), "RGB")
    assert read.tobytes() == image.permute(1, 2, 0).contiguous().numpy().tobytes()


def test_floating_point_is_from_0_to_1_and_clipped(tmp_path: Path) -> None:
    write_png(tmp_path / "a.png", torch.tensor([[[-1.0, 0.0, 0.5, 1.0, 2.0]]]))
    assert read_png(tmp_path / "a.png")[1].flatten().tolist() == [0, 0, 128, 255, 255]


@pytest.mark.parametrize("shape", [(8, 8), (2, 8, 8), (1, 0, 8)])
def test_a_shape_that_is_no_image_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"\(C, H, W\) with 1 or 3 channels"):
        write_png(tmp_path / "a.png", torch.zeros(shape))


def test_another_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="uint8 or floating point, but it is"):
        write_png(tmp_path / "a.png", torch.zeros(1, 2, 2, dtype=torch.int64))


def test_a_grid_goes_row_by_row_with_lines_around() -> None:
    images = torch.arange(1, 4).view(3, 1, 1, 1).expand(3, 1, 1, 2)
    assert make_grid(images, columns=2).tolist() == [
        [
            [0, 0, 0, 0, 0, 0, 0],
            [0, 1, 1, 0, 2, 2, 0],
            [0, 0, 0, 0, 0, 0, 0],
            [0, 3, 3, 0, 0, 0, 0],
            [0, 0, 0, 0, 0, 0, 0],
        ]
    ]


def test_a_grid_without_lines_is_scaled_by_whole_pixels() -> None:
    images = torch.tensor([[1, 2], [3, 4]]).view(2, 2, 1, 1)  # two images of two channels
    assert make_grid(images, columns=5, scale=2, padding=0).tolist() == [
        [[1, 1, 3, 3], [1, 1, 3, 3]],
        [[2, 2, 4, 4], [2, 2, 4, 4]],
    ]


def test_a_grid_of_nothing_or_with_numbers_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(N, C, H, W\), but got \(0, 1, 8, 8\)"):
        make_grid(torch.zeros(0, 1, 8, 8))
    with pytest.raises(ValueError, match="columns=0, scale=1, padding=1"):
        make_grid(torch.zeros(1, 1, 8, 8), columns=0)
