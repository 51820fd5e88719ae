"""Saves checkpoints while training."""

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import FrameType
from typing import Any

from hooktrain.checkpoint import (
    Checkpointer,
    CorruptCheckpointError,
    PeriodicCheckpointer as PlainPeriodicCheckpointer,
)
from hooktrain.checkpoint.loading import read_checkpoint
from hooktrain.checkpoint.resume import checkpoint_names
from hooktrain.engine.hooks.averaging import EMA
from hooktrain.engine.hooks.evaluation import (
    better_by_name,
    check_comes,
    evaluated_at,
    sign_of,
)
from hooktrain.engine.rank_differences import warn_of_differences
from hooktrain.engine.train_loop import HookBase, TrainerBase
from hooktrain.utils import comm
from hooktrain.utils.comm import on_all_ranks
from hooktrain.utils.names import did_you_mean


class PeriodicCheckpointer(PlainPeriodicCheckpointer, HookBase):
    """:class:`hooktrain.checkpoint.PeriodicCheckpointer` as a hook, with the same arguments.

    Register it last, so that the checkpoint holds what the other hooks did in the iteration. The
    state of one that comes later is saved as it was an iteration before; a warning says so. Of
    files only the main process writes. What is saved in the background is complete when ``train()``
    returns.

    Gradients are not saved. So inside an accumulation a save is put off until the accumulation
    ends, for a period at most.
    """

    @property
    def needs_every_rank(self) -> bool:  # type: ignore[override]
        """Every rank writes its part of a sharded checkpoint."""
        return self.checkpointer.sharded

    def before_train(self) -> None:
        """Learn where the run begins and ends; refuse states that could not be saved."""
        self.max_iter = self.trainer.max_iter
        self._is_put_off = self._compared = False
        self.checkpointer.begin_run()
        hooks = self.trainer._hooks
        late = [
            type(h).__name__ for h in hooks[hooks.index(self) + 1 :] if h.state_dict()
        ]
        if late:
            text = "%s come after %s, which saves their state as it was an iteration before"
            self.checkpointer.logger.warning(text, late, type(self).__name__)
        if not any(
            isinstance(c, TrainerBase)
            for c in self.checkpointer.checkpointables.values()
        ):
            text = "Checkpoints have no trainer to resume: give Checkpointer(..., trainer=trainer)"
            self.checkpointer.logger.warning(text)
        if self.trainer.start_iter == 0:
            self.checkpointer.begin_anew()

    def after_step(self) -> None:
        """Save where a period ends, and at the last iteration."""
        if (
            type(self).step is not PlainPeriodicCheckpointer.step
        ):  # it decides by itself
            self.step(self.trainer.iter)
            return
        is_due = self.is_due(self.period)
        is_wanted = is_due or self._is_put_off
        # Put off for a whole period, or with no iteration left to wait for.
        is_late = (
            is_due and self._is_put_off
        ) or self.trainer.iter + 1 == self.max_iter
        self._is_put_off = is_wanted and not is_late and not self.trainer.can_save
        if is_wanted and not self._is_put_off:
            self.trainer.prepare_save(self.on_every_rank)
            if self.on_every_rank and not self._compared:
                warn_of_differences(self.trainer)
            self._compared = True
            self.save_at(self.trainer.iter)

    def after_train(self) -> None:
        """Save the final checkpoint of a run that was stopped early; wait for what is written."""
        trainer = self.trainer
        if not trainer.succeeded:
            self.checkpointer.give_up()
            return
        if trainer.max_iter != self.max_iter and trainer.iter > trainer.start_iter:
            self.max_iter = trainer.max_iter
            trainer.prepare_save(self.on_every_rank)
            self.save_at(trainer.max_iter - 1)
        self.checkpointer.wait()


logger = logging.getLogger(__name__)


class BestCheckpointer(HookBase):
    """Saves ``model_best.pth`` whenever an evaluation gives the best value so far.

    With a sharded checkpointer that is a folder ``model_best``.

    The best value is part of the trainer's state and of the file, so a resumed run never overwrites
    a better model, not even one saved after the checkpoint that it resumes from. No run resumes
    from the file. Before the first step a trainer puts the hook behind ``EvalHook``, so that what
    was measured is what is saved.

    Args:
        eval_period: that of the ``EvalHook``; 0 looks at the end of training only.
            Where it is due, there must be a new value.
        checkpointer: what saves.
        val_metric: the name of the metric, such as ``"classification/accuracy"``. One that begins
            with ``ema/`` is of the average of the hook ``EMA``: the file has that as the model.
        mode: ``"max"`` if more is better, ``"min"`` if less is. None asks the name: ``"min"`` for
            that of a loss or an error, and ``"max"``, as in detectron2, for all others.
        file_prefix: the name of the file, without ``.pth``.

    Attributes:
        best_metric: the best value so far, or None.
        best_iter: the iteration that it was measured at, or None.

    Raises:
        ValueError: for another mode or an impossible ``file_prefix``; in a run, when it is due and
            the metric is not there or older than the weights. What was trained is saved first.
    """

    def __init__(
        self,
        eval_period: int | str,
        checkpointer: Checkpointer,
        val_metric: str,
        mode: str | None = None,
        file_prefix: str = "model_best",
    ) -> None:
        checkpointer.check_name(file_prefix)
        self._period = eval_period
        self._checkpointer = checkpointer
        self.needs_every_rank = checkpointer.sharded  # every rank writes its part
        self._val_metric = val_metric
        self._sign = sign_of(val_metric, mode or better_by_name(val_metric) or "max")
        self._file_prefix = file_prefix
        self.best_metric: float | None = None
        self.best_iter: int | None = None

    def before_train(self) -> None:
        """Learn of a better model that was saved after the checkpoint that the run resumes from."""
        if not self.trainer.start_iter:
            self._checkpointer.begin_anew()
        if not self.trainer.start_iter or not self._checkpointer.save_to_disk:
            return
        folder = self._checkpointer.save_dir
        for name in checkpoint_names(folder):
            if name.removesuffix(".pth") != self._file_prefix:
                continue
            try:
                best = read_checkpoint(os.path.join(folder, name), "meta").get("best")
            except CorruptCheckpointError as error:
                logger.error("The next best model replaces a broken file: %s", error)
                continue
            if (
                best
                and best["metric"] == self._val_metric
                and self._is_better(best["best_metric"])
            ):
                self.load_state_dict(best)

    def _is_better(self, value: float) -> bool:
        best = self.best_metric
        return math.isfinite(value) and (
            best is None or (value - best) * self._sign > 0
        )

    def after_step(self) -> None:
        """Compare after an evaluation."""
        if self.is_due(self._period, at_end=False):
            self._compare(self.trainer.iter)

    def after_train(self) -> None:
        """Compare after the final evaluation."""
        if self.trainer.succeeded and self.trainer.max_iter > 0:
            self._compare(self.trainer.max_iter - 1, at_end=True)
            check_comes(self, self._val_metric)
            self._checkpointer.wait()

    def _compare(self, iteration: int, at_end: bool = False) -> None:
        self._checkpointer.wait()  # to know whether the best so far was saved
        self.trainer.prepare_save(self.on_every_rank)
        name = self._val_metric
        latest = self.trainer.storage.latest().get(name)
        if self.on_every_rank:
            # The main process may be the only one that knows the metric, and what is in the file.
            latest, state = comm.broadcast((latest, self.state_dict()))
            self.load_state_dict(state)
        value, measured_at = latest or (math.nan, -1)
        if measured_at < iteration:
            if not at_end:
                self._refuse(iteration, measured_at)
            return
        is_better, before = self._is_better(value), self.state_dict()
        best = (
            "the first"
            if self.best_metric is None
            else f"the best was {self.best_metric:.4g}"
        )
        verdict = "saving it" if is_better else "not saving it"
        logger.info(
            "%s is %.4g at iteration %d, %s: %s",
            name,
            value,
            measured_at,
            best,
            verdict,
        )
        if not is_better:
            return
        self.best_metric, self.best_iter = value, measured_at
        averages = [
            h for h in self.trainer._hooks if isinstance(h, EMA) and name[:4] == "ema/"
        ]
        with averages[0].swap() if averages else nullcontext():
            self._checkpointer.save(
                self._file_prefix,
                tag=False,
                on_full=partial(self._go_on, before),
                iteration=iteration,
                best={"metric": name, **self.state_dict()},
            )

    def _refuse(self, iteration: int, measured_at: int) -> None:
        name = self._val_metric
        text = f"BestCheckpointer is due at iteration {iteration}, but {name!r} was measured "
        text += f"at {measured_at}: give it the eval_period of EvalHook"
        if measured_at < 0:
            text = f"there is no metric {name!r} to choose the best checkpoint by"
            text += did_you_mean(name, self.trainer.storage.histories())
        if max(evaluated_at(self.trainer), default=0) >= 0:
            self.trainer.raise_later(ValueError(text))
        else:  # an evaluation without results is no mistake
            logger.warning(text)

    def _go_on(self, before: Mapping[str, Any], error: OSError) -> None:
        self.load_state_dict(before)
        logger.error(
            "NOT SAVED: %s. Training goes on; the next best tries again", error
        )

    def state_dict(self) -> dict[str, Any]:
        """The best value, and when it was measured."""
        return {"best_metric": self.best_metric, "best_iter": self.best_iter}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned."""
        self.best_metric = state_dict["best_metric"]
        self.best_iter = state_dict["best_iter"]


_ONE_SIGNAL_SECONDS = 1.0


class _Preempted(str):
    """The reason of a stop. A class of its own, since anybody may ask for one in the same words."""


class Preemption(HookBase):
    """Saves a checkpoint and ends the process when SIGTERM or SIGINT asks for its end.

    A signal only sets a flag. A single process looks at it at the end of the iteration, and goes on
    to the end of an accumulation. Several ranks, not all of which need to have got the
    signal, stop at the same iteration, at the next exchange of the trainer (every ``sync_period``
    iterations). There the checkpoint ``{file_prefix}_0000099.pth`` is written, and ``SystemExit``
    is raised with the code 128 + the signal's number: 143 for SIGTERM, 130 for SIGINT. There is no
    final evaluation, and ``trainer.succeeded`` is False. A resumed run goes on as if nothing had
    happened.

    A second signal ends the process at once, by the handlers that were there before. Within a
    second of the first it does so only if it is another signal: schedulers signal all processes,
    and launchers pass the signal on to them once more.

    With a time limit the process ends likewise when so much time has passed since the training has
    begun, by SIGALRM, with the code 142.

    Evaluations and saves are not interrupted, so leave time for the longest one: torchrun kills its
    processes ``--shutdown-timeout`` seconds after the signal, 30 by default. During the final
    evaluation the run has been saved already, and comes to its end.

    The workers of a torch ``DataLoader`` that a trainer or an evaluation iterates over leave the
    signals to their process. Start those of other loaders by
    :func:`~hooktrain.utils.workers.start_workers`.

    Register it on every rank, and last, so that the checkpoint holds what the other hooks did.
    Python has signal handlers in the main thread only: in another one the hook does nothing.

    Args:
        checkpointer: what saves.
        signals: those to act on; add ``signal.SIGUSR1`` for schedulers that announce the end by it.
            torchrun dies of it, and its processes with it, without ``--signals-to-handle``.
        file_prefix: of the checkpoint's name; that of the periodic checkpoints.
        time_limit_s: in seconds; 0 is none.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        signals: Sequence[int] = (signal.SIGTERM, signal.SIGINT),
        file_prefix: str = "model",
        time_limit_s: float = 0,
    ) -> None:
        checkpointer.check_name(file_prefix)
        self.checkpointer = checkpointer
        self.needs_every_rank = checkpointer.sharded  # every rank writes its part
        numbers = [*signals, *([signal.SIGALRM] if time_limit_s else [])]
        self._signals = tuple(signal.Signals(number) for number in numbers)
        self._time_limit_s = time_limit_s
        self._ends_at: float | None = None
        self._file_prefix = file_prefix
        self._previous: dict[signal.Signals, Any] = {}
        self._received: tuple[int, float] | None = None

    def before_train(self) -> None:
        """Install the handlers."""
        self._received = None
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "Signals are ignored: the training does not run in the main thread"
            )
            return
        previous = {number: signal.getsignal(number) for number in self._signals}
        if any(
            isinstance(getattr(p, "__self__", None), Preemption)
            for p in previous.values()
        ):
            logger.warning(
                "Signals are handled by another Preemption hook, not by this one"
            )
            return
        self._previous, self._process = previous, os.getpid()
        for number in self._signals:
            signal.signal(number, self._receive)
        if self._time_limit_s:
            now = time.monotonic()
            self._ends_at = (
                self._ends_at or now + self._time_limit_s
            )  # also after a rewind
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, self._ends_at - now))

    def after_train(self) -> None:
        """Put back the handlers that were there before."""
        if signal.SIGALRM in self._previous:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._previous.items():
            # None: it was not installed from Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}

    def after_step(self) -> None:
        """Ask for a stop after a signal; save and exit where the ranks agree on one."""
        if self._received is not None:
            name = signal.Signals(self._received[0]).name
            self.trainer.request_stop(_Preempted(f"preempted by {name}"))
        reason, iteration = self.trainer.stop_reason, self.trainer.iter
        if not isinstance(reason, _Preempted) or not self.trainer.can_save:
            return
        number = signal.Signals[reason.split()[-1]]
        why = "its time is up" if number == signal.SIGALRM else f"got {number.name}"
        logger.warning("Ending the run after iteration %d: %s", iteration, why)
        self.trainer.prepare_save(self.on_every_rank)
        self.checkpointer.save(
            f"{self._file_prefix}_{iteration:07d}", iteration=iteration
        )
        if self.on_every_rank:
            # A rank that is gone is a failure to launchers, which end the one that still writes.
            on_all_ranks(self.checkpointer.wait)
        else:
            self.checkpointer.wait()
        self.trainer.raise_later(
            SystemExit(128 + number)
        )  # in order: train() can go on

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        # Between any two instructions of the main thread: no logging, no locks.
        first, at = self._received or (number, time.monotonic())
        if first == signal.SIGALRM:  # this one is the first that somebody has sent
            first, at = number, time.monotonic()
        is_child = os.getpid() != self._process  # of a fork
        if is_child or number != first or time.monotonic() - at > _ONE_SIGNAL_SECONDS:
            self.after_train()
            signal.raise_signal(number)
        self._received = (first, at)
