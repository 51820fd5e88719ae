"""What `train` can hold, with its defaults; hooktrain/engine/settings.py says what each is."""

from hooktrain.engine import train_settings

train = train_settings()
