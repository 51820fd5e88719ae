"""A small convolutional network."""

from hooktrain.config import LazyCall as L
from hooktrain.demos import DigitsCNN

model = L(DigitsCNN)(channels=32, dropout=0.5, num_classes=10)
