"""What a trainer does to models: averages of their weights, exact statistics of BatchNorm."""

from hooktrain.model.averaged import ExponentialMovingAverage
from hooktrain.model.precise_bn import get_bn_modules, update_bn_stats

__all__ = ["ExponentialMovingAverage", "get_bn_modules", "update_bn_stats"]
