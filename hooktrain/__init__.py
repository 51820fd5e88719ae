"""hooktrain: a hook-based minimal trainer for PyTorch."""

__version__ = "0.1.0"
