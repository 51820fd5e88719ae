"""detectron2's model zoo: its own, where it is installed."""

from pathlib import Path
from typing import Any

from hooktrain.compat.peers import of_peers
from hooktrain.config import LazyConfig

_PACKAGE = Path(__file__).parents[1]
# In an installed package they lie in its folder, and in a clone beside it.
_ROOT = _PACKAGE if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent


def __getattr__(name: str) -> Any:
    """What is not here; see :mod:`hooktrain.compat.peers`."""
    return _of_zoo(name, repr(name))


def _of_zoo(name: str, wanted: str) -> Any:
    otherwise = (
        f"{wanted} is in detectron2's model zoo: install detectron2 beside, or copy the "
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
    try:
        theirs = _of_zoo("get_config", repr(config_path))
    except ImportError:
        if config_path != "common/train.py":
            raise
        return LazyConfig.load(_ROOT / "configs" / config_path)
    return theirs(config_path, trained)
