"""An exponential moving average of the model, beside the raw weights."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from hooktrain.engine.hook_base import HookBase
from hooktrain.model import ExponentialMovingAverage

__all__ = ["EMA"]


class EMA(HookBase):
    """Updates an average of the model's weights after each iteration.

    The model itself always keeps the raw weights, also in checkpoints; the average and its counter
    are state of this hook. To evaluate or export the average::

        ema = hooks.EMA(model)
        with ema.swap():
            evaluate(model)

    Args:
        model: the model; DDP is looked through.
        decay: the part of the old average that stays, in (0, 1).
        warmup: let the decay grow from small values, so that the random start is forgotten soon.

    Attributes:
        average: the :class:`~hooktrain.model.ExponentialMovingAverage`; ``average.module`` is the
            averaged model.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999, warmup: bool = True) -> None:
        self._model = model
        self.average = ExponentialMovingAverage(model, decay=decay, warmup=warmup)

    def after_step(self) -> None:
        """Take the new weights in."""
        self.average.update(self._model)

    def swap(self) -> AbstractContextManager[None]:
        """Inside, the model has the averaged weights; afterwards exactly the raw ones again."""
        return self.average.swap(self._model)

    def state_dict(self) -> dict[str, Any]:
        """The averaged weights and the counter."""
        return self.average.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` gave."""
        self.average.load_state_dict(state_dict)
