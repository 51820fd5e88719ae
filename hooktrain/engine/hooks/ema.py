"""An average of the model's weights, beside the raw ones."""

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from hooktrain.engine.train_loop import HookBase
from hooktrain.model import BaseAveragedModel, ExponentialMovingAverage
from hooktrain.utils.dtensor import load_full_state_dict

logger = logging.getLogger(__name__)


class EMA(HookBase):
    """Updates an average of the model's weights after each iteration.

    It starts from the weights that the training starts from. The model itself always keeps the
    raw weights, also in checkpoints. The average is state of this hook. To evaluate or export it::

        ema = hooks.EMA(model)
        with ema.swap():
            evaluate(model)

    Another average, here stochastic weight averaging at the end of a run::

        hooks.EMA(model, average=StochasticWeightAverage(model, interval=50), begin_iter=1000)

    Args:
        model: the model. Wrappers such as DDP are looked through.
        decay: the part of the average that stays at an update, in [0, 1).
        warmup: let the decay grow from small values, so that the random start is forgotten soon.
        average: takes the place of the one that ``decay`` and ``warmup`` make.
        begin_iter: the first update is at the end of this many iterations; before, the average is
            a copy of the weights. 0 and 1 are the same.

    Attributes:
        average: the :class:`~hooktrain.model.BaseAveragedModel`; ``average.module`` is the
            averaged model.

    Raises:
        ValueError: if ``decay`` is out of its range, or ``decay`` or ``warmup`` is given beside
            ``average``.
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float = 0.999,
        warmup: bool = True,
        *,
        average: BaseAveragedModel | None = None,
        begin_iter: int = 0,
    ) -> None:
        if average is None:
            if not 0 <= decay < 1:
                raise ValueError(f"decay must be in [0, 1): {decay!r}")
            average = ExponentialMovingAverage(model, 1 - decay, warmup=warmup)
        elif (decay, warmup) != (0.999, True):
            raise ValueError("give decay and warmup to the average itself")
        self._model = model
        self.average = average
        self.begin_iter = begin_iter

    def before_train(self) -> None:
        """Start from the weights that are there; warn if there will be nothing but a copy."""
        if not self.average.steps:  # host-device synchronisation, once a run
            self.average.reset(self._model)
        end = self.trainer.max_iter
        if self.begin_iter > end:
            logger.warning("No average: it begins after %d of %d iterations", self.begin_iter, end)

    def after_step(self) -> None:
        """Take the new weights in."""
        if self.trainer.iter + 1 < self.begin_iter:
            self.average.reset(self._model)
        else:
            self.average.update_parameters(self._model)

    def swap(self) -> AbstractContextManager[None]:
        """Inside, the model has the averaged weights; afterwards exactly the raw ones again."""
        return self.average.swap(self._model)

    def state_dict(self) -> dict[str, Any]:
        """The averaged weights and the number of updates."""
        return self.average.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned; a sharded model takes whole tensors too."""
        load_full_state_dict(self.average, state_dict)
