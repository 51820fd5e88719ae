"""The parts that most training scripts share: arguments, set-up, writers, hooks."""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hooktrain.checkpoint import Checkpointer
from hooktrain.config import LazyConfig, instantiate
from hooktrain.engine.hooks import (
    BestCheckpointer,
    EvalHook,
    IterationTimer,
    LRScheduler,
    PeriodicCheckpointer,
    PeriodicWriter,
    Preemption,
    Watchdog,
)
from hooktrain.engine.train_loop import HookBase
from hooktrain.strategy import BaseStrategy, build_strategy, wrap_in_ddp
from hooktrain.utils import comm
from hooktrain.utils.collect_env import collect_env_info
from hooktrain.utils.env import seed_all_rng
from hooktrain.utils.events import (
    CommonMetricPrinter,
    EventWriter,
    JSONWriter,
    TensorboardXWriter,
)
from hooktrain.utils.folder_lock import lock_folder
from hooktrain.utils.logger import setup_logger
from hooktrain.utils.registry import MODEL_WRAPPERS

__all__ = [
    "batch_size_of_a_rank",
    "create_ddp_model",
    "default_argument_parser",
    "default_hooks",
    "default_setup",
    "default_strategy",
    "default_writers",
]

logger = logging.getLogger(__name__)


def create_ddp_model(
    model: nn.Module,
    *,
    type: str | None = None,
    fp16_compression: bool = False,
    **kwargs: Any,
) -> nn.Module:
    """Wrap a model in DistributedDataParallel if there are several ranks.

    Args:
        model: a model on its device, be that the CPU.
        type: the name of the wrapper in ``MODEL_WRAPPERS``; None is that of
            :func:`~hooktrain.strategy.wrapper_for`.
        fp16_compression: exchange gradients in float16.
        **kwargs: passed to the wrapper; see :class:`torch.nn.parallel.DistributedDataParallel`.

    Raises:
        KeyError: if there is no such wrapper.
    """
    if comm.get_world_size() == 1:
        if type is not None:
            MODEL_WRAPPERS.get(type)  # a typo is found with one process too
        return model
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return wrap_in_ddp(model, device, type=type, fp16_compression=fp16_compression, **kwargs)


def default_strategy(train: Any) -> BaseStrategy:
    """The strategy of a configuration.

    Args:
        train: as in ``configs/common/train.py``; of it, ``strategy``, ``device``, ``ddp``,
            ``sync_bn``, ``auto_scale_lr``, ``seed`` and ``output_dir`` are looked at.

    Raises:
        TypeError: if ``strategy`` is an object.
        KeyError: for an unknown strategy or wrapper.
    """
    strategy, ddp = train.get("strategy", "auto"), dict(train.ddp)
    if isinstance(strategy, Mapping) and "_target_" in strategy:  # it is built with the rest
        strategy = {("type" if k == "_target_" else k): v for k, v in strategy.items()}
    if isinstance(strategy, BaseStrategy):
        raise TypeError(
            f"train.strategy must be a name, or a dict with type and options, since it gets "
            f"device, seed and more from train; but it is {strategy!r}"
        )
    if isinstance(ddp.get("type"), str):
        MODEL_WRAPPERS.get(ddp["type"])  # a typo is found with one process too
    seeded = train.seed is not None and train.seed >= 0
    return build_strategy(
        instantiate(strategy),
        ddp={
            "fp16_compression": ddp.pop("fp16_compression", False),
            "model_wrapper": ddp,
        },
        sync_bn=train.get("sync_bn"),
        work_dir=train.output_dir,
        device=train.device,
        auto_scale_lr=train.get("auto_scale_lr"),
        env_kwargs={"seed": train.seed if seeded else None, "diff_rank_seed": True},
    )


def batch_size_of_a_rank(loader: Any) -> int | None:
    """The samples in a batch of one rank, as far as the loader tells."""
    if total := getattr(loader, "total_batch_size", None):
        return int(total) // comm.get_world_size()
    size: int | None = getattr(loader, "batch_size", None)
    return size


def default_argument_parser(epilog: str | None = None) -> argparse.ArgumentParser:
    """The arguments that training scripts share.

    Args:
        epilog: the text after the help; None gives examples.
    """
    parser = argparse.ArgumentParser(
        epilog=epilog
        or f"""
Examples:

Train on one device:
    $ {sys.argv[0]} --config-file configs/digits_cnn.py

Change the configuration:
    $ {sys.argv[0]} --config-file configs/digits_cnn.py optimizer.lr=0.1 train.max_iter=500

Several processes on one machine, by either of:
    $ {sys.argv[0]} --num-gpus 2 --config-file configs/digits_cnn.py
    $ torchrun --nproc-per-node=2 {sys.argv[0]} --config-file configs/digits_cnn.py
""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--config-file", default="", metavar="FILE", help="path of the configuration")
    add("--resume", action="store_true", help="go on after the last checkpoint, if there is one")
    add("--eval-only", action="store_true", help="evaluate only")
    add("--num-gpus", type=int, default=1, help="processes, each with its GPU, per machine")
    add("--num-machines", type=int, default=1, help="number of machines")
    add("--machine-rank", type=int, default=0, help="this machine's number, from 0")
    add("--dist-url", default="auto", help="where the processes meet, such as tcp://host:port")
    add(
        "opts",
        nargs=argparse.REMAINDER,
        help="changes of the configuration, each as key.subkey=value, +new.key=value or ~key",
    )
    return parser


def default_setup(cfg: Any, args: Any) -> None:
    """Prepare a run: output folder, logs, environment report, configuration file, seed.

    It writes ``log.txt`` (one more for each further rank) and ``config.py`` into the output
    folder, and locks the folder against a second run until the process ends.

    Args:
        cfg: a configuration; of it, ``train.output_dir``, ``train.seed`` (None or negative draws
            one, which is stored back, so that it is in the saved configuration),
            ``train.cudnn_benchmark`` and ``train.float32_precision`` are looked at. Each rank is
            seeded with the seed plus its rank.
        args: the command line's arguments; of them, ``config_file`` and ``eval_only``, if there.

    Raises:
        RuntimeError: if another run is using the output folder.
        ValueError: for keys at the places where detectron2's older configurations have them.
        OSError: if the folder cannot be written to.
    """
    if yacs := [key for key in ("OUTPUT_DIR", "SEED") if key in cfg]:
        raise ValueError(f"{yacs} would not be used: write train.output_dir and train.seed instead")
    train = cfg.get("train", {})
    output_dir, rank = train.get("output_dir", ""), comm.get_rank()
    eval_only = getattr(args, "eval_only", False)
    if output_dir and comm.is_main_process():
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        if not eval_only:
            lock_folder(output_dir)
    comm.synchronize()
    setup_logger(output_dir or None, distributed_rank=rank)
    logger.info("Rank of current process: %d. World size: %d", rank, comm.get_world_size())
    logger.info("Environment info:\n%s", collect_env_info())
    logger.info("Command line arguments: %s", args)
    if config_file := getattr(args, "config_file", ""):
        text = Path(config_file).read_text(encoding="utf-8")
        logger.info("Contents of %s:\n%s", config_file, text)

    seed = train.get("seed")
    if seed is None or seed < 0:
        seed = comm.shared_random_seed()
        logger.info("No seed is configured: drew %d", seed)
        if "seed" in train:
            train["seed"] = seed
    seed_all_rng(seed + rank)
    if output_dir and comm.is_main_process() and not eval_only:
        path = os.path.join(output_dir, "config.py")
        LazyConfig.save(cfg, path)
        logger.info("Full config saved to %s", path)
    if not eval_only and train.get("cudnn_benchmark") is not None:
        torch.backends.cudnn.benchmark = bool(train["cudnn_benchmark"])
    if precision := train.get("float32_precision"):
        torch.set_float32_matmul_precision(precision)


def default_writers(output_dir: str, max_iter: int | None = None) -> list[EventWriter]:
    """Writers to the console, to ``metrics.json`` and, if it is installed, to TensorBoard.

    Args:
        output_dir: the folder to write to; it is made if needed.
        max_iter: the length of the run, for the remaining time.
    """
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    writers: list[EventWriter] = [
        CommonMetricPrinter(max_iter),
        JSONWriter(os.path.join(output_dir, "metrics.json")),
    ]
    if find_spec("tensorboard") is not None:
        writers.append(TensorboardXWriter(output_dir))
    return writers


def default_hooks(
    *,
    scheduler: Any,
    checkpointer: Checkpointer,
    checkpoint_period: int,
    max_to_keep: int | None = None,
    eval_function: Callable[[], Mapping[str, Any] | None] | None = None,
    eval_period: int = 0,
    best_metric: str | None = None,
    best_mode: str = "max",
    writers: Sequence[EventWriter] = (),
    log_period: int = 20,
    epoch_length: int | None = None,
    watchdog_s: float = 0,
) -> list[HookBase]:
    """The usual hooks in the order that makes resuming exact.

    Evaluate, then write, then save: a checkpoint then holds all that happened up to it, and the
    metric files are complete up to it. Last come those that end a run before its time. Put hooks of
    your own in with ``trainer.register_hooks(..., before=hooks.EvalHook)`` or the like.

    Args:
        scheduler: see :class:`~hooktrain.engine.hooks.LRScheduler`.
        checkpointer: what saves.
        checkpoint_period: in iterations.
        max_to_keep: how many periodic checkpoints to keep; None keeps all.
        eval_function: see :class:`~hooktrain.engine.hooks.EvalHook`; None never evaluates.
        eval_period: in iterations; 0 evaluates at the end only.
        best_metric: the metric that chooses ``model_best.pth``; None keeps no best one.
        best_mode: ``"max"`` or ``"min"``.
        writers: see :class:`~hooktrain.engine.hooks.PeriodicWriter`.
        log_period: in iterations.
        epoch_length: the iterations of an epoch, for schedules that step by epochs.
        watchdog_s: after how many seconds without progress a rank is taken to hang: more than an
            iteration and a save take. See :class:`~hooktrain.engine.hooks.Watchdog`, which then
            ends the process. 0 watches nothing.
    """
    schedule = LRScheduler(scheduler=scheduler, epoch_length=epoch_length)
    hooks: list[HookBase] = [IterationTimer(), schedule]
    if eval_function is not None:
        hooks.append(EvalHook(eval_period, eval_function))
        if best_metric is not None:
            hooks.append(BestCheckpointer(eval_period, checkpointer, best_metric, best_mode))
    hooks.append(PeriodicWriter(writers, period=log_period))
    hooks.append(
        PeriodicCheckpointer(checkpointer, period=checkpoint_period, max_to_keep=max_to_keep)
    )
    hooks.append(Preemption(checkpointer))
    if watchdog_s > 0:
        hooks.append(Watchdog(watchdog_s, on_timeout="abort"))
    return hooks
