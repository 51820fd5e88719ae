"""hooktrain: a hook-based minimal trainer for PyTorch."""

from importlib.metadata import version

__version__ = "0.1.0"

# The installed release is asked for without importing torch, which takes seconds.
_TORCH = version("torch")
_RELEASE = tuple(map(int, _TORCH.split(".")[:2]))
if _RELEASE < (2, 10):
    raise ImportError(
        f"hooktrain needs torch 2.10 or later, and {_TORCH} is installed: "
        "no resume would accept the sharded checkpoints that it writes"
    )
