"""Saves and ends the process when somebody asks for its end."""

import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from hooktrain.checkpoint import Checkpointer
from hooktrain.engine.train_loop import HookBase
from hooktrain.utils import comm

logger = logging.getLogger(__name__)

_ONE_SIGNAL_SECONDS = 1.0
_ASK_SECONDS = 10.0  # torchrun leaves 30 between its signal and the kill


class Preemption(HookBase):
    """Saves a checkpoint and ends the process when SIGTERM or SIGINT asks for its end.

    A signal only sets a flag. A single process looks at it at the end of the iteration. Several
    ranks stop after the same iteration, also if not all of them got the signal: they ask each other
    every ``sync_period`` iterations, or after some ten seconds where these take longer. An open
    accumulation is completed. Then the checkpoint ``model_0000099.pth`` is written, and
    ``SystemExit`` is raised with the code 128 + the signal's number: 143 for SIGTERM, 130 for
    SIGINT. There is no final evaluation, and ``trainer.succeeded`` is False. A resumed run goes on
    as if nothing had happened.

    A second signal ends the process at once, by the handlers that were there before. Within a
    second of the first it does so only if it is another signal: schedulers signal all processes,
    and launchers pass the signal on to them once more.

    Evaluations and saves are not interrupted, so leave time for the longest one: torchrun kills its
    processes ``--shutdown-timeout`` seconds after the signal, 30 by default. In the last iteration
    and the final evaluation a signal changes nothing: the run comes to its end.

    The workers of a torch ``DataLoader`` that a trainer or an evaluation iterates over leave the
    signals to their process. Start those of other loaders by
    :func:`hooktrain.utils.workers.start_workers`.

    Register it on every rank, and last, so that the checkpoint holds what the other hooks did.
    Python has signal handlers in the main thread only: in another one the hook does nothing.

    Args:
        checkpointer: what saves.
        signals: those to act on; add ``signal.SIGUSR1`` for schedulers that announce the end by it.
            torchrun dies of it, and its processes with it, without ``--signals-to-handle``.
    """

    needs_every_rank = True

    def __init__(
        self,
        checkpointer: Checkpointer,
        signals: Sequence[int] = (signal.SIGTERM, signal.SIGINT),
    ) -> None:
        self.checkpointer = checkpointer
        self._signals = signals
        self._previous: dict[int, Any] = {}
        self._received = 0  # the number of the first signal
        self._received_at = 0.0

    def before_train(self) -> None:
        """Install the handlers."""
        self._received = 0
        self._number = 0  # of the signal that all ranks end by
        self._asked = self.trainer.start_iter
        self._asked_at = time.monotonic()
        self._next = self._asked + 1
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "Signals are ignored: the training does not run in the main thread"
            )
            return
        self._process = os.getpid()
        for number in self._signals:
            known = getattr(signal.getsignal(number), "__self__", None)
            if not isinstance(known, Preemption):  # another one of this trainer listens
                self._previous[number] = signal.signal(number, self._receive)

    def after_train(self) -> None:
        """Put back the handlers that were there before."""
        for number, handler in self._previous.items():
            # None: it was not installed from Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}

    def after_step(self) -> None:
        """Save and exit where the ranks agree on it."""
        trainer = self.trainer
        if trainer.is_last:  # the run comes to its end anyhow
            return
        self._number = self._number or self._ask(trainer.done)
        if not self._number or not trainer.can_save:
            return
        name = signal.Signals(self._number).name
        logger.warning("Ending the run after iteration %d: %s", trainer.iter, name)
        trainer.prepare_save()
        self.checkpointer.save(f"model_{trainer.iter:07d}", iteration=trainer.iter)
        # A rank that is gone is a failure to launchers, which end the one that still writes.
        comm.on_all_ranks(self.checkpointer.wait)
        # After the other hooks: then train() can go on, as in a notebook.
        trainer.raise_later(SystemExit(128 + self._number))

    def _ask(self, done: int) -> int:
        """The number of a signal that a rank got, or 0. A collective, where it is time."""
        if comm.get_world_size() == 1:
            return self._received
        if done < self._next:
            return 0
        now = time.monotonic()
        pace = (now - self._asked_at) / (done - self._asked)
        together = torch.tensor([self._received, pace], dtype=torch.float64)
        number, slowest = comm.all_reduce(together, dist.ReduceOp.MAX).tolist()
        self._asked, self._asked_at = done, now
        in_time = int(_ASK_SECONDS / max(slowest, 1e-6))
        period = self.trainer.sync_period
        self._next = done + min(max(in_time, 1), period - done % period)
        return int(number)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        # Between any two instructions of the main thread: no logging, no locks.
        now = time.monotonic()
        if not self._received:
            self._received_at = now
            self._received = number
        is_child = os.getpid() != self._process  # of a fork
        is_another = number != self._received
        if is_child or is_another or now - self._received_at > _ONE_SIGNAL_SECONDS:
            self.after_train()
            signal.raise_signal(number)
