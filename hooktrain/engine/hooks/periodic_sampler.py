"""What hooks that show samples of a model have in common."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from hooktrain.engine.hook_base import HookBase
from hooktrain.evaluation import inference_context
from hooktrain.utils.env import preserved_rng_state
from hooktrain.utils.file_io import is_disk_full
from hooktrain.utils.unwrap import unwrap_model

__all__ = ["PeriodicSampler"]

logger = logging.getLogger(__name__)


class PeriodicSampler(HookBase):
    """The base of hooks that sample every so often.

    Args:
        period: in iterations; the last iteration samples too, and with 0 no other.
        folder: for the files.

    Raises:
        ValueError: for a negative period.
    """

    def __init__(self, period: int, folder: str | os.PathLike[str]) -> None:
        if period < 0:
            raise ValueError(f"period must not be negative, but got {period!r}")
        self._period = period
        self._folder = Path(folder)

    def is_due(self) -> bool:
        """Whether to sample in this iteration."""
        done = self.trainer.iter + 1
        return done == self.trainer.max_iter or (self._period > 0 and done % self._period == 0)

    @contextmanager
    def sampling(self) -> Iterator[Any]:
        """The model, without its wrapper, ready to sample from.

        Where the trainer has an averaged model (``trainer.ema``), it has those weights meanwhile.
        It is in evaluation mode and no gradients are computed. The run's random numbers go on
        afterwards as if nothing had been drawn. For all ranks: those of a sharded model compute
        together.
        """
        model, ema = unwrap_model(self.trainer.model), getattr(self.trainer, "ema", None)
        averaged = nullcontext() if ema is None else ema.swap()
        with averaged, preserved_rng_state(), inference_context(model), torch.no_grad():
            yield model

    def write(self, suffix: str, write: Callable[[Path], object]) -> None:
        """Call ``write`` with ``<folder>/<iteration><suffix>``; a full disk is logged only."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write(self._folder / f"{self.trainer.iter:07d}{suffix}")
        except OSError as error:
            if not is_disk_full(error):
                raise
            logger.error("NOT WRITTEN: %s. Training goes on", error)
