"""Models, and what a trainer does to them: averaged weights, exact statistics of BatchNorm."""

from hooktrain.model.averaged import ExponentialMovingAverage
from hooktrain.model.digits_cnn import DigitsCNN
from hooktrain.model.precise_bn import get_bn_modules, update_bn_stats

__all__ = ["DigitsCNN", "ExponentialMovingAverage", "get_bn_modules", "update_bn_stats"]
