"""Hooks that show samples of a generative model during training."""

import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hooktrain.demos.text import CharVocabulary
from hooktrain.engine import HookBase
from hooktrain.evaluation import inference_context
from hooktrain.model.wrappers import unwrap_model
from hooktrain.utils import comm
from hooktrain.utils.file_io import atomic_write, is_disk_full
from hooktrain.utils.periods import Period

logger = logging.getLogger(__name__)


class PeriodicSampler(HookBase):
    """The base class of hooks that sample periodically.

    Args:
        period: the period in iterations; 0 samples only in the last iteration, which always does.
        folder: the folder for the files.

    Raises:
        ValueError: if the period is negative.
    """

    def __init__(self, period: int, folder: str | os.PathLike[str]) -> None:
        if period < 0:
            raise ValueError(f"period must not be negative, but got {period!r}")
        self._period = Period(period)
        self._folder = Path(folder)

    @contextmanager
    def sampling(self) -> Iterator[Any]:
        """A context that yields the model, without its wrapper, ready to sample from.

        Inside, the model is in evaluation mode, no gradients are computed, and it has the averaged
        weights if the trainer has an averaged model (``trainer.ema``). All ranks call this, since
        the ranks of a sharded model compute together.
        """
        model = unwrap_model(self.trainer.model)
        ema = getattr(self.trainer, "ema", None)
        averaged = nullcontext() if ema is None else ema.swap()
        with averaged, inference_context(model), torch.no_grad():
            yield model

    def write(self, suffix: str, write: Callable[[Path], object]) -> None:
        """Call ``write`` with ``<folder>/<iteration><suffix>``; a full disk is only logged."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            name = f"{self.trainer.iter:07d}{suffix}"
            write(self._folder / name)
        except OSError as error:
            if not is_disk_full(error):
                raise
            logger.error("NOT WRITTEN: %s. Training continues", error)


class SampleWriter(PeriodicSampler):
    """Periodically calls the model with the same inputs, and writes the images that it returns.

    They are written as one grid to ``<output_dir>/<name>/<iteration>.png``, with the iteration of
    a checkpoint of the same weights, and put into the storage, whose writers show it in
    TensorBoard. If the trainer has an averaged model (``trainer.ema``), that model draws.

    Register it on every rank: all ranks draw, since a model may communicate; the main rank
    writes. If the model takes no inputs, override :meth:`draw`.

    A full disk is logged and does not end the run.

    Args:
        period: the period in iterations; 0 writes only in the last iteration, which always writes.
        inputs: the inputs of the model.
        output_dir: the folder of the run.
        name: the name of the folder for the files, and of the image in the storage.
        columns: the number of images in a row of the grid.
        scale: the side of the square that shows a pixel.

    Raises:
        ValueError: if the period is negative.
    """

    def __init__(
        self,
        period: int,
        inputs: Tensor,
        output_dir: str | os.PathLike[str],
        *,
        name: str = "samples",
        columns: int = 10,
        scale: int = 1,
    ) -> None:
        super().__init__(period, Path(output_dir) / name)
        self._inputs = inputs
        self._name = name
        self._columns = columns
        self._scale = scale

    def draw(self, model: nn.Module) -> Tensor:
        """The images to show, of shape (N, C, H, W), in [0, 1]; the model is in eval mode."""
        images: Tensor = model(self._inputs)
        return images

    def after_step(self) -> None:
        """Draw and write at the end of a period, and in the last iteration."""
        if not self._period.is_due_or_last(self.trainer):
            return
        with self.sampling() as model:
            images = self.draw(model)
        if comm.is_main_process():
            grid = make_grid(images, self._columns, self._scale)
            self.trainer.storage.put_image(self._name, grid)
            self.write(".png", lambda path: write_png(path, grid))


class TextSampler(PeriodicSampler):
    """Periodically lets the model continue a text.

    The text is logged, and written to ``<output_dir>/samples/<iteration>.txt``, with the iteration
    of a checkpoint of the same weights. If the trainer has an averaged model
    (``trainer.ema``), that model writes. The random numbers are the same each time, so texts differ
    only by the weights.

    Register it on every rank: all ranks sample, since a model may communicate; the main
    rank writes. A full disk is logged and does not end the run.

    Args:
        period: the period in iterations; 0 samples only in the last iteration, which always does.
        vocabulary: the vocabulary, or any object with its ``encode`` and ``decode``.
        output_dir: the folder of the run.
        prompt: the beginning of the text, not empty.
        length: the number of tokens to add, at least 1.
        temperature: see :meth:`hooktrain.demos.TextGPT.generate`; models of other classes
            need such a method.
        seed: the seed of the random numbers.

    Raises:
        ValueError: if the period is negative.
    """

    def __init__(
        self,
        period: int,
        vocabulary: CharVocabulary,
        output_dir: str | os.PathLike[str],
        *,
        prompt: str = "\n",
        length: int = 400,
        temperature: float = 0.8,
        seed: int = 0,
    ) -> None:
        super().__init__(period, Path(output_dir) / "samples")
        self._vocabulary = vocabulary
        self._prompt = prompt
        self._length = length
        self._temperature = temperature
        self._seed = seed

    def before_train(self) -> None:
        """Refuse a model without ``generate`` before hours of training."""
        model = unwrap_model(self.trainer.model)
        if not hasattr(model, "generate"):
            text = "TextSampler needs a model with a method generate"
            raise TypeError(f"{text}; {type(model).__name__} has none")

    def after_step(self) -> None:
        """Sample at the end of a period, and in the last iteration."""
        if not self._period.is_due_or_last(self.trainer):
            return
        text = self.sample()
        if comm.is_main_process():
            done = self.trainer.done
            logger.info("After %d iterations the model writes:\n%s", done, text)
            self.write(".txt", lambda path: _write(path, text))

    def sample(self) -> str:
        """The prompt and the model's current continuation."""
        prompt = self._vocabulary.encode(self._prompt)
        generator = torch.Generator().manual_seed(self._seed)
        with self.sampling() as model:
            tokens: Tensor = model.generate(
                prompt, self._length, self._temperature, generator
            )
        return self._vocabulary.decode(tokens)


def _write(path: Path, text: str) -> None:
    with atomic_write(path) as file:
        file.write(text.encode())


def write_png(path: Path, image: Tensor) -> None:
    """Write an image as a PNG file (ISO/IEC 15948).

    Args:
        path: the file; its folder must exist.
        image: an image of shape (C, H, W), where C is 1 or 3, with values in [0, 1] (others are
            clipped) or uint8.
    """
    if image.is_floating_point():
        scaled = image.clamp(0, 1) * 255
        image = scaled.round().to(torch.uint8)
    channels, height, width = image.shape
    colour = {1: 0, 3: 2}[channels]  # grey, red-green-blue
    pixels = image.permute(1, 2, 0).cpu()
    rows = pixels.reshape(height, -1).numpy()
    rows = np.pad(rows, ((0, 0), (1, 0)))  # each row begins with its filter; 0 is none
    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    chunks = {b"IHDR": header, b"IDAT": zlib.compress(rows.tobytes()), b"IEND": b""}
    with atomic_write(path) as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        for kind, data in chunks.items():
            length = len(data)
            checksum = zlib.crc32(kind + data)
            file.write(struct.pack(">I", length))
            file.write(kind)
            file.write(data)
            file.write(struct.pack(">I", checksum))


def make_grid(
    images: Tensor, columns: int = 10, scale: int = 1, padding: int = 1
) -> Tensor:
    """Arrange images in a grid, row by row, starting at the top left.

    Args:
        images: images of shape (N, C, H, W), at least one, with values in [0, 1] or uint8.
        columns: the number of images in a row, at least 1; fewer if there are fewer images.
        scale: the side of the square that shows a pixel, at least 1.
        padding: the width in pixels (before scaling) of the black lines between images and around
            the grid, at least 0.

    Returns:
        The grid, of shape (C, height, width), on the images' device. Empty cells are black.
    """
    columns = min(columns, len(images))
    missing = -len(images) % columns
    # Each cell has lines at its top and left. The lines at the bottom and right are added last.
    cells = F.pad(images, (padding, 0, padding, 0, 0, 0, 0, missing))
    cells = cells.view(-1, columns, *cells.shape[1:])
    grid = cells.permute(2, 0, 3, 1, 4)
    grid = grid.flatten(3).flatten(1, 2)
    grid = F.pad(grid, (0, padding, 0, padding))
    grid = grid.repeat_interleave(scale, 1)
    return grid.repeat_interleave(scale, 2)
