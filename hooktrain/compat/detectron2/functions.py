"""detectron2's functions that read its configurations, or are missing in the core."""

import logging
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hooktrain import evaluation
from hooktrain.checkpoint.resume import checkpoint_names
from hooktrain.compat.peers import import_from_peers
from hooktrain.config import ConfigDict
from hooktrain.engine import defaults
from hooktrain.utils import comm, env
from hooktrain.utils.file_io import atomic_write, temporary_path

logger = logging.getLogger(__name__)

CONFIG = "config.yaml"  # the saved configuration tree, in the output folder

# The modules of detectron2 and its dependencies that have the names missing here.
_MODULES = (
    "detectron2.config",
    "detectron2.data",
    "detectron2.data.build",
    "detectron2.data.common",
    "detectron2.data.samplers",
    "detectron2.evaluation",
    "detectron2.checkpoint",
    "detectron2.engine",
    "detectron2.engine.defaults",
    "detectron2.engine.hooks",
    "detectron2.solver",
    "detectron2.solver.lr_scheduler",
    "detectron2.utils",
    "detectron2.utils.collect_env",
    "detectron2.utils.comm",
    "detectron2.utils.env",
    "detectron2.utils.events",
    "detectron2.utils.file_io",
    "detectron2.utils.logger",
    "detectron2.utils.memory",
    "detectron2.model_zoo",
    "detectron2.modeling",
    "fvcore.common.checkpoint",
    "fvcore.common.config",
    "fvcore.common.file_io",
    "fvcore.common.timer",
    "fvcore.nn.precise_bn",
    "iopath.common.file_io",
    "omegaconf",
)

# The packages of names that do not belong to detectron2.
_OWNERS = {"CfgNode": "fvcore", "Timer": "fvcore"} | dict.fromkeys(
    ("LazyPath", "PathManagerFactory", "file_lock", "get_cache_dir"), "iopath"
)


def import_from_detectron2(name: str) -> Any:
    """Import a name that hooktrain lacks, such as those of detection, from its own package.

    Raises:
        AttributeError: for one of Python's special names.
        ImportError: if there is no such name, or its package is not installed.
    """
    owner = _OWNERS.get(name, "detectron2")
    otherwise = (
        f"hooktrain has no {name!r}: it belongs to {owner}, or is misspelt. Install {owner} too, "
        "or copy the code (docs/migrating.md)"
    )
    return import_from_peers(name, _MODULES, otherwise)


def default_setup(cfg: Any, args: Any) -> None:
    """Call :func:`hooktrain.engine.default_setup`, also for a tree with ``OUTPUT_DIR``.

    It reads ``OUTPUT_DIR``, ``SEED`` and ``CUDNN_BENCHMARK`` of such a tree, and saves the tree as
    ``config.yaml``, except in an evaluation. In a resumed run the file is put in place only when a
    :class:`Checkpointer` of this package starts to save. If the seed was drawn, ``config.json``
    beside it records the seed.
    """
    if "OUTPUT_DIR" not in cfg:
        defaults.default_setup(cfg, args)
        return
    keys = ("OUTPUT_DIR", "SEED", "CUDNN_BENCHMARK")
    train = {key.lower(): getattr(cfg, key, None) for key in keys}
    settings = ConfigDict(train=train)
    defaults.default_setup(settings, args)
    folder = settings.train.output_dir
    eval_only = getattr(args, "eval_only", False)
    if folder and comm.is_main_process() and not eval_only:
        path = Path(folder, CONFIG)
        # If the folder has checkpoints, the run may resume, and the resume may be refused.
        written = temporary_path(path) if checkpoint_names(folder) else path
        with atomic_write(written) as file:
            file.write(cfg.dump().encode())


def verify_results(cfg: Any, results: Mapping[str, Any]) -> bool:
    """Compare results with ``cfg.TEST.EXPECTED_RESULTS``, or with such a list.

    See :func:`hooktrain.evaluation.verify_results`.
    """
    expected = cfg.TEST.EXPECTED_RESULTS if hasattr(cfg, "TEST") else cfg
    return evaluation.verify_results(expected, results) if expected else True


def seed_all_rng(seed: int | None = None) -> None:
    """Call :func:`hooktrain.utils.env.seed_all_rng`; None draws a seed, and logs it."""
    if seed is None:
        seed = secrets.randbits(32)
        logger.info("Seeding with the randomly drawn seed %d", seed)
    env.seed_all_rng(seed)
