"""Precise batch-norm statistics before an evaluation."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from hooktrain.engine.batches import Batches
from hooktrain.engine.train_loop import HookBase
from hooktrain.model import get_bn_modules, update_bn_stats
from hooktrain.utils.events import EventStorage

logger = logging.getLogger(__name__)


class PreciseBN(HookBase):
    """Replaces the running statistics of batch norm by the true ones of recent weights.

    See :func:`hooktrain.model.update_bn_stats`. Register it before ``EvalHook``.

    Args:
        period: in iterations, or like ``"1 epoch"``; 0 or less does it at the last one only.
        model: a model whose batch-norm layers are in training mode when the time comes; without
            any, nothing is done.
        data_loader: batches for the model. A finite loader starts again when it is exhausted. If it
            knows its position, it must not be the trainer's own.
        num_iter: the number of batches to measure on.

    Raises:
        ValueError: when training starts, if the trainer's own loader would lose its position.
    """

    def __init__(
        self, period: int | str, model: nn.Module, data_loader: Iterable[Any], num_iter: int
    ) -> None:
        self._period = period
        self._model = model
        self._batches = Batches(data_loader)
        self._num_iter = num_iter

    def before_train(self) -> None:
        """Refuse to take batches from the training."""
        loader = self._batches.loader
        if loader is self.trainer.data_loader and hasattr(loader, "state_dict"):
            raise ValueError("PreciseBN would move the trainer's data_loader on: build it another")

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
        with EventStorage(self.trainer.iter):  # what the model records now is not part of the run
            update_bn_stats(self._model, self._batches, self._num_iter)

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, if the loader knows it."""
        return self._batches.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned."""
        self._batches.load_state_dict(state_dict, begun=False)
