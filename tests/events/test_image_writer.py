"""Images as PNG files, read back by another library."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hooktrain.events.storage import write_png
from hooktrain.utils import comm
from hooktrain.utils.events import EventStorage, ImageWriter


def pixels(path: Path) -> list[object]:
    with Image.open(path) as image:
        image.load()  # checks the sums
        return np.asarray(image).tolist()


def test_a_png_holds_the_pixels_grey_or_coloured_and_those_outside_are_clipped(
    tmp_path: Path,
) -> None:
    coloured = torch.randint(256, (3, 5, 7), dtype=torch.uint8)
    write_png(tmp_path / "a.png", coloured)
    assert pixels(tmp_path / "a.png") == coloured.permute(1, 2, 0).tolist()
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
    grey = torch.tensor([[[-1.0, 0.0, 0.5], [1.0, 2.0, 0.25]]])
    for image in (grey, grey.numpy(), grey.to(torch.bfloat16)):
        write_png(tmp_path / "a.png", image)
        assert pixels(tmp_path / "a.png") == [[0, 0, 128], [255, 255, 64]]


def test_images_land_as_files_with_their_names_and_iterations(tmp_path: Path) -> None:
    writer = ImageWriter(tmp_path / "images")
    with EventStorage() as storage:
        writer.rewind(0)
        writer.write()
        assert not (tmp_path / "images").exists()
        for storage.iter in (3, 19):
            storage.put_image(
                "../up/a b", torch.full((1, 1, 1), storage.iter, dtype=torch.uint8)
            )
        writer.write()
        assert storage.images() == []
    assert pixels(tmp_path / "images" / ".._up_a_b_0000003.png") == [[3]]
    assert pixels(tmp_path / "images" / ".._up_a_b_0000019.png") == [[19]]
    assert [path.name for path in tmp_path.iterdir()] == ["images"]


@pytest.mark.parametrize(("start", "kept"), [(0, "images.1"), (5, "images")])
def test_a_new_run_sets_the_images_of_another_aside_and_a_resumed_one_adds_to_them(
    start: int, kept: str, tmp_path: Path
) -> None:
    old = tmp_path / "images" / "old.png"
    old.parent.mkdir()
    old.touch()
    writer = ImageWriter(tmp_path / "images")
    with EventStorage(start) as storage:
        writer.rewind(start)
        storage.put_image("new", torch.zeros(1, 1, 1))
        writer.write()
    assert (tmp_path / kept / "old.png").exists()
    assert (tmp_path / "images" / f"new_000000{start}.png").exists()


def test_only_the_main_process_writes_and_no_process_keeps_the_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comm, "is_main_process", lambda: False)
    writer = ImageWriter(tmp_path)
    with EventStorage() as storage:
        writer.rewind(0)
        storage.put_image("photo", torch.zeros(1, 2, 2))
        writer.write()
        assert storage.images() == []
    assert list(tmp_path.iterdir()) == []
