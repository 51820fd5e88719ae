"""Hooks that show what a model draws or writes as the training goes on."""

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
    """The base of hooks that sample every so often.

    Args:
        period: in iterations; the last iteration samples too, and with 0 no other.
        folder: where the files are written.

    Raises:
        ValueError: for a negative period.
    """

    def __init__(self, period: int, folder: str | os.PathLike[str]) -> None:
        if period < 0:
            raise ValueError(f"period must not be negative, but got {period!r}")
        self._period = Period(period)
        self._folder = Path(folder)

    @contextmanager
    def sampling(self) -> Iterator[Any]:
        """The model, without its wrapper, ready to sample from.

        If the trainer has an averaged model (``trainer.ema``), it has those weights meanwhile. It
        is in evaluation mode and no gradients are computed. All ranks call this, since those of a
        sharded model compute together.
        """
        model = unwrap_model(self.trainer.model)
        ema = getattr(self.trainer, "ema", None)
        averaged = nullcontext() if ema is None else ema.swap()
        with averaged, inference_context(model), torch.no_grad():
            yield model

    def write(self, suffix: str, write: Callable[[Path], object]) -> None:
        """Call ``write`` with ``<folder>/<iteration><suffix>``; a full disk is logged only."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            name = f"{self.trainer.iter:07d}{suffix}"
            write(self._folder / name)
        except OSError as error:
            if not is_disk_full(error):
                raise
            logger.error("NOT WRITTEN: %s. Training goes on", error)


class SampleWriter(PeriodicSampler):
    """Calls the model with the same inputs every so often, and writes the images that it returns.

    They are put as one grid into ``<output_dir>/<name>/<iteration>.png``, with the number that a
    checkpoint of the same weights has, and into the storage, whose writers show it in TensorBoard.
    If the trainer has an averaged model (``trainer.ema``), that one draws.

    Register it on every rank: each one draws, since parts of a model may communicate; the main rank
    writes. For a model that is not called with an input, override :meth:`draw`.

    A full disk is logged and does not end the run.

    Args:
        period: in iterations; the last iteration writes too, and with 0 no other.
        inputs: what the model is called with.
        output_dir: the folder of the run.
        name: of the folder for the files, and of the image in the storage.
        columns: images in a row of the grid.
        scale: draw each pixel as a square of this side.

    Raises:
        ValueError: for a negative period.
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
        """The images to show, shape (N, C, H, W), values in [0, 1]; the model is in eval mode."""
        images: Tensor = model(self._inputs)
        return images

    def after_step(self) -> None:
        """Draw and write where a period ends, and at the last iteration."""
        if not self._period.is_due_or_last(self.trainer):
            return
        with self.sampling() as model:
            images = self.draw(model)
        if comm.is_main_process():
            grid = make_grid(images, self._columns, self._scale)
            self.trainer.storage.put_image(self._name, grid)
            self.write(".png", lambda path: write_png(path, grid))


class TextSampler(PeriodicSampler):
    """Lets the model continue a text every so often.

    The text is logged, and written into ``<output_dir>/samples/<iteration>.txt``, with the number
    that a checkpoint of the same weights has. If the trainer has an averaged model
    (``trainer.ema``), that one writes. The random numbers are the same each time, so texts differ
    by the weights alone.

    Register it on every rank: each one samples, since parts of a model may communicate; the main
    rank writes. A full disk is logged and does not end the run.

    Args:
        period: in iterations; the last iteration samples too, and with 0 no other.
        vocabulary: turns text into tokens and back; anything with its ``encode`` and ``decode``
            will do.
        output_dir: the folder of the run.
        prompt: what the text begins with, not empty.
        length: how many tokens to add, at least 1.
        temperature: see :meth:`hooktrain.demos.TextGPT.generate`; models of another class
            need such a method.
        seed: of the random numbers.

    Raises:
        ValueError: for a negative period.
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
        """Refuse a model without ``generate`` before it has trained for hours."""
        model = unwrap_model(self.trainer.model)
        if not hasattr(model, "generate"):
            text = "TextSampler needs a model with a method generate"
            raise TypeError(f"{text}; {type(model).__name__} has none")

    def after_step(self) -> None:
        """Sample where a period ends, and at the last iteration."""
        if not self._period.is_due_or_last(self.trainer):
            return
        text = self.sample()
        if comm.is_main_process():
            done = self.trainer.done
            logger.info("After %d iterations the model writes:\n%s", done, text)
            self.write(".txt", lambda path: _write(path, text))

    def sample(self) -> str:
        """The prompt, and how the model continues it now."""
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
        image: shape (C, H, W), C 1 or 3; values in [0, 1] (others are clipped) or uint8.
    """
    if image.is_floating_point():
        scaled = image.clamp(0, 1) * 255
        image = scaled.round().to(torch.uint8)
    channels, height, width = image.shape
    colour = {1: 0, 3: 2}[channels]  # grey, red-green-blue
    pixels = image.permute(1, 2, 0).cpu()
    rows = pixels.reshape(height, -1).numpy()
    rows = np.pad(rows, ((0, 0), (1, 0)))  # each begins with its filter, 0 for none
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
    """Put images side by side into one, row by row, the first at the top left.

    Args:
        images: shape (N, C, H, W), N at least 1, values in [0, 1] or uint8.
        columns: images in a row, at least 1; fewer if there are fewer images.
        scale: draw each pixel as a square of this side, at least 1.
        padding: the width in pixels (before scaling) of the black lines between images and around
            the grid, at least 0.

    Returns:
        Shape (C, height, width), on the images' device. Places without an image are black.
    """
    columns = min(columns, len(images))
    missing = -len(images) % columns
    # Each cell has its line at the top and left. The last lines are added at the end.
    cells = F.pad(images, (padding, 0, padding, 0, 0, 0, 0, missing))
    cells = cells.view(-1, columns, *cells.shape[1:])
    grid = cells.permute(2, 0, 3, 1, 4)
    grid = grid.flatten(3).flatten(1, 2)
    grid = F.pad(grid, (0, padding, 0, padding))
    grid = grid.repeat_interleave(scale, 1)
    return grid.repeat_interleave(scale, 2)
