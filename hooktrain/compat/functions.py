"""detectron2's functions that read its configurations, or have no counterpart here."""

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hooktrain import evaluation
from hooktrain.config import ConfigDict
from hooktrain.engine import defaults
from hooktrain.utils import comm

# Where detectron2 has the names that are not here.
_MODULES = (
    "config",
    "data",
    "data.build",
    "data.common",
    "data.samplers",
    "evaluation",
    "checkpoint",
    "modeling",
    "engine.defaults",
    "solver.lr_scheduler",
    "utils.collect_env",
    "utils.env",
    "utils.memory",
)


def of_detectron2(name: str) -> Any:
    """What is not here, such as all that belongs to detection: detectron2's own.

    Raises:
        ImportError: if there is no such name, or detectron2 is not installed.
    """
    modules = _MODULES if find_spec("detectron2") else ()
    for module in modules:
        found = import_module(f"detectron2.{module}")
        if hasattr(found, name):
            return getattr(found, name)
    raise ImportError(
        f"hooktrain has no {name!r}. What belongs to detection, yacs's configurations and old "
        "schedulers are detectron2's own: install it beside, or copy them (docs/migrating.md)"
    )


def default_setup(cfg: Any, args: Any) -> None:
    """:func:`hooktrain.engine.default_setup`, also for a tree with ``OUTPUT_DIR``.

    Of such a tree ``OUTPUT_DIR``, ``SEED`` and ``CUDNN_BENCHMARK`` are looked at, and it is saved
    as ``config.yaml``. Beside it, ``config.json`` holds the seed of a run that has drawn one.
    """
    if "OUTPUT_DIR" not in cfg:
        return defaults.default_setup(cfg, args)
    train = {}
    for key in ("OUTPUT_DIR", "SEED", "CUDNN_BENCHMARK"):
        train[key.lower()] = getattr(cfg, key, None)
    defaults.default_setup(ConfigDict(train=train), args)
    if cfg.OUTPUT_DIR and comm.is_main_process():
        path = Path(cfg.OUTPUT_DIR, "config.yaml")
        path.write_text(cfg.dump(), encoding="utf-8")
    return None


def verify_results(cfg: Any, results: Mapping[str, Any]) -> bool:
    """Compare results with ``cfg.TEST.EXPECTED_RESULTS``, or with a list of such.

    See :func:`hooktrain.evaluation.verify_results`.
    """
    expected = cfg.TEST.EXPECTED_RESULTS if hasattr(cfg, "TEST") else cfg
    return evaluation.verify_results(expected, results) if expected else True
