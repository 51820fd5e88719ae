"""What most training scripts share: arguments, set-up, and by detectron2's path the rest."""

import argparse
import difflib
import logging
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hooktrain.checkpoint.resume import set_folder_aside
from hooktrain.config import ConfigDict, LazyConfig, resolve
from hooktrain.engine.default_trainer import (
    DefaultTrainer as DefaultTrainer,
    default_hooks as default_hooks,
    default_writers as default_writers,
)
from hooktrain.strategy import wrap_in_ddp
from hooktrain.strategy.environment import restart_count, set_random_seed
from hooktrain.utils import comm
from hooktrain.utils.collect_env import collect_env_info
from hooktrain.utils.comm import on_main_process
from hooktrain.utils.file_io import lock_folder, on_disk
from hooktrain.utils.logger import LEVELS, setup_logger

logger = logging.getLogger(__name__)

_EXAMPLES = """examples:
  %(prog)s --config-file configs/digits_cnn.py
  %(prog)s --config-file configs/digits_cnn.py optimizer.lr=0.1 train.max_iter=500
  %(prog)s --config-file configs/digits_cnn.py --num-gpus 2
  torchrun --nproc-per-node=2 %(prog)s --config-file configs/digits_cnn.py
"""


def create_ddp_model(
    model: nn.Module,
    *,
    type: str | None = None,
    fp16_compression: bool = False,
    **kwargs: Any,
) -> nn.Module:
    """Wrap a model in DistributedDataParallel if there are several ranks.

    Args:
        model: a model on its device.
        type: the name of the wrapper in ``MODEL_WRAPPERS``; None is that of
            :func:`~hooktrain.strategy.wrapper_for`.
        fp16_compression: exchange gradients in float16.
        **kwargs: of the wrapper; see :class:`torch.nn.parallel.DistributedDataParallel`.

    Raises:
        KeyError: if there is no such wrapper.
    """
    if comm.get_world_size() == 1:
        return model
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return wrap_in_ddp(
        model, device, type=type, fp16_compression=fp16_compression, **kwargs
    )


def default_argument_parser(epilog: str | None = None) -> argparse.ArgumentParser:
    """The arguments that training scripts share.

    Args:
        epilog: the text after the help; None gives examples.
    """
    parser = argparse.ArgumentParser(
        epilog=epilog or _EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--config-file", default="", metavar="FILE", help="path of the configuration")
    add(
        "--resume",
        action="store_true",
        help="go on after the last checkpoint, if there is one",
    )
    add("--eval-only", action="store_true", help="evaluate only")
    levels = "what the terminal shows; log.txt has everything"
    add("--log-level", choices=tuple(LEVELS), default="normal", help=levels)
    add(
        "--print-config",
        action="store_true",
        help="print the configuration, and do nothing else",
    )
    add(
        "--dry-run",
        action="store_true",
        help="two iterations, to see that it works and how fast",
    )
    add(
        "--num-gpus",
        type=int,
        default=1,
        help="processes, each with its GPU, per machine",
    )
    add("--num-machines", type=int, default=1, help="number of machines")
    add("--machine-rank", type=int, default=0, help="this machine's number, from 0")
    add(
        "--dist-url",
        default="auto",
        help="where the processes meet, such as tcp://host:port",
    )
    changes = (
        "changes of the configuration, each as key.subkey=value, +new.key=value or ~key"
    )
    add("opts", nargs="*", help=changes)
    return parser


def default_setup(cfg: Any, args: Any) -> None:
    """Prepare a run: output folder, logs, environment report, configuration file, seed.

    It writes ``log.txt`` (one more for each further rank) and ``config.json`` into the
    output folder, and locks the folder against a second run. A folder that has checkpoints
    is first renamed to ``<folder>.1``, unless the run resumes; then the log says which lines
    of the configuration have changed.

    Args:
        cfg: a configuration; of it, ``train.output_dir``, ``train.seed``,
            ``train.cudnn_benchmark`` and ``train.float32_precision`` are looked at. A seed
            that is None or negative is drawn and stored back; a resumed run takes that of
            the configuration in the folder. Each rank is seeded with the seed plus its rank.
        args: the command line's arguments; of them, ``config_file``, ``resume``,
            ``log_level``, ``eval_only``, ``dry_run`` and ``print_config``, if there. With
            ``eval_only`` nothing but the log is written, and another run may be using the
            folder; with ``dry_run`` nothing is. A restart by torchrun is a resume too.

    Raises:
        SystemExit: with ``print_config``, which prints a file for ``--config-file``.
        RuntimeError: if another run is using the output folder.
        ValueError: for keys of detectron2's older configurations, or an output folder that
            is an address such as ``s3://...``.
        OSError: if the folder cannot be written to.
    """
    if "OUTPUT_DIR" in cfg:
        raise ValueError(
            "OUTPUT_DIR would not be used: take train.output_dir, or default_setup of "
            "hooktrain.compat.detectron2"
        )
    if getattr(args, "print_config", False):
        if comm.is_main_process():
            sys.stdout.write(LazyConfig.to_json(cfg))
        raise SystemExit(0)
    train = cfg.get("train", {})
    eval_only = getattr(args, "eval_only", False)
    resumes = getattr(args, "resume", False) or eval_only or restart_count() > 0
    folder = ""
    if train.get("output_dir"):
        train["output_dir"] = on_disk(train["output_dir"])
        if not getattr(args, "dry_run", False):
            folder = train["output_dir"]
    aside = None
    if folder:
        aside = on_main_process(partial(_claim_folder, folder, eval_only, resumes))
    level = getattr(args, "log_level", "normal")
    setup_logger(folder or None, distributed_rank=comm.get_rank(), level=level)
    if aside is not None:
        text = "A new run begins: the folder of the earlier one is now %s"
        logger.warning(text + ". Renamed back, it can be resumed", aside)
    _log_circumstances(args)
    path = Path(folder, "config.json") if folder else None
    _seed(train, path if resumes else None)
    if isinstance(cfg, ConfigDict):
        resolve(cfg)  # what refers to the seed, or to what a script has changed
    if path and comm.is_main_process() and not eval_only:
        before = path.read_text("utf-8") if path.is_file() else ""
        LazyConfig.save(cfg, path)
        _log_changes(before, path.read_text("utf-8"))
        logger.info("Full config saved to %s", path)
    _set_backends(train, eval_only)


def _set_backends(train: Any, eval_only: bool) -> None:
    if not eval_only and train.get("cudnn_benchmark") is not None:
        torch.backends.cudnn.benchmark = bool(train["cudnn_benchmark"])
    if train.get("float32_precision"):
        torch.set_float32_matmul_precision(train["float32_precision"])


def _claim_folder(folder: str, eval_only: bool, resumes: bool) -> Path | None:
    """Make and lock the folder; where that of an earlier run is now, if there was one."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    if eval_only:
        return None
    aside = None if resumes else set_folder_aside(folder)
    lock_folder(folder)
    return aside


def _log_circumstances(args: Any) -> None:
    rank, size = comm.get_rank(), comm.get_world_size()
    logger.debug("Rank of current process: %d. World size: %d", rank, size)
    logger.debug("Environment info:\n%s", collect_env_info())
    logger.debug("Command line arguments: %s", args)
    file = getattr(args, "config_file", "")
    if file:
        logger.debug("Contents of %s:\n%s", file, Path(file).read_text("utf-8"))


def _log_changes(before: str, now: str) -> None:
    """Log which lines of the configuration a resumed run has changed."""
    lines = difflib.unified_diff(
        before.splitlines(), now.splitlines(), "before", "now", lineterm="", n=0
    )
    changes = "\n".join(lines)
    if before and changes:
        logger.info("The configuration has changed:\n%s", changes)


def _seed(train: Any, earlier: Path | None) -> None:
    """Seed this process, by the earlier start's drawn seed if this one is to draw one."""
    seed = train.get("seed")
    is_drawn = seed is None or seed < 0
    if is_drawn and earlier is not None:
        seed = on_main_process(lambda: _seed_in(earlier))
    seed = set_random_seed(seed, diff_rank_seed=True)
    if "seed" in train:
        train["seed"] = seed


def _seed_in(path: Path) -> int | None:
    if not path.is_file():
        return None
    seed: int | None = LazyConfig.load(path).get("train", {}).get("seed")
    return seed
