"""Averages of the weights that a model goes through during training."""

import math

from torch import nn

from hooktrain.model.averaged import BaseAveragedModel

__all__ = ["ExponentialMovingAverage", "MomentumAnnealingEMA", "StochasticWeightAverage"]


class ExponentialMovingAverage(BaseAveragedModel):
    """The exponential moving average of a model's weights.

    ``w = 1 - decay``, which others call the momentum (Polyak averaging; the averages of Mean
    Teacher, arXiv:1703.01780).

    Args:
        model: see :class:`BaseAveragedModel`.
        decay: in [0, 1); 0 keeps a plain copy.
        warmup: use ``min(decay, (1 + n) / (10 + n))`` after ``n`` updates, which forgets the
            start sooner.
        interval: see :class:`BaseAveragedModel`.
    """

    def __init__(
        self, model: nn.Module, decay: float = 0.999, *, warmup: bool = False, interval: int = 1
    ) -> None:
        _check_decay(decay)
        super().__init__(model, interval=interval)
        self.decay = decay
        self.warmup = warmup

    def blending_weight(self, updates: int) -> float:
        """``1 - decay``, with the decay of this update."""
        n = updates
        return 1 - (min(self.decay, (1 + n) / (10 + n)) if self.warmup else self.decay)


class MomentumAnnealingEMA(BaseAveragedModel):
    """An exponential moving average that forgets fast at first, and more and more slowly then.

    ``w = max(1 - decay, gamma / (gamma + n))`` after ``n`` updates, so the first one copies. It is
    MMEngine's, where ``1 - decay`` is the ``momentum``.

    Args:
        model: see :class:`BaseAveragedModel`.
        decay: that of the end, in [0, 1).
        gamma: how long the decay takes to get there: ``gamma * decay / (1 - decay)`` updates;
            positive.
        interval: see :class:`BaseAveragedModel`.
    """

    def __init__(
        self, model: nn.Module, decay: float = 0.9998, gamma: float = 100, *, interval: int = 1
    ) -> None:
        _check_decay(decay)
        if not 0 < gamma < math.inf:
            raise ValueError(f"gamma must be positive and finite: {gamma!r}")
        super().__init__(model, interval=interval)
        self.decay = decay
        self.gamma = gamma

    def blending_weight(self, updates: int) -> float:
        """``max(1 - decay, gamma / (gamma + updates))``."""
        return max(1 - self.decay, self.gamma / (self.gamma + updates))


class StochasticWeightAverage(BaseAveragedModel):
    """The equal average of the weights at each interval (SWA, arXiv:1803.05407).

    ``w = 1 / (n + 1)`` after ``n`` averaged ones; so the first update copies, and the weights at
    construction do not count. To begin late in training, see the hook
    :class:`~hooktrain.engine.hooks.EMA`. BatchNorm's statistics have to be replaced before the
    average is used, see :class:`BaseAveragedModel`.
    """

    def blending_weight(self, updates: int) -> float:
        """One part of all that were averaged, with this one."""
        return 1 / (updates // self.interval + 1)


def _check_decay(decay: float) -> None:
    if not 0 <= decay < 1:
        raise ValueError(f"decay must be in [0, 1): {decay!r}")
