"""Train or evaluate by a configuration.

One process:        python tools/train_net.py --config-file configs/digits_cnn.py
Two processes:      torchrun --nproc-per-node=2 tools/train_net.py --config-file ...
After a stop:       add --resume to continue; without a checkpoint it starts from the beginning,
                    so the same command can be submitted again and again.
Beside a run:       --eval-only --follow evaluates each of its checkpoints. Test it: --dry-run runs
two iterations, and estimates the time of the whole run;
                    --dry-run --ranks 64 --device-memory 80GiB estimates the memory and the
                    messages of one of 64 ranks; --print-config prints the configuration.
"""

import argparse
import inspect
import logging
import os
import re
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib import metadata
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import hooktrain
from hooktrain.checkpoint import Checkpointer, CorruptCheckpointError, load_model_state
from hooktrain.checkpoint.resume import checkpoint_names, read_pointer
from hooktrain.config import LazyCall, LazyConfig
from hooktrain.engine import (
    HookBase,
    build_trainer,
    default_argument_parser,
    default_setup,
    hooks,
    launch,
)
from hooktrain.engine.build import evaluate, prepare_model
from hooktrain.engine.settings import check_settings
from hooktrain.evaluation import print_csv_format, verify_results
from hooktrain.strategy.environment import count_processes, restart_count
from hooktrain.utils import comm
from hooktrain.utils.logger import pretty_seconds
from hooktrain.utils.names import check_count, did_you_mean, dotted

logger = logging.getLogger("hooktrain.train_net")

ROOT = Path(
    __file__
).parent.parent  # it has the configurations that come with the package

# Set by the command hooktrain, such as "hooktrain train".
COMMAND = os.environ.get("HOOKTRAIN_COMMAND")

EXAMPLES = """examples:
  hooktrain train --config-file configs/digits_cnn.py optimizer.lr=0.1 train.max_iter=500
  hooktrain train --config-file configs/digits_cnn.py --resume
  hooktrain eval --config-file configs/digits_cnn.py --best
  torchrun --nproc-per-node=2 -m hooktrain train --config-file configs/digits_cnn.py

configurations that come with the package:
"""

PARTS = {  # the parts of a configuration, and their kinds
    "model": "a LazyCall",
    "optimizer": "a LazyCall",
    "lr_multiplier": "a LazyCall",
    "hooks": "a list",
    "writers": "a list",
    "dataloader": "a dict",
    "train": "a dict",
}


def argument_parser() -> argparse.ArgumentParser:
    """The arguments that scripts share, and those of this script."""
    names = sorted(f"  configs/{path.name}\n" for path in ROOT.glob("configs/*.py"))
    parser = default_argument_parser(EXAMPLES + "".join(names) if COMMAND else None)
    parser.prog = COMMAND or parser.prog
    best = "with --eval-only: evaluate the best model of the run's folder"
    parser.add_argument("--best", action="store_true", help=best)
    dry = "run two iterations, to check that the run works and how fast it is"
    parser.add_argument("--dry-run", action="store_true", help=dry)
    ranks = "with --dry-run: estimate the memory and messages of one of N ranks instead"
    parser.add_argument("--ranks", type=int, metavar="N", help=ranks)
    memory = "with --ranks: whether a rank fits, and its largest batch; such as 80GiB"
    parser.add_argument("--device-memory", default="", metavar="SIZE", help=memory)
    show = "only print the configuration"
    parser.add_argument("--print-config", action="store_true", help=show)
    add_follow(parser)
    return parser


def add_follow(parser: argparse.ArgumentParser) -> None:
    """Add the options of an evaluation beside the run."""
    add = parser.add_argument
    follow = "with --eval-only: evaluate each new checkpoint of a run that is training"
    add("--follow", action="store_true", help=follow)
    every = "with --follow: all checkpoints that still exist, not only the newest"
    add("--all", action="store_true", help=every)
    folder = "with --follow: where to write, by default to eval in the output folder"
    add("--eval-dir", metavar="FOLDER", help=folder)
    patience = "with --follow: end the run after N evaluations without improvement"
    add("--patience", type=int, metavar="N", help=patience)
    poll = "with --follow: how often to look for a new checkpoint (10)"
    add("--poll", type=float, default=10.0, metavar="SECONDS", help=poll)


def parse_arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line; settings with dashes, and options without dashes, are errors.

    Raises:
        SystemExit: if the command line is wrong.
    """
    args, unknown = parser.parse_known_intermixed_args()
    if unknown:
        parser.error(
            f"unrecognized arguments: {' '.join(unknown)} (settings of the configuration have no "
            "dashes, such as optimizer.lr=0.1)"
        )
    for override in args.opts:
        name = override.lstrip("+").partition("=")[0]
        if name in vars(args):
            option = name.replace("_", "-")
            parser.error(f"{override} is not a setting: use the option --{option}")
    return args


def find_config(name: str, prog: str) -> str:
    """The path of a configuration: a file, or one that comes with the package.

    Raises:
        SystemExit: if it does not exist; the message begins with ``prog``.
    """
    if not name:
        raise SystemExit(
            f"{prog}: --config-file is missing, such as configs/digits_cnn.py"
        )
    for path in (Path(name), ROOT / name):
        if path.is_file():
            return str(path)
    near = did_you_mean(name, Path(name).parent.glob("*.*"))
    raise SystemExit(f"{prog}: there is no file {name!r}{near}")


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Run one process of a training or an evaluation; return its last results."""
    cfg = LazyConfig.load(args.config_file)
    refuse_objects(args.config_file, cfg)
    refuse_commas(cfg, args.opts)
    cfg = LazyConfig.apply_overrides(cfg, args.opts)
    check_settings(cfg)  # before anything is written
    if args.print_config:
        if comm.is_main_process():
            sys.stdout.write(LazyConfig.to_json(cfg))
        return {}
    check_follow(args)
    if args.best and not args.eval_only:
        raise ValueError("--best needs --eval-only; to continue training, use --resume")
    if args.dry_run and (args.resume or args.eval_only):
        raise ValueError(
            "--dry-run starts a new run: leave out --resume and --eval-only"
        )
    if args.device_memory and args.ranks is None:
        raise ValueError("--device-memory needs --dry-run --ranks, such as --ranks 1")
    if args.ranks is not None:
        estimate_rank(cfg, args)
        return {}
    if args.dry_run:
        cfg.train.output_dir = ""  # replaced by a temporary folder
        cfg.train.store = ""
        default_setup(cfg, args)
        dry_run(cfg)
        return {}
    if args.follow:
        import follow  # from this script's folder

        follow.follow(cfg, args)
        return {}
    args.resume |= args.best  # the best model belongs to an existing run
    default_setup(cfg, args)
    warn_about_disabled_settings(cfg, args.opts)
    if args.eval_only:
        return evaluate_checkpoint(cfg, args.resume, args.best)
    # To change a part of the trainer, copy the lines of build_trainer here, and edit them.
    trainer = build_trainer(cfg)
    logger.debug("Hooks:\n%s", trainer.describe_hooks())
    trainer.checkpointer.resume_or_load(
        cfg.train.init_checkpoint,
        resume=args.resume or restart_count() > 0,  # also after a restart by torchrun
        checkpointables=cfg.train.resume_parts,
    )
    trainer.train(max_iter=cfg.train.max_iter)
    results = last_results(trainer)
    if cfg.train.expected_results and comm.is_main_process():
        verify_results(cfg.train.expected_results, results)
    return results


def check_follow(args: argparse.Namespace) -> None:
    """Raise a ValueError for options that cannot be combined with ``--follow``."""
    if args.follow and (args.resume or args.best or not args.eval_only):
        raise ValueError(
            "--follow belongs to `hooktrain eval` (--eval-only), without --resume and --best: it "
            "evaluates the checkpoints of train.output_dir or train.store as they come"
        )
    if not args.follow and (args.all or args.eval_dir or args.patience is not None):
        raise ValueError("--all, --eval-dir and --patience need --follow")
    if args.patience is not None:
        check_count("--patience", args.patience)
    if not 0 < args.poll < float("inf"):
        raise ValueError(f"--poll must be positive, in seconds, not {args.poll!r}")


def refuse_commas(cfg: Any, overrides: list[str]) -> None:
    """Refuse a decimal comma, which turns a number into a tuple.

    Raises:
        ValueError: for such an override of a number.
    """
    for override in overrides:
        path, _, text = override.partition("=")
        old = cfg
        for part in path.split("."):
            old = old.get(part) if isinstance(old, Mapping) else None
        is_number = isinstance(old, int | float) and not isinstance(old, bool)
        if is_number and re.fullmatch(r"-?\d+,\d+", text):
            raise ValueError(
                f"{override!r} replaces {old!r} by two numbers: use a decimal point, or "
                "parentheses around a tuple"
            )


def warn_about_disabled_settings(cfg: Any, overrides: list[str]) -> None:
    """Warn about settings on the command line that have no effect, since they are not enabled."""
    for override in overrides:
        part, _, name = override.partition("=")[0].rpartition(".")
        key = part.removeprefix("train.")
        is_disabled = part != key and not getattr(cfg.train.get(key), "enabled", True)
        if is_disabled and name != "enabled":
            logger.warning("%s has no effect without %s.enabled=true", override, part)


def refuse_objects(file: str, cfg: Any) -> None:
    """Refuse objects in place of calls in a configuration, before anything is built.

    Args:
        file: the configuration's file. It is run again if its code has a name that the
            configuration lacks, to see the value.
        cfg: the configuration, which has the dicts and lists of the file.

    Raises:
        TypeError: for a part that is neither a dict nor a list, such as a model that is already
            built, and for any LazyCall without arguments.
    """
    refuse_uncalled(cfg, ())
    if not file.endswith(".py"):
        return
    names = compile(Path(file).read_bytes(), file, "exec").co_names
    for part in [each for each in PARTS if each in names and each not in cfg]:
        value = None
        with suppress(KeyError):  # the file has deleted it
            value = LazyConfig.load(file, part)
        if value is not None:
            refuse_uncalled(value, (part,))
            hint = ""
            if PARTS[part] == "a LazyCall" and not inspect.isroutine(value):
                made = value if isinstance(value, type) else type(value)
                hint = f": write {part} = LazyCall({made.__name__})(...)"
            raise TypeError(f"{part} must be {PARTS[part]}, not {value!r:.80}{hint}")


def refuse_uncalled(value: Any, path: tuple[Any, ...]) -> None:
    """Refuse a LazyCall without arguments anywhere in a part of a configuration."""
    if isinstance(value, LazyCall):
        target = getattr(value._target, "__name__", value._target)
        raise TypeError(
            f"{dotted(path)} = LazyCall({target}) lacks its arguments: write "
            f"LazyCall({target})(...)"
        )
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for key, item in items:
        refuse_uncalled(item, (*path, key))


def last_results(trainer: Any) -> dict[str, Any]:
    """The results of the last evaluation of a run."""
    results = {}
    for hook in trainer.hooks:
        if isinstance(hook, hooks.EvalHook):
            results = hook.last_results
    return results


def evaluate_checkpoint(cfg: Any, resume: bool, best: bool) -> dict[str, Any]:
    """Evaluate the best or the last checkpoint, or initial weights; return the results."""
    _, model = prepare_model(cfg)
    checkpointer = Checkpointer(model, cfg.train.output_dir)
    if best:
        load_best(checkpointer)
    elif resume:
        if not checkpointer.has_checkpoint():
            raise FileNotFoundError(
                f"there is no checkpoint in {checkpointer.save_dir!r} to evaluate: is "
                "train.output_dir the folder of the run?"
            )
        rest = load_newest(checkpointer)
        if "EMA" in rest.get("trainer", {}).get("hooks", {}):
            logger.info(
                "These are the raw weights. To evaluate their average (EMA), run `hooktrain "
                "checkpoint average CHECKPOINT FILE`, then use train.init_checkpoint=FILE without "
                "--resume"
            )
    elif cfg.train.init_checkpoint:
        load_whole(checkpointer, cfg.train.init_checkpoint)
    else:
        logger.warning(
            "Evaluating the initial weights; for others use --resume, --best or "
            "train.init_checkpoint"
        )
    results = evaluate(cfg, model)
    print_csv_format(results)
    return results


def load_newest(checkpointer: Checkpointer) -> dict[str, Any]:
    """Load the newest checkpoint of the folder; return its content besides the model."""
    return load_beside_a_run(
        partial(read_pointer, checkpointer.save_dir),
        lambda _: checkpointer.resume_or_load(""),
    )


def load_beside_a_run(
    find: Callable[[], Any], load: Callable[[Any], dict[str, Any]]
) -> dict[str, Any]:
    """Load a checkpoint, or the next one if an ongoing run replaces it meanwhile.

    Args:
        find: a function that identifies the checkpoint.
        load: a function that loads it, called with the result of ``find``.
    """
    while True:
        found = comm.on_main_process(find)
        try:
            return load(found)
        except (OSError, CorruptCheckpointError):  # the same on every rank
            if comm.on_main_process(find) == found:
                raise
            logger.info("The run has replaced the checkpoint: reading the new one")


def load_best(checkpointer: Checkpointer) -> None:
    """Load the best model of the folder, a file or a folder of shards, and log which it is."""
    content = load_beside_a_run(
        partial(newest_best, checkpointer.save_dir),
        lambda found: load_whole(checkpointer, found[0]),
    )
    best = content["best"]
    text = "The best %s of the run was %.4g, at iteration %d"
    logger.info(text, best["metric"], best["best_metric"], best["best_iter"])


def newest_best(folder: str) -> tuple[str, int, int]:
    """The path of the best model, and numbers that change when another one replaces it."""
    names = {"model_best.pth", "model_best"}.intersection(checkpoint_names(folder))
    if not names:
        raise FileNotFoundError(
            f"there is no model_best.pth in {folder!r}: it is saved by a run with an evaluation "
            "and train.best_metric"
        )
    path = max((os.path.join(folder, name) for name in names), key=os.path.getmtime)
    status = os.stat(path)
    return path, status.st_ino, status.st_mtime_ns


def load_whole(checkpointer: Checkpointer, path: str) -> dict[str, Any]:
    """Load a model to evaluate, and return the content of its checkpoint.

    The checkpoint must have all weights of the model, since missing weights would be random.
    """
    logger.info("Loading model from %s", path)
    content = checkpointer.read(path)
    found = load_model_state(checkpointer.model, content["model"])
    if found.missing_keys or found.incorrect_shapes:
        raise ValueError(f"{path} is from another model: {found}")
    return content


def first_batches(loader: Any) -> list[Any]:
    """The first two batches of a loader."""
    return list(islice(loader, 2))


class Clock(HookBase):
    """Measures the last step, since the first one also allocates and compiles."""

    seconds = 0.0

    def before_step(self) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def after_step(self) -> None:
        """Stop the clock when the device is done."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # a host-device synchronisation
        self.seconds = time.perf_counter() - self._start


def dry_run(cfg: Any) -> None:
    """Train two iterations, evaluate two batches, and log the estimated time of the whole run.

    The run also writes checkpoints and files of metrics, to a temporary folder that is removed at
    the end. It starts from the weights of a new run.

    Args:
        cfg: the configuration; its ``train.output_dir`` and its test data are changed.
    """
    test = cfg.dataloader.get("test")
    if test is not None and "_target_" in test:
        cfg.dataloader.test = LazyCall(first_batches)(loader=test)
    elif test is not None:  # several loaders by name
        for name in test:
            test[name] = LazyCall(first_batches)(loader=test[name])
    clock = Clock()
    with TemporaryDirectory() as folder:
        cfg.train.output_dir = comm.broadcast(folder)
        trainer = build_trainer(cfg)
        length = cfg.train.max_iter
        # First, since the time of other hooks' after_step does not belong to the step.
        trainer.register_hooks([clock], before=HookBase)
        trainer.checkpointer.resume_or_load(cfg.train.init_checkpoint, resume=False)
        trainer.train(max_iter=min(2, length))
        # The main process removes the folder, so wait until no other process writes to it.
        comm.synchronize()
    logger.info(
        "The run works: %.4f s an iteration, about %s for all %s, without evaluations; its files "
        "are removed",
        clock.seconds,
        pretty_seconds(clock.seconds * length),
        f"{length:,}",
    )


def estimate_rank(cfg: Any, args: argparse.Namespace) -> None:
    """Estimate the memory and messages of a rank, without a run; see tools/estimate.py."""
    if not args.dry_run:
        raise ValueError("--ranks is for an estimate: add --dry-run")
    if count_processes() > 1 or args.num_gpus > 1:
        raise ValueError(
            "--dry-run --ranks is one process that acts as one of many: start it without torchrun "
            "and --num-gpus"
        )
    from estimate import estimate  # imports much of torch

    estimate(cfg, args.ranks, args.device_memory)


def in_short(error: Exception) -> str:
    """An error without its traceback, and its place in the user's code or configuration."""
    text = "".join(traceback.format_exception_only(error)).rstrip() + extra_hint(error)
    libraries = (
        str(Path(hooktrain.__file__).parent),
        *sysconfig.get_paths().values(),
        __file__,
        *(str(Path(__file__).with_name(name)) for name in ("estimate", "follow")),
    )
    places = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    yours = [
        p for p in places if Path(p[0]).is_absolute() and not p[0].startswith(libraries)
    ]
    if yours:
        text += "\nin {}, line {}; --log-level=debug shows the traceback".format(
            *yours[-1]
        )
    return text


def extra_hint(error: Exception) -> str:
    """A hint on how to omit an argument, or to install a package of one of hooktrain's extras."""
    unexpected = re.search("unexpected keyword argument '(.+)'", str(error))
    if unexpected:
        return (
            f"\nTo omit {unexpected[1]}, write the whole call, such as "
            "optimizer={'_target_': 'torch.optim.AdamW', 'lr': 0.001, "
            "'params': {'_target_': 'hooktrain.solver.get_default_optimizer_params'}}"
        )
    if not isinstance(error, ModuleNotFoundError):
        return ""
    name = str(error.name).partition(".")[0].replace("PIL", "pillow")
    with suppress(metadata.PackageNotFoundError):  # running from a clone
        for requirement in metadata.requires("hooktrain") or []:
            found = re.match(rf"{name}\b.* extra == .(\w+)", requirement)
            if found:
                return f"\nTo install it: pip install 'hooktrain[{found[1]}]'"
    return ""


if __name__ == "__main__":
    parser = argument_parser()
    args = parse_arguments(parser)
    args.config_file = find_config(args.config_file, parser.prog)
    try:
        launch(
            main,
            args.num_gpus,
            num_machines=args.num_machines,
            machine_rank=args.machine_rank,
            dist_url=args.dist_url,
            args=(args,),
        )
    except Exception as error:
        if args.log_level == "debug":
            raise
        logger.debug("The run ended with an error", exc_info=True)  # for log.txt
        raise SystemExit(f"{parser.prog}: {in_short(error)}") from None
