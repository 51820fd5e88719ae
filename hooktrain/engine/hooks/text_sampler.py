"""Shows what a language model writes, as the training goes on."""

import logging
import os
from pathlib import Path

import torch
from torch import Tensor

from hooktrain.data.text import CharVocabulary
from hooktrain.engine.hooks.periodic_sampler import PeriodicSampler
from hooktrain.utils import comm
from hooktrain.utils.file_io import atomic_write
from hooktrain.utils.unwrap import unwrap_model

__all__ = ["TextSampler"]

logger = logging.getLogger(__name__)


class TextSampler(PeriodicSampler):
    """Lets the model continue a text every so often.

    What it writes is logged, and comes into ``<output_dir>/samples/<iteration>.txt``, with the
    number that a checkpoint of the same weights has. Where the trainer has an averaged model
    (``trainer.ema``), that one writes. The random numbers are the same each time, so that texts
    differ by the weights alone; those of the run go on as if nothing had been drawn.

    Register it on every rank: each one samples, since parts of a model may communicate; the main
    rank writes. A full disk is logged and does not end the run.

    Args:
        period: in iterations; the last iteration samples too, and with 0 no other.
        vocabulary: turns text into tokens and back; anything with its ``encode`` and ``decode``
            will do.
        output_dir: the folder of the run.
        prompt: what the text begins with, not empty.
        length: how many tokens to add, at least 1.
        temperature: see :meth:`hooktrain.model.text_gpt.TextGPT.generate`; models of another class
            need a method like it.
        seed: of the random numbers.

    Raises:
        ValueError: for arguments out of range.
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
        if not prompt:
            raise ValueError(f"prompt must not be empty, but got {prompt!r}")
        if length < 1:
            raise ValueError(f"length must be at least 1, but got {length!r}")
        if not temperature >= 0:
            raise ValueError(f"temperature must not be negative, but got {temperature!r}")
        self._vocabulary = vocabulary
        self._prompt = prompt
        self._length = length
        self._temperature = temperature
        self._seed = seed

    def before_train(self) -> None:
        """Refuse a model that cannot write before it has learnt for hours."""
        if not hasattr(model := unwrap_model(self.trainer.model), "generate"):
            raise TypeError(
                f"TextSampler needs a model with a method generate; {type(model).__name__} has none"
            )

    def after_step(self) -> None:
        """Sample where a period ends, and at the last iteration."""
        if not self.is_due():
            return
        text = self.sample()
        if comm.is_main_process():
            logger.info("After %d iterations the model writes:\n%s", self.trainer.iter + 1, text)
            self.write(".txt", lambda path: _write(path, text))

    def sample(self) -> str:
        """The prompt, and how the model goes on from it now."""
        prompt = self._vocabulary.encode(self._prompt)
        generator = torch.Generator().manual_seed(self._seed)
        with self.sampling() as model:
            tokens: Tensor = model.generate(prompt, self._length, self._temperature, generator)
        return self._vocabulary.decode(tokens)


def _write(path: Path, text: str) -> None:
    with atomic_write(path, "w") as file:
        file.write(text)
