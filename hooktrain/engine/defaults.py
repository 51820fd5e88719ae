"""Defaults for training scripts: arguments, set-up, writers and hooks."""

import argparse
import json
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from hooktrain import events
from hooktrain.checkpoint import Checkpointer
from hooktrain.checkpoint.resume import archive_folder, checkpoint_names
from hooktrain.checkpoint.store import Store
from hooktrain.config import ConfigDict, LazyConfig, resolve
from hooktrain.engine import hooks
from hooktrain.evaluation.testing import EvalFunction
from hooktrain.events import EventWriter
from hooktrain.strategy import create_ddp_model as create_ddp_model
from hooktrain.strategy.environment import restart_count, set_random_seed
from hooktrain.utils import comm
from hooktrain.utils.collect_env import collect_env_info
from hooktrain.utils.comm import on_main_process
from hooktrain.utils.file_io import lock_folder, on_disk, temporary_path
from hooktrain.utils.logger import LEVELS, setup_logger
from hooktrain.utils.periods import PeriodLike

logger = logging.getLogger(__name__)

_EXAMPLES = """examples:
  %(prog)s --config-file configs/digits_cnn.py
  %(prog)s --config-file configs/digits_cnn.py optimizer.lr=0.1 train.max_iter=500
  %(prog)s --config-file configs/digits_cnn.py --num-gpus 2
  torchrun --nproc-per-node=2 %(prog)s --config-file configs/digits_cnn.py
"""


def default_argument_parser(epilog: str | None = None) -> argparse.ArgumentParser:
    """Build a parser for the arguments that training scripts share.

    Args:
        epilog: the text after the help; None shows examples.
    """
    parser = argparse.ArgumentParser(
        epilog=epilog or _EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--config-file", default="", metavar="FILE", help="path of the configuration")
    add(
        "--resume",
        action="store_true",
        help="resume from the last checkpoint, if there is one",
    )
    add("--eval-only", action="store_true", help="evaluate only")
    add(
        "--log-level",
        choices=tuple(LEVELS),
        default="normal",
        help="level of the terminal's log; log.txt has everything",
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
        help="address at which the processes meet, such as tcp://host:port",
    )
    add(
        "opts",
        nargs="*",
        help="changes to the configuration, each as key.subkey=value or +new.key=value",
    )
    return parser


def default_setup(cfg: Any, args: Any) -> None:
    """Prepare a run: output folder, logs, environment report, configuration file, seed.

    It writes ``log.txt`` (one more for each rank up to 127) and ``config.json`` into the
    output folder, and locks the folder against a second run.

    A new run renames a folder with checkpoints to ``<folder>.1``. A second stage needs its own
    folder: a ``train.init_checkpoint`` in the folder that would be renamed is refused.

    A run that resumes fetches its checkpoint from ``train.store`` if the folder has none. It
    replaces ``config.json`` once the checkpoint is loaded and the run begins. A restart by torchrun
    resumes too.

    Args:
        cfg: a configuration, whose ``train`` may have ``output_dir``, ``seed``, ``run_id``,
            ``store``, ``init_checkpoint`` and ``cudnn_benchmark``. A seed that is None or
            negative is drawn and stored back; a resumed run takes it from the configuration in the
            folder. Each rank is seeded with the seed plus its rank. A ``run_id`` of None is drawn
            and kept in the same way.
        args: the command-line arguments, which may have ``resume``, ``log_level`` and
            ``eval_only``. With ``eval_only`` only the log (if the folder is writable) and fetched
            checkpoints are written, and another run may be using the folder.

    Raises:
        RuntimeError: if another run is using the output folder.
        KeyError: for a configuration without ``train``, such as detectron2's older ones, for which
            ``hooktrain.compat.detectron2`` has a ``default_setup``.
        ValueError: if the output folder is an address such as ``s3://...``, or if
            ``train.init_checkpoint`` lies in a folder that would be renamed.
        OSError: if the folder cannot be written to.
    """
    train = cfg["train"]
    eval_only = getattr(args, "eval_only", False)
    goes_on = getattr(args, "resume", False) or restart_count() > 0
    resumes = goes_on or eval_only
    folder = train.get("output_dir")
    archived = None
    if folder:
        folder = train["output_dir"] = on_disk(folder)
        initial = train.get("init_checkpoint", "")
        claim = partial(_claim_folder, folder, initial, eval_only, resumes)
        archived = on_main_process(claim)
    logs_to = folder or None
    if eval_only and folder and not os.access(folder, os.W_OK):
        logs_to = None  # perhaps the run of another user
    setup_logger(logs_to, level=getattr(args, "log_level", "normal"))
    if archived:
        logger.warning(
            "A new run begins. The folder of the earlier run was renamed to %s; rename it back "
            "to resume that run",
            archived,
        )
    logger.debug("Environment info:\n%s", collect_env_info())
    logger.debug("Command line arguments: %s", args)
    path = Path(folder or "", "config.json")
    if goes_on and folder and train.get("store"):
        _fetch_run(train["store"], folder)
    earlier = path if folder and resumes else Path(os.devnull)
    seed, train["run_id"] = on_main_process(partial(_seed_and_run_id, train, earlier))
    train["seed"] = set_random_seed(seed, diff_rank_seed=True)
    if isinstance(cfg, ConfigDict):
        # Other values may refer to the seed, or to values that a script has changed.
        resolve(cfg)
    if folder and comm.is_main_process() and not eval_only:
        # When a resumed run begins, PeriodicCheckpointer replaces the earlier file by this one.
        LazyConfig.save(cfg, temporary_path(path) if earlier.is_file() else path)
        logger.info("Writing the full configuration to %s", path)
    if train.get("cudnn_benchmark"):
        torch.backends.cudnn.benchmark = True


def _claim_folder(
    folder: str, initial: str, eval_only: bool, resumes: bool
) -> Path | None:
    """Create and lock the folder; return the new path of an earlier run's folder."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    archived = None if resumes else archive_folder(folder, initial)
    if not eval_only:
        lock_folder(folder)
    return archived


def _fetch_run(store: str, folder: str) -> None:
    """Fetch the run to resume from the store if the folder has none. Collective."""
    # The Checkpointer looks for newer ones when it resumes.
    if not on_main_process(partial(checkpoint_names, folder)):
        next(Store(store, folder).names_to_resume([]), None)


def _seed_and_run_id(train: Any, earlier: Path) -> tuple[Any, Any]:
    """Return the seed and the id of the run: if not given, those of the run to resume.

    A new run gets a new id; its seed, None, is drawn later.

    Args:
        train: the settings.
        earlier: the ``config.json`` of the run to resume. If it is missing or damaged, the resume
            refuses the drawn seed, and names the run's.
    """
    seed, run_id = train.get("seed"), train.get("run_id")
    saved: dict[str, Any] = {}
    with suppress(FileNotFoundError, ValueError, LookupError, TypeError):
        saved = dict(json.loads(earlier.read_text("utf-8", "replace"))["train"])
    if seed is None or seed < 0:
        seed = saved.get("seed")
    return seed, run_id or saved.get("run_id") or uuid4().hex


def default_writers(output_dir: str, max_iter: int | None = None) -> list[EventWriter]:
    """Build writers to the console, to ``metrics.json`` and to TensorBoard.

    The writer to TensorBoard needs the package ``tensorboard``. If logging is not set up yet, this
    sets it up for the terminal and ``log.txt``; see :func:`hooktrain.utils.logger.setup_logger`.

    Args:
        output_dir: the folder to write to; the first write creates it.
        max_iter: see :class:`hooktrain.events.CommonMetricPrinter`.

    Raises:
        ValueError: if ``output_dir`` is empty, or an address such as ``s3://...``.
    """
    if not output_dir:
        raise ValueError("output_dir is '': pass a folder, such as './output'")
    output_dir = on_disk(output_dir)
    if not logger.hasHandlers():
        setup_logger(output_dir)
    metrics = events.JSONWriter(Path(output_dir, "metrics.json"))
    writers: list[EventWriter] = [events.CommonMetricPrinter(max_iter), metrics]
    if find_spec("tensorboard"):
        writers.append(events.TensorboardXWriter(output_dir))
    return writers


def default_hooks(
    *,
    scheduler: Any = None,
    checkpointer: Checkpointer,
    checkpoint_period: PeriodLike,
    max_to_keep: int | None = 3,
    eval_function: EvalFunction | None = None,
    eval_period: PeriodLike = 0,
    best_metric: str | None = None,
    best_mode: str | None = None,
    writers: Sequence[EventWriter] | None = None,
    log_period: PeriodLike = 20,
) -> list[hooks.HookBase]:
    """Build the usual hooks: time, schedule, evaluate, write, save, and summarise.

    Their phases place them around your own hooks; see :class:`hooktrain.engine.HookBase`.

    Args:
        scheduler: a schedule for :class:`hooktrain.engine.hooks.LRScheduler`, or such a hook. None
            only records the learning rate.
        checkpointer: the Checkpointer to save with.
        checkpoint_period: the period in iterations, or a text such as ``"1 epoch"`` or
            ``"10 minutes"``, as are all periods here.
        max_to_keep: the number of periodic checkpoints to keep; None keeps all.
        eval_function: see :class:`hooktrain.engine.hooks.EvalHook`; None never evaluates.
        eval_period: the period of evaluations; 0 evaluates only at the end.
        best_metric: the metric that chooses ``model_best.pth``; None keeps no best model. A name
            that begins with ``"ema/"`` is about the averaged weights of the hook ``EMA``.
        best_mode: ``"max"`` or ``"min"``; see :class:`hooktrain.engine.hooks.BestCheckpointer`.
        writers: see :class:`hooktrain.engine.hooks.PeriodicWriter`. None uses
            :func:`default_writers`, with the folder of the Checkpointer, if it has one.
        log_period: the period of the writers.

    Raises:
        ValueError: if ``eval_period`` or ``best_metric`` lacks an ``eval_function``.
    """
    if eval_function is None and (eval_period or best_metric):
        raise ValueError(
            f"{eval_period=} and {best_metric=} need an eval_function, not None"
        )
    if writers is None:
        folder = checkpointer.save_dir
        writers = default_writers(folder) if folder else []
    if not isinstance(scheduler, hooks.LRScheduler):
        scheduler = hooks.LRScheduler(scheduler=scheduler or [])
    found: list[hooks.HookBase] = [hooks.IterationTimer(), scheduler]
    if eval_function is not None:
        found.append(hooks.EvalHook(eval_period, eval_function))
        if best_metric:
            found.append(hooks.BestCheckpointer(checkpointer, best_metric, best_mode))
    found += [
        hooks.PeriodicWriter(writers, period=log_period),
        hooks.PeriodicCheckpointer(
            checkpointer, checkpoint_period, max_to_keep=max_to_keep
        ),
        hooks.Preemption(checkpointer),
    ]
    return found
