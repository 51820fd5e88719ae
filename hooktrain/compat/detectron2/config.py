"""detectron2's `LazyCall` and `LazyConfig`, and omegaconf's functions on ConfigDicts."""

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hooktrain import config
from hooktrain.compat.peers import import_from_peers
from hooktrain.config import ConfigDict, resolve
from hooktrain.config.config_dict import find_key, from_omegaconf, to_config
from hooktrain.utils.file_io import AnyPath

DictConfig = ConfigDict
ListConfig = list
MISSING: Any = "???"
open_dict = nullcontext  # a ConfigDict always accepts new keys


class LazyCall(config.LazyCall):
    """A :class:`hooktrain.config.LazyCall` that refuses a target that cannot be called.

    Raises:
        TypeError: if the target is not a callable, a name or a configuration.
    """

    def __init__(self, target: Any) -> None:
        if not callable(target) and not isinstance(target, str | Mapping):
            raise TypeError(f"LazyCall needs a callable or its name, not {target!r}")
        super().__init__(target)


class LazyConfig(config.LazyConfig):
    """A :class:`hooktrain.config.LazyConfig` that also loads YAML, if omegaconf is installed."""

    @staticmethod
    def load(filename: AnyPath, keys: Any = None) -> Any:
        """Load a configuration and resolve its references; see the base class."""
        is_yaml = Path(filename).suffix in (".yaml", ".yml")
        if not is_yaml or find_spec("omegaconf") is None:
            return config.LazyConfig.load(filename, keys)
        omegaconf = import_module("omegaconf").OmegaConf
        cfg = resolve(to_config(omegaconf.load(filename)))
        if keys is None:
            return cfg
        if isinstance(keys, str):
            return cfg[keys]
        return tuple(cfg[key] for key in keys)

    @staticmethod
    def load_rel(filename: str, keys: Any = None) -> Any:
        """:meth:`load` a path that is relative to the file of the calling code."""
        caller = Path(sys._getframe(1).f_code.co_filename)
        return LazyConfig.load(caller.parent / filename, keys)


def _from_omegaconf(name: str, arguments: str = "") -> Any:
    otherwise = f"OmegaConf.{name}{arguments} needs omegaconf: install omegaconf"
    return getattr(import_from_peers("OmegaConf", ["omegaconf"], otherwise), name)


class _Functions(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _from_omegaconf(name)


class OmegaConf(metaclass=_Functions):
    """The functions of omegaconf that configurations use, for ConfigDicts.

    Its other functions come from omegaconf, if that is installed, and take no ConfigDict.
    """

    @staticmethod
    def create(obj: Any = None, **options: Any) -> Any:
        """Make a config from a dict or a list; for YAML text and other objects omegaconf does."""
        made = to_config({} if obj is None else obj)
        if isinstance(made, ConfigDict | list | tuple):
            return made
        return to_config(_from_omegaconf("create", f"({obj!r})")(obj))

    @staticmethod
    def select(cfg: Any, key: str, *, default: Any = None, **options: Any) -> Any:
        """The value at a dotted path, or ``default`` if there is none."""
        value = from_omegaconf(cfg, resolve=True)
        for part in key.split("."):
            found = find_key(value, part)
            if found is None:
                return default
            value = value[found]
        return value

    @staticmethod
    def to_container(cfg: Any, *, resolve: bool = False, **options: Any) -> Any:
        """Convert a config to plain dicts and lists.

        References of a ConfigDict are resolved when it is loaded, those of an omegaconf object
        here, if ``resolve`` is set.
        """
        cfg = from_omegaconf(cfg, resolve)
        if isinstance(cfg, dict):
            return {key: OmegaConf.to_container(value) for key, value in cfg.items()}
        if isinstance(cfg, list | tuple):
            return [OmegaConf.to_container(value) for value in cfg]
        return cfg
