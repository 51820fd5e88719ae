"""omegaconf's functions on ConfigDicts."""

from typing import Any

from hooktrain.config import ConfigDict as DictConfig

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
        if isinstance(cfg, list | tuple):
            return [OmegaConf.to_container(value) for value in cfg]
        return cfg
