"""Saves and ends the process when somebody asks for its end."""

import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

from hooktrain.checkpoint import Checkpointer
from hooktrain.engine.hooks.checkpointing import refuse_lone_shards
from hooktrain.engine.train_loop import HookBase
from hooktrain.utils.comm import on_all_ranks

logger = logging.getLogger(__name__)

_ONE_SIGNAL_SECONDS = 1.0


class _Preempted(str):
    """The reason of a stop. A class of its own, since anybody may ask for one in the same words."""


class Preemption(HookBase):
    """Saves a checkpoint and ends the process when SIGTERM or SIGINT asks for its end.

    A signal only sets a flag. A single process looks at it at the end of the iteration. Several
    ranks, not all of which need to have got the signal, stop at the same iteration, at the next
    exchange of the trainer (every ``sync_period`` iterations). An open accumulation is completed.
    Then the checkpoint ``model_0000099.pth`` is written, and ``SystemExit`` is raised with
    the code 128 + the signal's number: 143 for SIGTERM, 130 for SIGINT. There is no final
    evaluation, and ``trainer.succeeded`` is False. A resumed run goes on as if nothing had
    happened.

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

    Raises:
        RuntimeError: when training starts, if only some ranks have it and each saves shards.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        signals: Sequence[int] = (signal.SIGTERM, signal.SIGINT),
    ) -> None:
        self.checkpointer = checkpointer
        self._signals = signals
        self._previous: dict[int, Any] = {}
        self._received: tuple[int, float] | None = None

    def before_train(self) -> None:
        """Install the handlers."""
        refuse_lone_shards(self, self.checkpointer)
        self._received = None
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "Signals are ignored: the training does not run in the main thread"
            )
            return
        self._process = os.getpid()
        for number in self._signals:
            self._previous[number] = signal.signal(number, self._receive)

    def after_train(self) -> None:
        """Put back the handlers that were there before."""
        for number, handler in self._previous.items():
            # None: it was not installed from Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}

    def after_step(self) -> None:
        """Ask for a stop after a signal; save and exit where the ranks agree on one."""
        trainer = self.trainer
        if trainer.iter + 1 == trainer.max_iter:  # the run comes to its end anyhow
            return
        if self._received is not None:
            name = signal.Signals(self._received[0]).name
            trainer.request_stop(_Preempted(f"preempted by {name}"))
        reason = trainer.stop_reason
        if not isinstance(reason, _Preempted) or not trainer.can_save:
            return
        logger.warning("Ending the run after iteration %d: %s", trainer.iter, reason)
        trainer.prepare_save(self.on_every_rank)
        name = f"model_{trainer.iter:07d}"
        self.checkpointer.save(name, iteration=trainer.iter)
        if self.on_every_rank:
            # A rank that is gone is a failure to launchers, which end the one that still writes.
            on_all_ranks(self.checkpointer.wait)
        else:
            self.checkpointer.wait()
        number = signal.Signals[reason.split()[-1]]
        # After the other hooks: then train() can go on, as in a notebook.
        trainer.raise_later(SystemExit(128 + number))

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        # Between any two instructions of the main thread: no logging, no locks.
        now = time.monotonic()
        first, at = self._received or (number, now)
        is_child = os.getpid() != self._process  # of a fork
        if is_child or number != first or now - at > _ONE_SIGNAL_SECONDS:
            self.after_train()
            signal.raise_signal(number)
        self._received = (first, at)
