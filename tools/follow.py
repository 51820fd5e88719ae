"""Evaluate each new checkpoint of a run, in a separate process: ``hooktrain eval --follow``.

``train_net.py`` calls :func:`follow`. The checkpoints are in the run's output folder and in its
store. The file ``metrics.json`` in the folder of the evaluations is the only state: a checkpoint is
evaluated if no row has its iteration. The file is replaced as a whole, so after a kill at any time
it has all rows, or all but the newest one.
"""

import argparse
import logging
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hooktrain.checkpoint import Checkpointer, CorruptCheckpointError, load_model_state
from hooktrain.checkpoint.loading import read_checkpoint
from hooktrain.checkpoint.resume import (
    checkpoint_names,
    iteration_in_name,
    pointed_iteration,
    pointed_name,
)
from hooktrain.checkpoint.store import Entry, Store
from hooktrain.engine import default_setup, hooks
from hooktrain.engine.build import build_evaluation, prepare_model
from hooktrain.engine.hooks.evaluation import find_average, is_better
from hooktrain.engine.hooks.preemption import STOP_FILE
from hooktrain.evaluation.testing import as_numbers
from hooktrain.events import EventStorage, load_json_metrics
from hooktrain.events.json_writer import encode_row
from hooktrain.utils import comm
from hooktrain.utils.comm import on_main_process
from hooktrain.utils.env import seed_step
from hooktrain.utils.file_io import atomic_write, lock_folder, on_disk
from hooktrain.utils.names import did_you_mean

logger = logging.getLogger("hooktrain.follow")


ASKED_AGAIN = "The store does not answer, trying again: %s"

Row = dict[str, Any]


class NoAnswerError(Exception):
    """The store did not return a checkpoint."""


@dataclass(frozen=True)
class Found:
    """A checkpoint of the run.

    Attributes:
        iteration: the last finished iteration.
        name: the name of the file or folder of shards.
        entry: the entry of the store; None if the checkpoint is in the output folder.
    """

    iteration: int
    name: str
    entry: Entry | None = None

    @property
    def is_final(self) -> bool:
        """Whether it is the run's final checkpoint."""
        return self.name.removesuffix(".pth").endswith("_final")


def in_folder(folder: Path) -> list[Found]:
    """The checkpoints of a run in its output folder, up to the one that the pointer names.

    Later ones belong to another run, or are not yet complete. The final checkpoint is included
    even if it is deleted, since it marks the end of the run.
    """
    pointed = pointed_name(folder)
    if not pointed:
        return []
    last = pointed_iteration(folder, pointed)
    if last is None:  # written by another library
        last = read_checkpoint(str(folder / pointed), "meta")["iteration"]
    names = checkpoint_names(folder)
    newest = Found(last, pointed)
    found = [newest] if newest.is_final or pointed in names else []
    for name in names:
        iteration = iteration_in_name(name)
        if iteration is not None and iteration < last:
            found.append(Found(iteration, name))
    return found


class Follower:
    """Evaluates the checkpoints of a run, one after the other.

    Args:
        cfg: the configuration, whose ``train.output_dir`` is the folder of the evaluations.
        run: the output folder of the run, which need not exist.
        store: the address of the run's store; "" for none.
        args: the options of the command line.
    """

    def __init__(
        self, cfg: Any, run: Path, store: str, args: argparse.Namespace
    ) -> None:
        train = cfg.train
        self.run = run
        self.folder = Path(train.output_dir)
        self.reading = self.folder / "reading"
        self.takes_all, self.poll, self.patience = args.all, args.poll, args.patience
        self.metric: str | None = train.best_metric
        self.mode: str = train.best_mode
        if self.patience is not None and not self.metric:
            raise ValueError("--patience needs train.best_metric and train.best_mode")
        on_main_process(self._claim_folder)
        self.store = Store(store, self.reading) if store else None
        _, self.model = prepare_model(cfg)
        self.ema = hooks.EMA(self.model, train.ema.decay) if train.ema.enabled else None
        self.evaluation = build_evaluation(cfg, self.model, self.ema)
        sharded = train.checkpointer.sharded
        self.checkpointer = Checkpointer(self.model, self.folder, sharded=sharded)
        self.best = self._build_best_checkpointer() if self.metric else None
        self.rows: list[Row] = []
        if comm.is_main_process() and (self.folder / "metrics.json").exists():
            self.rows = load_json_metrics(self.folder / "metrics.json")
        self.passed_over: set[str] = set()  # the names of broken checkpoints
        self.has_looked = False
        self.is_waiting = False  # whether it waits for the first checkpoint
        self.has_asked = False

    def _claim_folder(self) -> None:
        """Lock the folder, and remove the links that a killed process was reading."""
        lock_folder(self.folder)
        shutil.rmtree(self.reading, ignore_errors=True)

    def _build_best_checkpointer(self) -> hooks.BestCheckpointer:
        """The hook by which a run keeps its best model, here without a trainer."""
        assert self.metric is not None
        best = hooks.BestCheckpointer(self.checkpointer, self.metric, self.mode)
        best.ema = find_average(self.metric, [self.ema] if self.ema else [])
        best.read_best()
        return best

    def follow(self) -> None:
        """Evaluate checkpoints, up to and including the final one. Collective."""
        while True:
            found, is_over = on_main_process(self._choose)
            if is_over:
                break
            if found is None:
                time.sleep(self.poll)
            else:
                self._evaluate(found)
        logger.info("The final checkpoint of the run has been evaluated")
        if self.best and self.best.best_metric is not None:
            best, text = self.best, "The best %s is %.4g, from iteration %d, in %s"
            logger.info(
                text, self.metric, best.best_metric, best.best_iter, self.folder
            )

    def _choose(self) -> tuple[Found | None, bool]:
        """The checkpoint to evaluate next, if any, and whether all are evaluated."""
        if not self.folder.is_dir():
            raise FileNotFoundError(
                f"{self.folder} is gone: a new run has renamed the output folder of the earlier "
                "one. Start the evaluation of the new one"
            )
        found = self._list_checkpoints()
        if not found:
            if not self.is_waiting:
                self.is_waiting = True
                text = "There is no checkpoint yet: looking for one every %g s"
                logger.info(text, self.poll)
            return None, False
        self._ask_for_stop(found[-1])
        done = {row["iteration"] for row in self.rows}
        wanted = found if self.takes_all else found[-1:]
        new = [
            each
            for each in wanted
            if each.iteration not in done and each.name not in self.passed_over
        ]
        return (new[0] if new else None), found[-1].is_final and not new

    def _list_checkpoints(self) -> list[Found]:
        """The existing checkpoints of the run, in order."""
        found = {each.iteration: each for each in self._in_store()}
        for each in in_folder(self.run):
            found[each.iteration] = each
        return [found[iteration] for iteration in sorted(found)]

    def _in_store(self) -> list[Found]:
        """The checkpoints in the store; none if it does not answer, except the first time."""
        if self.store is None:
            return []
        try:
            entries = self.store.list_entries()
        except Exception as error:  # each package raises its own
            if not self.has_looked:
                raise
            logger.warning(ASKED_AGAIN, repr(error))
            return []
        self.has_looked = True
        # Other entries are files beside the checkpoints, without an iteration.
        of_run = [entry for entry in entries if entry["iteration"] >= 0]
        return [Found(each["iteration"], each["name"], each) for each in of_run]

    def _evaluate(self, found: Found) -> None:
        """Evaluate a checkpoint, keep the best model, and write the row."""
        content = self._load(found)
        if content is None:
            return
        trainer, iteration = content["trainer"], content["iteration"]
        on_main_process(partial(self._check_run, trainer["meta"].get("run_id")))
        logger.info("Evaluating %s, from iteration %d", found.name, iteration)
        # As in the run itself, after the same number of iterations.
        seed_step(
            trainer["seed"], iteration + 1, comm.data_parallel_rank(), "evaluation"
        )
        with EventStorage(iteration) as storage:
            results = comm.broadcast(as_numbers(self.evaluation()))
        storage.load_state_dict(trainer["storage"])
        storage.put_results(results, iteration)
        histories = storage.histories().items()
        row = {name: h.latest() for name, h in histories if h.result in results}
        if self.best:
            self._keep_best(self.best, content, results)
        if comm.is_main_process():
            self._write({**row, "iteration": iteration})

    def _load(self, found: Found) -> Row | None:
        """Load a checkpoint; None if it is gone or broken. Collective."""
        try:
            content = self.checkpointer.read(self._hold(found))
            load_model_state(self.model, content.pop("model"), strict=True)
        except NoAnswerError as error:
            logger.warning(ASKED_AGAIN, error)
            time.sleep(self.poll)
            return None
        except (OSError, CorruptCheckpointError) as error:  # the same on every rank
            is_gone = on_main_process(partial(self._is_gone, found))
            if is_gone:
                logger.info("%s was deleted before it was read", found.name)
            elif found.is_final or isinstance(error, OSError):
                raise
            else:
                logger.error("NOT EVALUATED, since it is broken: %s", error)
                self.passed_over.add(found.name)
            return None
        finally:
            on_main_process(partial(shutil.rmtree, self.reading, ignore_errors=True))
        trainer = content.get("trainer", {})
        if "seed" not in trainer:
            raise ValueError(f"{found.name} lacks the state of a hooktrain trainer")
        if self.ema:
            if "EMA" not in trainer["hooks"]:
                raise ValueError(
                    f"train.ema is enabled, and {found.name} has no average"
                )
            self.ema.load_state_dict(trainer["hooks"]["EMA"])
        return content

    def _hold(self, found: Found) -> Path:
        """A path at which the checkpoint is kept until it is loaded. Collective."""
        path = self.reading / found.name
        if found.entry is None:
            return on_main_process(partial(self._link, self.run / found.name, path))
        assert self.store is not None
        try:
            self.store.fetch(found.entry)
        except (CorruptCheckpointError, FileNotFoundError):
            raise  # the run may have deleted it meanwhile
        except Exception as error:  # each package raises its own
            raise NoAnswerError(repr(error)) from error
        return path

    def _link(self, source: Path, target: Path) -> Path:
        """Link the files of a checkpoint, so that the run may delete it; return the path to read.

        Without hard links, or if the folder is on another file system, this is the checkpoint
        itself.
        """
        self.reading.mkdir(exist_ok=True)
        files = [source]
        if source.is_dir():
            target.mkdir()
            files = [*source.iterdir()]
        for file in files:
            try:
                os.link(file, self.reading / file.relative_to(source.parent))
            except FileNotFoundError:
                raise
            except OSError:
                return source
        return target

    def _is_gone(self, found: Found) -> bool:
        """Whether the run has deleted a checkpoint, which it never does to a final one."""
        if found.entry is None:
            return not found.is_final and not (self.run / found.name).exists()
        return found not in self._in_store()

    def _check_run(self, run_id: str | None) -> None:
        """Refuse to mix the rows of two runs."""
        path = self.folder / "run_id"
        if not path.exists():
            with atomic_write(path) as file:
                file.write(str(run_id).encode())
        elif path.read_text() != str(run_id):
            raise ValueError(
                f"{self.folder} has the rows of another run: choose another by --eval-dir"
            )

    def _keep_best(
        self, best: hooks.BestCheckpointer, content: Row, results: dict[str, float]
    ) -> None:
        """Save the model if the metric has its best value so far. Collective."""
        metric = self.metric
        if metric not in results:
            raise ValueError(
                f"the evaluation returns no {metric!r}, which is train.best_metric"
                f"{did_you_mean(str(metric), results)}"
            )
        value = results[metric]
        if comm.broadcast(best.is_best(value)):
            best.best_metric, best.best_iter = value, content["iteration"]
            best.save(**content)

    def _write(self, row: Row) -> None:
        self.rows.append(row)
        with atomic_write(self.folder / "metrics.json") as file:
            file.write("".join(encode_row({**each}) for each in self.rows).encode())

    def _waited(self) -> int:
        """The number of evaluations since the best one."""
        best, waited = None, 0
        for row in sorted(self.rows, key=lambda row: row["iteration"]):
            value = row.get(self.metric, row.get(f"eval/{self.metric}"))
            if value is None:
                continue
            waited += 1
            if is_better(value, best, self.mode):
                best, waited = value, 0
        return waited

    def _ask_for_stop(self, newest: Found) -> None:
        """Request an early stop of the run when patience runs out."""
        if self.patience is None or self.has_asked or newest.is_final:
            return
        waited = self._waited()
        if waited < self.patience:
            return
        self.has_asked = True
        reason = f"{self.metric} has not improved in {waited} evaluations"
        path = self.run / STOP_FILE
        if newest.entry is not None:
            logger.warning("%s. To stop the run, create a file %r in its folder: this process "
                           "sees only the store", reason, STOP_FILE)  # fmt: skip
            return
        logger.info("%s: asking the run to stop, by %s", reason, path)
        with atomic_write(path) as file:
            file.write(reason.encode())


def follow(cfg: Any, args: argparse.Namespace) -> None:
    """Evaluate each new checkpoint of a run, up to and including the final one. Collective.

    Args:
        cfg: the configuration of the run.
        args: the arguments of the command line.
    """
    test = cfg.dataloader
    if test.get("test") is None or test.get("evaluator") is None:
        raise ValueError("--follow needs dataloader.test and dataloader.evaluator")
    train = cfg.train
    run, store = Path(on_disk(train.output_dir)), train.store
    # The log and the files of an evaluator go beside the rows, not among the files of the run.
    train.output_dir = args.eval_dir or str(run / "eval")
    train.store = ""
    default_setup(cfg, args)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))
    follower = Follower(cfg, run, store, args)
    where = f"{run} and {store}" if store else run
    logger.info("Following %s: the rows go to %s", where, follower.folder)
    follower.follow()
