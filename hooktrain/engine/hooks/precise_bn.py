"""Precise batch-norm statistics before an evaluation."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from hooktrain.engine.train_loop import HookBase
from hooktrain.model import get_bn_modules, update_bn_stats
from hooktrain.utils.env import preserved_rng_state
from hooktrain.utils.events import EventStorage

__all__ = ["PreciseBN"]

logger = logging.getLogger(__name__)


class PreciseBN(HookBase):
    """Replaces the running statistics of batch norm by the true ones of recent weights.

    See :func:`hooktrain.model.update_bn_stats`. The run's random numbers go on as if nothing had
    been drawn meanwhile. Register it before ``EvalHook``.

    Args:
        period: in iterations; 0 does it at the last iteration only.
        model: a model whose batch-norm layers are in training mode when the time comes; without
            any, nothing is done.
        data_loader: batches for the model; a finite loader starts again when it is exhausted.
        num_iter: the number of batches to measure on, at least 1.

    Raises:
        ValueError: for arguments out of range.
    """

    def __init__(
        self, period: int, model: nn.Module, data_loader: Iterable[Any], num_iter: int
    ) -> None:
        if period < 0:
            raise ValueError(f"period must not be negative, but got {period!r}")
        if num_iter < 1:
            raise ValueError(f"num_iter must be at least 1, but got {num_iter!r}")
        self._period = period
        self._model = model
        self._data_loader = data_loader
        self._num_iter = num_iter
        self._batches: Iterator[Any] | None = None

    def after_step(self) -> None:
        """Measure where a period ends, and at the last iteration."""
        if self.is_due(self._period):
            self.update_stats()

    def update_stats(self) -> None:
        """Measure now."""
        if not get_bn_modules(self._model):
            logger.info("The model has no batch norm in training mode: no statistics to measure")
            return
        logger.info("Measuring batch-norm statistics on %d batches", self._num_iter)
        # Starting some loaders draws random numbers, which a resumed run does at other times.
        # What the model records while measuring is not part of the run.
        with preserved_rng_state(), EventStorage(self.trainer.iter):
            update_bn_stats(self._model, self._endless_batches(), self._num_iter)

    def _endless_batches(self) -> Iterator[Any]:
        while True:
            fresh = self._batches is None
            if self._batches is None:
                self._batches = iter(self._data_loader)
            for batch in self._batches:
                fresh = False
                yield batch
            if fresh:
                raise ValueError(f"the data loader is empty: {self._data_loader!r}")
            self._batches = None

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, if the loader knows it."""
        if hasattr(self._data_loader, "state_dict"):
            return {"loader": self._data_loader.state_dict()}
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` gave."""
        self._batches = None
        if hasattr(self._data_loader, "load_state_dict"):
            self._data_loader.load_state_dict(state_dict["loader"])
