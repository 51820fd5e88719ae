"""detectron2's model zoo: its own, where it is installed."""

from importlib.util import find_spec
from typing import Any

from hooktrain.compat.peers import of_peers
from hooktrain.config import ConfigDict
from hooktrain.engine import train_settings


def __getattr__(name: str) -> Any:
    """Find what is not here in detectron2; see :mod:`hooktrain.compat.peers`."""
    otherwise = (
        f"{name!r} is of detectron2's model zoo: install detectron2 beside, or copy the "
        "configurations that you need (docs/migrating.md)"
    )
    modules = ["detectron2.model_zoo", "detectron2.model_zoo.model_zoo"]
    return of_peers(name, modules, otherwise)


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
    return __getattr__("get_config")(config_path, trained)
