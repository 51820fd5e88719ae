"""omegaconf's functions on ConfigDicts, and configurations in YAML."""

import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hooktrain import config as core
from hooktrain.config import ConfigDict as DictConfig, resolve

ListConfig = list


class OmegaConf:
    """Those functions of omegaconf that configurations use, with ConfigDict as the DictConfig."""

    @staticmethod
    def create(obj: Any = None, **options: Any) -> Any:
        """A config of a dict, or a list."""
        return DictConfig(root={} if obj is None else obj).root

    @staticmethod
    def to_container(cfg: Any, *, resolve: bool = False, **options: Any) -> Any:
        """Plain dicts and lists. References are resolved when a configuration is loaded."""
        if isinstance(cfg, dict):
            return {key: OmegaConf.to_container(value) for key, value in cfg.items()}
        return (
            list(map(OmegaConf.to_container, cfg))
            if isinstance(cfg, list | tuple)
            else cfg
        )


class LazyConfig(core.LazyConfig):
    """:class:`hooktrain.config.LazyConfig`, which reads YAML too where PyYAML is installed."""

    @staticmethod
    def load(filename: str | os.PathLike[str], keys: Any = None) -> Any:
        """The configuration in a ``.py``, ``.yaml`` or ``.yml`` file, or what ``keys`` name of it.

        Raises:
            ImportError: for YAML, if the package PyYAML is not installed.
        """
        path = Path(filename)
        if path == (python := _as_python(path)) or (
            python.exists() and not path.exists()
        ):
            return core.LazyConfig.load(python, keys)
        if find_spec("yaml") is None:
            raise ImportError(f"to read {path} needs: pip install pyyaml")
        cfg = resolve(
            DictConfig(import_module("yaml").safe_load(path.read_text("utf-8")))
        )
        if keys is None or isinstance(keys, str):
            return cfg if keys is None else cfg[keys]
        return tuple(cfg[key] for key in keys)

    @staticmethod
    def save(cfg: DictConfig, filename: str | os.PathLike[str]) -> None:
        """Write a ``.py`` file, also where a ``.yaml`` is asked for; :meth:`load` finds it."""
        core.LazyConfig.save(cfg, _as_python(Path(filename)))


def _as_python(path: Path) -> Path:
    return path.with_suffix(".py") if path.suffix in (".yaml", ".yml") else path
