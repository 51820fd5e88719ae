"""Saves checkpoints while training."""

import logging
import math
import operator
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
from hooktrain.engine.hooks.averaging import EMA, is_trained
from hooktrain.engine.hooks.evaluation import choose_mode, refuse_missing
from hooktrain.engine.train_loop import HookBase, TrainerBase
from hooktrain.utils import comm
from hooktrain.utils.comm import on_all_ranks

logger = logging.getLogger(__name__)


class PeriodicCheckpointer(PlainPeriodicCheckpointer, HookBase):
    """:class:`hooktrain.checkpoint.PeriodicCheckpointer` as a hook, with the same arguments.

    Register it last, so that the checkpoint holds what the other hooks did in the iteration. Of
    files only the main process writes. What is saved in the background is complete when ``train()``
    returns.

    Gradients are not saved. So where a model's own step accumulates over several iterations, a save
    is put off to the end of the accumulation, for a period at most.
    """

    def before_train(self) -> None:
        """Learn where the run ends; refuse states that could not be saved."""
        if self.checkpointer.sharded and not self.on_every_rank:
            raise RuntimeError(
                f"register {type(self).__name__} on every rank: each writes its shards"
            )
        self.max_iter = self.trainer.max_iter
        self._is_put_off = False
        self.checkpointer.begin_run(is_new=self.trainer.start_iter == 0)
        saved = self.checkpointer.checkpointables.values()
        if not any(isinstance(each, TrainerBase) for each in saved):
            logger.warning(
                "Checkpoints have no trainer to resume: give Checkpointer(..., trainer=trainer)"
            )
        if not is_trained(self.checkpointer.model, self.trainer):
            logger.warning("Checkpoints have another model than the trainer's")
        hooks = self.trainer._hooks
        later = hooks[hooks.index(self) + 1 :]
        late = [type(hook).__name__ for hook in later if hook.state_dict()]
        if late:
            logger.warning(
                "%s come after %s, which saves their state as it was an iteration before",
                late,
                type(self).__name__,
            )

    def after_step(self) -> None:
        """Call :meth:`step`."""
        self.step(self.trainer.iter)

    def step(self, iteration: int, **extra: Any) -> None:
        """Save if ``iteration`` ends a period or the run."""
        is_due = self.is_due(self.period)
        if not (is_due or self._is_put_off):
            return
        is_late = is_due and self._is_put_off
        is_last = iteration + 1 == self.max_iter
        self._is_put_off = not (self.trainer.can_save or is_late or is_last)
        if not self._is_put_off:
            self.trainer.prepare_save(self.on_every_rank)
            self.save_at(iteration, **extra)

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


class BestCheckpointer(HookBase):
    """Saves ``model_best.pth`` whenever an evaluation gives the best value so far.

    With a sharded checkpointer that is a folder ``model_best``. Register it after ``EvalHook``, so
    that what was measured is what is saved.

    The best value is part of the trainer's state and of the file, so a resumed run never overwrites
    a better model, not even one saved after the checkpoint that it resumes from. No run resumes
    from the file.

    Args:
        eval_period: that of the ``EvalHook``; 0 looks at the end of training only.
        checkpointer: what saves.
        val_metric: the name of the metric, such as ``"classification/accuracy"``.
        mode: ``"max"`` if more is better, ``"min"`` if less is. None takes ``"min"`` for a name
            with "loss" or "error" in it, else ``"max"``.
        file_prefix: the name of the file, without ``.pth``.
        ema: a hook whose averaged weights are saved as the model, where the metric is theirs.

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
        *,
        ema: EMA | None = None,
    ) -> None:
        checkpointer.check_name(file_prefix)
        self._period = eval_period
        self._checkpointer = checkpointer
        self._val_metric = val_metric
        is_max = choose_mode(val_metric, mode) == "max"
        self._compare = operator.gt if is_max else operator.lt
        self._file_prefix = file_prefix
        self._ema = ema
        self.best_metric: float | None = None
        self.best_iter: int | None = None

    def before_train(self) -> None:
        """Learn of a better model that was saved after the checkpoint that the run resumes from."""
        saver = self._checkpointer
        name = self._file_prefix if saver.sharded else f"{self._file_prefix}.pth"
        path = os.path.join(saver.save_dir, name)
        is_resumed = self.trainer.start_iter > 0
        if not (is_resumed and saver.save_to_disk and os.path.exists(path)):
            return
        try:
            best = read_checkpoint(path, "meta").get("best", {})
        except CorruptCheckpointError as error:
            logger.error("The next best model replaces a broken file: %s", error)
            return
        if best.get("metric") == self._val_metric:
            self._update_best(best["best_metric"], best["best_iter"])

    def after_step(self) -> None:
        """Look at the metric after an evaluation."""
        if self.is_due(self._period, at_end=False):
            self._best_checking()

    def after_train(self) -> None:
        """Look at the metric after the final evaluation."""
        if self.trainer.succeeded:
            self._best_checking()
            self._checkpointer.wait()

    def _best_checking(self) -> None:
        """Save the model if the latest value is the best one."""
        self._checkpointer.wait()  # to know whether the best so far was saved
        self.trainer.prepare_save(self.on_every_rank)
        name = self._val_metric
        latest = self.trainer.storage.latest().get(name, (math.nan, -1))
        before = self.state_dict()
        if self.on_every_rank:
            # The main process may be the only one that knows the metric, and what is in the file.
            latest, before = comm.broadcast((latest, before))
            self.load_state_dict(before)
        value, measured_at = latest
        iteration = min(self.trainer.iter, self.trainer.max_iter - 1)
        if measured_at < 0:
            logger.warning("No metric %r to choose the best checkpoint by", name)
            refuse_missing(name, self.trainer)
            return
        if measured_at < iteration:
            self._refuse_old(iteration, measured_at)
            return
        is_better = self._update_best(value, measured_at)
        logger.info(
            "%s is %.4g at iteration %d: %s (the best was %s)",
            name,
            value,
            measured_at,
            "saving the best model" if is_better else "not saving",
            before["best_metric"],
        )
        if is_better:
            with self._ema.swap() if self._ema else nullcontext():
                self._checkpointer.save(
                    self._file_prefix,
                    tag=False,
                    on_full=partial(self._go_on, before),
                    iteration=iteration,
                    best={"metric": name, **self.state_dict()},
                )

    def _update_best(self, value: float, iteration: int) -> bool:
        """Keep a value if it is the best one; whether it is."""
        if not math.isfinite(value):
            return False
        if self.best_metric is not None and not self._compare(value, self.best_metric):
            return False
        self.best_metric = value
        self.best_iter = iteration
        return True

    def _refuse_old(self, iteration: int, measured_at: int) -> None:
        if self.trainer.succeeded:  # there was no evaluation at the end
            return
        self.trainer.raise_later(
            ValueError(
                f"BestCheckpointer is due at iteration {iteration}, but {self._val_metric!r} was "
                f"measured at {measured_at}: register it behind EvalHook, with its eval_period"
            )
        )

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

    A signal only sets a flag. A single process looks at it at the end of the iteration. Several
    ranks, not all of which need to have got the signal, stop at the same iteration, at the next
    exchange of the trainer (every ``sync_period`` iterations). An open accumulation is completed.
    Then the checkpoint ``{file_prefix}_0000099.pth`` is written, and ``SystemExit`` is raised with
    the code 128 + the signal's number: 143 for SIGTERM, 130 for SIGINT. There is no final
    evaluation, and ``trainer.succeeded`` is False. A resumed run goes on as if nothing had
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
        self._signals = list(signals)
        if time_limit_s:
            self._signals.append(signal.SIGALRM)
        self._time_limit_s = time_limit_s
        self._file_prefix = file_prefix
        self._previous: dict[int, Any] = {}
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
        owners = [getattr(handler, "__self__", None) for handler in previous.values()]
        if any(isinstance(owner, Preemption) for owner in owners):
            logger.warning(
                "Signals are handled by another Preemption hook, not by this one"
            )
            return
        self._previous = previous
        self._process = os.getpid()
        for number in self._signals:
            signal.signal(number, self._receive)
        if self._time_limit_s:
            signal.setitimer(signal.ITIMER_REAL, self._time_limit_s)

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
        trainer = self.trainer
        if self._received is not None:
            name = signal.Signals(self._received[0]).name
            trainer.request_stop(_Preempted(f"preempted by {name}"))
        reason = trainer.stop_reason
        if not isinstance(reason, _Preempted) or not trainer.can_save:
            return
        number = signal.Signals[reason.split()[-1]]
        why = "its time is up" if number == signal.SIGALRM else f"got {number.name}"
        logger.warning("Ending the run after iteration %d: %s", trainer.iter, why)
        trainer.prepare_save(self.on_every_rank)
        name = f"{self._file_prefix}_{trainer.iter:07d}"
        self.checkpointer.save(name, iteration=trainer.iter)
        if self.on_every_rank:
            # A rank that is gone is a failure to launchers, which end the one that still writes.
            on_all_ranks(self.checkpointer.wait)
        else:
            self.checkpointer.wait()
        # After the other hooks: then train() can go on, as in a notebook.
        trainer.raise_later(SystemExit(128 + number))

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        # Between any two instructions of the main thread: no logging, no locks.
        now = time.monotonic()
        first, at = self._received or (number, now)
        if first == signal.SIGALRM:  # this one is the first that somebody has sent
            first, at = number, now
        is_child = os.getpid() != self._process  # of a fork
        if is_child or number != first or now - at > _ONE_SIGNAL_SECONDS:
            self.after_train()
            signal.raise_signal(number)
        self._received = (first, at)
