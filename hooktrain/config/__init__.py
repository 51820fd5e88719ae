"""Configs in plain Python: described lazily, changed from the command line, saved to one file."""

from hooktrain.config.config_dict import ConfigDict as ConfigDict, resolve as resolve
from hooktrain.config.lazy import (
    LazyCall as LazyCall,
    LazyConfig as LazyConfig,
    instantiate as instantiate,
)
from hooktrain.config.overrides import apply_overrides as apply_overrides
