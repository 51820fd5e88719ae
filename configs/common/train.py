"""The settings of `train` with their defaults; hooktrain/engine/settings.py explains them."""

from hooktrain.engine import train_settings

train = train_settings()
