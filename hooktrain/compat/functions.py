"""detectron2's functions that read its configurations, or have no counterpart here."""

import logging
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map

from hooktrain import evaluation
from hooktrain.config import ConfigDict
from hooktrain.engine import defaults
from hooktrain.utils import comm

Result = TypeVar("Result")

logger = logging.getLogger(__name__)

# Where the names of detection stand there.
_OF_DETECTION = (
    *(
        "config",
        "data",
        "data.build",
        "data.common",
        "evaluation",
        "checkpoint",
        "modeling",
    ),
    *("engine.defaults", "utils.env", "utils.collect_env"),
)


def of_detectron2(name: str) -> Any:
    """What belongs to detection: detectron2's own.

    Raises:
        ImportError: if there is no such name, or detectron2 is not installed.
    """
    for module in _OF_DETECTION if find_spec("detectron2") else ():
        if hasattr(found := import_module(f"detectron2.{module}"), name):
            return getattr(found, name)
    raise ImportError(
        f"hooktrain has no {name!r}. What belongs to detection, and yacs's configurations, are "
        "detectron2's own: install it beside, or take a copy along (docs/migrating.md)"
    )


def default_setup(cfg: Any, args: Any) -> None:
    """:func:`hooktrain.engine.default_setup`, also for a tree with ``OUTPUT_DIR``.

    Of such a tree ``OUTPUT_DIR``, ``SEED`` and ``CUDNN_BENCHMARK`` are looked at, and it is saved
    as ``config.yaml``. Beside it, ``config.json`` holds the seed of a run that has drawn one.
    """
    if "OUTPUT_DIR" not in cfg:
        return defaults.default_setup(cfg, args)
    keys = ("OUTPUT_DIR", "SEED", "CUDNN_BENCHMARK")
    train = {key.lower(): getattr(cfg, key, None) for key in keys}
    defaults.default_setup(ConfigDict(train=train), args)
    if cfg.OUTPUT_DIR and comm.is_main_process():
        Path(cfg.OUTPUT_DIR, "config.yaml").write_text(cfg.dump(), encoding="utf-8")
    return None


def verify_results(cfg: Any, results: Mapping[str, Any]) -> bool:
    """Compare results with ``cfg.TEST.EXPECTED_RESULTS``, or with a list of such.

    See :func:`hooktrain.evaluation.verify_results`.
    """
    expected = cfg.TEST.EXPECTED_RESULTS if hasattr(cfg, "TEST") else cfg
    return evaluation.verify_results(expected, results) if expected else True


def retry_if_cuda_oom(func: Callable[..., Result]) -> Callable[..., Result]:
    """Let a function try again when the device's memory is full.

    First with the cache emptied, then with arguments on the CPU: tensors among them are copied
    there, so the result may be there too.
    """

    @wraps(func)
    def wrapped(*args: Any, **kwargs: Any) -> Result:
        for _ in range(2):
            try:
                return func(*args, **kwargs)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
        logger.info("The device's memory is full: %s computes on the CPU", func)
        args, kwargs = tree_map(_to_cpu, (args, kwargs))
        return func(*args, **kwargs)

    return wrapped


def _to_cpu(x: Any) -> Any:
    # Host-device synchronisation. Not only of tensors: batches of images move like them.
    return x.to("cpu") if hasattr(x, "to") and hasattr(x, "device") else x
