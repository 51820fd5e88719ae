"""The names of :mod:`hooktrain.events`, where detectron2's users look for them."""

from hooktrain.events import *  # noqa: F403
