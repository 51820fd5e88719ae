"""detectron2's model zoo, if detectron2 is installed."""

from importlib.util import find_spec
from typing import Any

from hooktrain.compat.detectron2.functions import import_from_detectron2
from hooktrain.config import ConfigDict
from hooktrain.engine import train_settings


def __getattr__(name: str) -> Any:
    """Import a name that is missing here from detectron2; see :mod:`hooktrain.compat.peers`."""
    return import_from_detectron2(name)


def get_config(config_path: str, trained: bool = False) -> Any:
    """Load one of detectron2's configurations.

    Without detectron2 only ``"common/train.py"`` exists, as hooktrain's file with the same keys and
    values.

    Args:
        config_path: a path in detectron2's folder ``configs``.
        trained: whether the configuration starts from weights of the zoo.

    Raises:
        ImportError: for any other path, without detectron2.
    """
    if config_path == "common/train.py" and find_spec("detectron2") is None:
        return ConfigDict(train=train_settings())
    return import_from_detectron2("get_config")(config_path, trained)
