"""What most training scripts share: arguments, set-up, writers, hooks, and DefaultTrainer."""

import argparse
import inspect
import logging
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import unified_diff
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hooktrain import evaluation, events, solver
from hooktrain.checkpoint import Checkpointer
from hooktrain.checkpoint.resume import set_folder_aside
from hooktrain.config import ConfigDict, LazyConfig, instantiate, resolve
from hooktrain.engine import hooks
from hooktrain.engine.trainers import SimpleTrainer, StepTrainer
from hooktrain.evaluation import DatasetEvaluator
from hooktrain.model import init_weights_once
from hooktrain.model.wrappers import unwrap_model
from hooktrain.solver import OptimWrapper, OptimWrapperDict
from hooktrain.strategy import (
    BaseStrategy,
    broadcast_buffers,
    build_strategy,
    wrap_in_ddp,
)
from hooktrain.strategy.environment import restart_count, set_random_seed
from hooktrain.utils import comm
from hooktrain.utils.collect_env import collect_env_info
from hooktrain.utils.epochs import in_iterations
from hooktrain.utils.file_io import lock_folder, on_disk
from hooktrain.utils.logger import LEVELS, setup_logger
from hooktrain.utils.names import refuse_signatures

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

    It writes ``log.txt`` (one more for each further rank) and ``config.json`` into the output
    folder, and locks the folder against a second run until the process ends.

    Args:
        cfg: a configuration; of it, ``train.output_dir``, ``train.seed`` (None or negative draws
            one, which is stored back, so that it is in the saved configuration; a resumed run
            takes that of the configuration in the folder), ``train.cudnn_benchmark`` and
            ``train.float32_precision`` are looked at. Each rank is seeded with the seed plus its
            rank.
        args: the command line's arguments; of them, ``config_file``, ``resume``, ``log_level``,
            ``eval_only``, ``dry_run`` and ``print_config``, if there. With ``eval_only``
            nothing but the log is written, and another run may be using the folder; with
            ``dry_run`` nothing is. A restart by torchrun is a resume too.

    Raises:
        SystemExit: with ``print_config``, which prints a file for ``--config-file``.
        RuntimeError: if another run is using the output folder.
        ValueError: for keys at the places where detectron2's older configurations have them, or an
            output folder that is an address such as ``s3://...``.
        OSError: if the folder cannot be written to.
    """
    if yacs := [key for key in ("OUTPUT_DIR", "SEED") if key in cfg]:
        instead = "train.output_dir and train.seed, or default_setup of hooktrain.compat.detectron2"
        raise ValueError(f"{yacs} would not be used: take {instead}")
    if getattr(args, "print_config", False):
        if comm.is_main_process():
            sys.stdout.write(LazyConfig.to_json(cfg))
        raise SystemExit(0)
    train = cfg.get("train", {})
    output_dir, rank = on_disk(train.get("output_dir", "")), comm.get_rank()
    if output_dir:
        train["output_dir"] = output_dir
    eval_only = getattr(args, "eval_only", False)
    if getattr(args, "dry_run", False):
        output_dir = ""
    if output_dir and comm.is_main_process():
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        if not eval_only:
            if not getattr(args, "resume", False) and restart_count() == 0:
                set_folder_aside(output_dir)
            lock_folder(output_dir)
    comm.synchronize()
    level = getattr(args, "log_level", "normal")
    setup_logger(output_dir or None, distributed_rank=rank, level=level)
    logger.debug(
        "Rank of current process: %d. World size: %d", rank, comm.get_world_size()
    )
    logger.debug("Environment info:\n%s", collect_env_info())
    logger.debug("Command line arguments: %s", args)
    if config_file := getattr(args, "config_file", ""):
        text = Path(config_file).read_text(encoding="utf-8")
        logger.debug("Contents of %s:\n%s", config_file, text)

    seed, path = train.get("seed"), Path(output_dir, "config.json")
    resumes = getattr(args, "resume", False) or eval_only or restart_count() > 0
    if output_dir and resumes and (seed is None or seed < 0):
        is_there = (
            comm.is_main_process() and path.is_file()
        )  # of an earlier start of the run
        earlier = LazyConfig.load(path).get("train", {}) if is_there else {}
        seed = comm.broadcast(earlier.get("seed"))
    seed = set_random_seed(seed, diff_rank_seed=True)
    if "seed" in train:
        train["seed"] = seed
    if isinstance(cfg, ConfigDict):
        resolve(cfg)  # what refers to the seed, or to what a script has changed
    if output_dir and comm.is_main_process() and not eval_only:
        _save_config(cfg, path, resumes)
    if not eval_only and train.get("cudnn_benchmark") is not None:
        torch.backends.cudnn.benchmark = bool(train["cudnn_benchmark"])
    if precision := train.get("float32_precision"):
        torch.set_float32_matmul_precision(precision)


def _save_config(cfg: Any, path: Path, resumes: bool) -> None:
    """Save the configuration, and say what has changed since a resumed run was started."""
    before = (
        path.read_text("utf-8").splitlines() if resumes and path.is_file() else None
    )
    LazyConfig.save(cfg, path)
    logger.info("Full config saved to %s", path)
    if before is not None:
        changes = unified_diff(
            before, path.read_text("utf-8").splitlines(), n=0, lineterm=""
        )
        if lines := [line for line in changes if line[:2] not in ("--", "++", "@@")]:
            logger.info("What has changed since the last start:\n%s", "\n".join(lines))


def default_writers(
    output_dir: str, max_iter: int | None = None
) -> list[events.EventWriter]:
    """Writers to the console, to ``metrics.json`` and to TensorBoard.

    The last one is left out where ``tensorboard`` is not installed.

    Args:
        output_dir: the folder to write to; it is made if needed.
        max_iter: see :class:`~hooktrain.events.CommonMetricPrinter`.
    """
    output_dir = on_disk(output_dir)
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    metrics = events.JSONWriter(Path(output_dir, "metrics.json"))
    writers: list[events.EventWriter] = [events.CommonMetricPrinter(max_iter), metrics]
    if find_spec("tensorboard") is not None:
        writers.append(events.TensorboardXWriter(output_dir))
    return writers


def default_hooks(
    *,
    scheduler: Any,
    checkpointer: Checkpointer,
    checkpoint_period: int | str,
    max_to_keep: int | None = None,
    eval_function: Callable[[], Mapping[str, Any] | None] | None = None,
    eval_period: int | str = 0,
    best_metric: str | None = None,
    best_mode: str | None = None,
    best_ema: hooks.EMA | None = None,
    writers: Sequence[events.EventWriter] = (),
    log_period: int | str = 20,
    watchdog_s: float = 0,
    time_limit_s: float = 0,
    sanity_batches: int = 0,
) -> list[hooks.HookBase]:
    """The usual hooks in the order that makes resuming exact.

    Evaluate, then write, then save: a checkpoint then holds what happened up to it, and the
    metric files are complete up to it. Last come those that end a run before its time. Put hooks of
    your own in with ``trainer.register_hooks(..., before=hooks.EvalHook)`` or the like.

    Args:
        scheduler: see :class:`~hooktrain.engine.hooks.LRScheduler`.
        checkpointer: what saves.
        checkpoint_period: in iterations, or a text such as ``"1 epoch"``, as the other periods.
        max_to_keep: how many periodic checkpoints to keep; None keeps all.
        eval_function: see :class:`~hooktrain.engine.hooks.EvalHook`; None never evaluates, which is
            a warning where there is a period or a metric for it.
        eval_period: 0 evaluates at the end only.
        best_metric: the metric that chooses ``model_best.pth``; None keeps no best one.
        best_mode: ``"max"``, ``"min"`` or None; see
            :class:`~hooktrain.engine.hooks.BestCheckpointer`.
        best_ema: the average whose weights ``model_best.pth`` holds; None saves the raw ones.
        writers: see :class:`~hooktrain.engine.hooks.PeriodicWriter`.
        log_period: of the writers.
        watchdog_s: after how many seconds without progress a rank is taken to hang: more than an
            iteration and a save take. See :class:`~hooktrain.engine.hooks.Watchdog`, which then
            ends the process. 0 watches nothing.
        time_limit_s: after how many seconds the run saves and ends; see
            :class:`~hooktrain.engine.hooks.Preemption`. 0 is no limit.
        sanity_batches: evaluate on so many batches before the first step.
    """
    found: list[hooks.HookBase] = [
        hooks.IterationTimer(),
        hooks.LRScheduler(scheduler=scheduler),
    ]
    if eval_function is None and (eval_period or best_metric):
        logger.warning(
            f"Without eval_function {eval_period=} and {best_metric=} do nothing"
        )
    if eval_function is not None:
        evaluate = hooks.EvalHook(
            eval_period, eval_function, sanity_batches=sanity_batches
        )
        found.append(evaluate)
        if best_metric is not None:
            best = hooks.BestCheckpointer(
                eval_period, checkpointer, best_metric, best_mode, ema=best_ema
            )
            found.append(best)
    found += [
        hooks.PeriodicWriter(writers, period=log_period),
        hooks.PeriodicCheckpointer(
            checkpointer, checkpoint_period, max_to_keep=max_to_keep
        ),
        hooks.Preemption(checkpointer, time_limit_s=time_limit_s),
    ]
    if watchdog_s > 0:
        found.append(hooks.Watchdog(watchdog_s))
    return found


class DefaultTrainer(StepTrainer, SimpleTrainer):
    """A trainer with the default hooks, built from a lazy configuration.

    It trains models with ``train_step`` as :class:`StepTrainer` does it, and others as
    :class:`SimpleTrainer`.

    The configuration has the keys ``model``, ``optimizer``, ``lr_multiplier``,
    ``dataloader.{train,test,evaluator}`` and ``train``; ``configs/common/train.py`` lists what
    ``train`` can hold. Without ``lr_multiplier`` the rate stays as it is, and without test data or
    an evaluator nothing is evaluated. In place of ``optimizer`` and ``lr_multiplier`` it may have
    ``optim_wrapper`` and ``param_scheduler``, as :func:`~hooktrain.solver.build_optim_wrapper` and
    :func:`~hooktrain.solver.build_param_scheduler` take them: for several optimizers, or for
    schedules of anything but the learning rate. ``hooks`` is a list of further hooks, which run
    right before the evaluation; ``writers`` is a list of further writers. To change one part,
    override the method that builds it. To change more, write the dozen lines yourself:
    ``tools/plain_train_net.py`` shows the other extreme.

    Raises:
        TypeError: when a class is defined, if it overrides a method with a signature that does not
            take what the method is called with.

    Attributes:
        cfg: the configuration.
        strategy: where the model lives: device, processes, sharding, compilation.
        checkpointer: saves and loads the model and this trainer.
        ema: the hook with the averaged model, or None.

    Examples::

        trainer = DefaultTrainer(cfg)
        trainer.resume_or_load(resume=args.resume)
        trainer.train()
    """

    def __init_subclass__(cls) -> None:
        hint = "; for detectron2's signatures there is hooktrain.compat.detectron2.DefaultTrainer"
        refuse_signatures(
            cls, DefaultTrainer, ("build_test_loader", "build_evaluator"), hint
        )

    def __init__(self, cfg: Any) -> None:
        self.cfg = resolve(cfg)  # what refers to what a script has changed
        self.strategy = self.build_strategy(cfg)
        model = self.strategy.prepare(
            lambda: init_weights_once(self.build_model(cfg)),
            compile=cfg.train.get("compile", False),
            # As in detectron2, the constructor of other models has initialised their weights.
            dispatch_kwargs={"init_weights_for_test_or_val": False},
        )
        loader = self.build_train_loader(cfg)
        batch_size = getattr(
            loader, "batch_size", None
        )  # of a rank, as far as the loader says
        if total := getattr(loader, "total_batch_size", None):
            batch_size = total // comm.get_world_size()
        _, optim_wrapper = self.strategy.prepare(
            model,
            optim_wrapper=self.build_optimizer(cfg, unwrap_model(model)),
            dispatch_kwargs={"train_micro_batch_size_per_gpu": batch_size},
        )
        owns_step = hasattr(unwrap_model(model), "train_step")
        self._kind = StepTrainer if owns_step else SimpleTrainer
        self.epoch_length = cfg.train.get("epoch_length")
        self._kind.__init__(self, model, loader, optim_wrapper, cfg.train.log_period)
        self.seed = self.strategy.seed
        self.checkpointer = self.build_checkpointer()
        if cfg.train.get("max_epochs") is not None:
            cfg.train.max_iter = in_iterations(
                f"{cfg.train.max_epochs} epochs", self.epoch_length
            )
            resolve(cfg)
        self.max_iter = cfg.train.max_iter
        self.ema = (
            hooks.EMA(model, cfg.train.ema.decay) if cfg.train.ema.enabled else None
        )
        self.meta = {"config": LazyConfig.to_py(cfg), "seed": self.seed}
        self.last_results: dict[str, Any] = {}
        self._evaluator: DatasetEvaluator | None = None
        self.register_hooks(self.build_hooks())
        name, ranks = type(unwrap_model(model)).__name__, comm.get_world_size()
        count = sum(p.numel() for p in model.parameters())
        where = (f"{ranks} x " if ranks > 1 else "") + self.strategy.device.type
        logger.info("%s with %s parameters, on %s", name, f"{count:,}", where)

    def run_step(self) -> None:
        """One iteration, by the model's own step if it has one."""
        self._kind.run_step(self)

    @classmethod
    def build_strategy(cls, cfg: Any) -> BaseStrategy:
        """Where the model lives, from ``train.strategy``, ``train.device`` and ``train.ddp``.

        Raises:
            TypeError: if ``train.strategy`` is an object: it gets device, seed and more from
                ``train``.
            KeyError: for an unknown strategy or wrapper.
        """
        train = cfg.train
        ddp = dict(train.ddp)
        strategy = train.get("strategy", "auto")
        if (
            isinstance(strategy, Mapping) and "_target_" in strategy
        ):  # it is built with the rest
            strategy = {
                ("type" if k == "_target_" else k): v for k, v in strategy.items()
            }
        if isinstance(strategy, BaseStrategy):
            raise TypeError(
                f"train.strategy must be a name, or a dict with type: {strategy!r}"
            )
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
            env_kwargs={"seed": train.seed, "diff_rank_seed": True},
        )

    @classmethod
    def build_model(cls, cfg: Any) -> nn.Module:
        """The model; the strategy brings it to its device and wraps it."""
        model: nn.Module = instantiate(cfg.model)
        logger.debug("Model:\n%s", model)
        return model

    @classmethod
    def build_optimizer(
        cls, cfg: Any, model: nn.Module
    ) -> OptimWrapper | OptimWrapperDict:
        """The optimizer in its wrapper: precision, accumulation and clipping."""
        if "optim_wrapper" in cfg:
            if "optimizer" in cfg:
                raise ValueError(
                    "the configuration has both optimizer and optim_wrapper"
                )
            return solver.build_optim_wrapper(model, instantiate(cfg.optim_wrapper))
        # A copy with the model in it: the configuration stays plain data.
        params = {**cfg.optimizer.params, "model": model}
        optimizer = instantiate({**cfg.optimizer, "params": params})
        train = cfg.train
        options = {
            "accumulative_counts": train.accumulative_counts,
            "clip_grad": train.clip_grad,
        }
        if train.amp.enabled:
            return solver.AmpOptimWrapper(optimizer, train.amp.dtype, **options)
        return OptimWrapper(optimizer, **options)

    @classmethod
    def build_lr_scheduler(
        cls, cfg: Any, optim_wrapper: OptimWrapper | OptimWrapperDict
    ) -> Any:
        """The schedule: a multiplier of the learning rate, or what ``param_scheduler`` lists."""
        if "param_scheduler" not in cfg:
            return instantiate(cfg.get("lr_multiplier", []))
        if "lr_multiplier" in cfg:
            raise ValueError(
                "the configuration has both lr_multiplier and param_scheduler"
            )
        max_iter, length = cfg.train.max_iter, cfg.train.get("epoch_length")
        max_epochs = math.ceil(max_iter / length) if length else None
        run = {"max_iters": max_iter, "max_epochs": max_epochs, "epoch_length": length}
        return solver.build_param_scheduler(
            instantiate(cfg.param_scheduler), optim_wrapper, run
        )

    @classmethod
    def build_train_loader(cls, cfg: Any) -> Iterable[Any]:
        """The endless stream of training batches."""
        loader: Iterable[Any] = instantiate(cfg.dataloader.train)
        return loader

    @classmethod
    def build_test_loader(cls, cfg: Any) -> Iterable[Any] | None:
        """The batches to evaluate on; None evaluates nothing."""
        loader: Iterable[Any] | None = instantiate(cfg.dataloader.get("test"))
        return loader

    @classmethod
    def build_evaluator(cls, cfg: Any) -> DatasetEvaluator | None:
        """What judges the model's outputs; None evaluates nothing."""
        evaluator: DatasetEvaluator | None = instantiate(
            cfg.dataloader.get("evaluator")
        )
        return evaluator

    def build_checkpointer(self) -> Checkpointer:
        """What saves and loads the model and this trainer."""
        options = self.cfg.train.checkpointer
        return Checkpointer(
            self.model,
            self.cfg.train.output_dir,
            background=options.get("background", False),
            sharded=options.get("sharded", False) or self.strategy.saves_shards,
            # A proxy: the trainer owns the checkpointer, not the other way round.
            trainer=weakref.proxy(self),
        )

    def build_writers(self) -> list[events.EventWriter]:
        """Where metrics are written to: the default writers, and those of the configuration."""
        writers = default_writers(self.cfg.train.output_dir)
        return [*writers, *instantiate(self.cfg.get("writers", []))]

    def build_hooks(self) -> list[hooks.HookBase]:
        """The default hooks, with the averaged model's if it is asked for."""
        train = self.cfg.train
        me = weakref.proxy(
            self
        )  # a cycle of strong references would keep the model alive
        known = ConfigDict(self.cfg, train={**train, "epoch_length": self.epoch_length})
        writers = self.build_writers()
        is_of_average = str(train.best_metric).startswith("ema/")  # see _evaluate
        found = default_hooks(
            scheduler=self.build_lr_scheduler(known, self.optim_wrapper),
            checkpointer=self.checkpointer,
            checkpoint_period=train.checkpointer.period,
            max_to_keep=train.checkpointer.max_to_keep,
            eval_function=lambda: me._evaluate(),
            eval_period=train.eval_period,
            best_metric=train.best_metric,
            best_mode=train.get("best_mode"),
            best_ema=self.ema if is_of_average else None,
            writers=writers,
            log_period=train.log_period,
            watchdog_s=train.get("watchdog_s", 0),
            time_limit_s=train.get("time_limit_s", 0),
            sanity_batches=train.get("sanity_batches", 0),
        )
        place = next(
            i for i, hook in enumerate(found) if isinstance(hook, hooks.EvalHook)
        )
        ema = [] if self.ema is None else [self.ema]
        found[place:place] = [*ema, *instantiate(self.cfg.get("hooks", []))]
        return found

    def _evaluate(self) -> dict[str, Any]:
        if self._evaluator is None:  # it may take long to build
            self._evaluator = self.build_evaluator(self.cfg)
        options: dict[str, Any] = {"evaluators": self._evaluator, "step": "val_step"}
        # Overridden as in detectron2, it may take none or one of these.
        known = inspect.signature(self.test).parameters
        options = {name: value for name, value in options.items() if name in known}
        broadcast_buffers(
            self.model
        )  # so that all ranks evaluate what a checkpoint holds
        results = self.test(self.cfg, self.model, **options)
        if self.ema is not None:
            logger.info("Evaluating the averaged model")
            with self.ema.swap():
                broadcast_buffers(self.model)
                results = {**results, "ema": self.test(self.cfg, self.model, **options)}
        self.last_results = results
        return results

    @classmethod
    def test(
        cls,
        cfg: Any,
        model: nn.Module,
        evaluators: DatasetEvaluator | Sequence[DatasetEvaluator] | None = None,
        step: str = "test_step",
    ) -> dict[str, Any]:
        """Evaluate a model on ``dataloader.test``. A collective: every rank calls it.

        Args:
            cfg: the configuration.
            model: the model.
            evaluators: one or several; None is that of :meth:`build_evaluator`.
            step: see :func:`~hooktrain.evaluation.inference_on_dataset`.
        """
        loader = cls.build_test_loader(cfg)
        evaluators = cls.build_evaluator(cfg) if evaluators is None else evaluators
        if loader is None or evaluators is None:
            return {}
        results = evaluation.inference_on_dataset(model, loader, evaluators, step=step)
        if (
            comm.is_main_process() and step == "test_step"
        ):  # while training, writers show them
            evaluation.print_csv_format(results)
        return results

    def resume_or_load(self, resume: bool = True) -> None:
        """Continue the run in the output folder, or start from ``train.init_checkpoint``.

        Args:
            resume: whether to continue. Without a checkpoint the run starts from the beginning, so
                the same command can be submitted again and again.
        """
        self.checkpointer.resume_or_load(
            self.cfg.train.init_checkpoint,
            resume=resume,
            checkpointables=self.cfg.train.resume_parts,
        )

    def train(  # type: ignore[override]
        self,
        start_iter: int | None = None,
        max_iter: int | None = None,
        *,
        max_epochs: float | None = None,
    ) -> dict[str, Any]:
        """Train up to ``train.max_iter``, or to ``max_iter`` or ``max_epochs`` if that is given.

        Returns:
            The results of the last evaluation.

        Raises:
            ValueError: if ``train.expected_results`` are given and not reached.
        """
        if max_iter is None and max_epochs is None:
            max_iter = self.cfg.train.max_iter
        super().train(start_iter, max_iter, max_epochs=max_epochs)
        if self.cfg.train.expected_results and comm.is_main_process():
            evaluation.verify_results(
                self.cfg.train.expected_results, self.last_results
            )
        return self.last_results
