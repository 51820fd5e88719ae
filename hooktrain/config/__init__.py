"""Configurations in plain Python: lazy calls, overrides from the command line, one saved file."""

from hooktrain.config.config_dict import ConfigDict as ConfigDict, resolve as resolve
from hooktrain.config.lazy import (
    LazyCall as LazyCall,
    LazyConfig as LazyConfig,
    instantiate as instantiate,
)
from hooktrain.config.overrides import apply_overrides as apply_overrides
