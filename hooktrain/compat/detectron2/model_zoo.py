"""detectron2's model zoo: its own, where it is installed."""

from importlib.util import find_spec
from typing import Any

from hooktrain.compat.detectron2.functions import of_detectron2
from hooktrain.config import ConfigDict
from hooktrain.engine import train_settings


def __getattr__(name: str) -> Any:
    """Find what is not here in detectron2; see :mod:`hooktrain.compat.peers`."""
    return of_detectron2(name)


def get_config(config_path: str, trained: bool = False) -> Any:
    """detectron2's configuration of that name.

    Without detectron2, ``"common/train.py"`` is hooktrain's, which has its keys and values.

    Args:
        config_path: a path in detectron2's folder ``configs``.
        trained: whether it starts from weights of the zoo.

    Raises:
        ImportError: for any other, without detectron2.
    """
    if config_path == "common/train.py" and find_spec("detectron2") is None:
        return ConfigDict(train=train_settings())
    return of_detectron2("get_config")(config_path, trained)
