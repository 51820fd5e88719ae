"""Shows what a model draws, as the training goes on."""

import os
from pathlib import Path

from torch import Tensor, nn

from hooktrain.engine.hooks.periodic_sampler import PeriodicSampler
from hooktrain.utils import comm
from hooktrain.utils.image import make_grid, write_png

__all__ = ["SampleWriter"]


class SampleWriter(PeriodicSampler):
    """Calls the model with the same inputs every so often, and writes the images it gives.

    They come as one grid into ``<output_dir>/<name>/<iteration>.png``, with the number that a
    checkpoint of the same weights has, and into the storage, whose writers show it in TensorBoard.
    Where the trainer has an averaged model (``trainer.ema``), that one draws. The run's random
    numbers go on as if nothing had been drawn.

    Register it before :class:`~hooktrain.engine.hooks.PeriodicWriter` and on every rank: each one
    draws, since parts of a model may communicate; the main rank writes. For a model that is not
    called with an input, override :meth:`draw`.

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
        if not self.is_due():
            return
        with self.sampling() as model:
            images = self.draw(model)
        if comm.is_main_process():
            grid = make_grid(images, self._columns, self._scale)
            self.trainer.storage.put_image(self._name, grid)
            self.write(".png", lambda path: write_png(path, grid))
