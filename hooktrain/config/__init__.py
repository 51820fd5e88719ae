"""Configs in plain Python: described lazily, changed from the command line, saved to one file."""

from hooktrain.config.config_dict import ConfigDict, resolve
from hooktrain.config.lazy import LazyCall, LazyConfig, instantiate
from hooktrain.config.overrides import apply_overrides

__all__ = [
    "ConfigDict",
    "LazyCall",
    "LazyConfig",
    "apply_overrides",
    "instantiate",
    "resolve",
]
