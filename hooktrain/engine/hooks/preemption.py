"""Ends a run on request: by a signal once a checkpoint is saved, by a file as an early stop."""

import logging
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from hooktrain.checkpoint import Checkpointer
from hooktrain.engine.hook_base import HookBase
from hooktrain.engine.hooks.checkpointing import PeriodicCheckpointer
from hooktrain.utils import comm
from hooktrain.utils.signals import (
    ENDING,
    is_scheduler_handler,
    replace_handlers,
    restore_handlers,
)

logger = logging.getLogger(__name__)

# In the folder of the checkpoints. `hooktrain eval --follow` writes it when its patience runs out.
STOP_FILE = "stop"

_ONE_SIGNAL_SECONDS = 1.0  # in which a repeated signal counts as the same one
_ASK_SECONDS = 10.0  # torchrun kills 30 seconds after its signal
# A user who sees no answer in a long iteration would send a second signal.
_HEARD = b"\nThe run will save after the iteration, and end. A second signal ends it at once\n"


class Preemption(HookBase):
    """Saves a checkpoint and ends the process on SIGTERM, SIGINT or SIGHUP.

    A file ``stop`` in the checkpointer's folder requests an early stop instead: the main process
    looks for it when a run begins and when the ranks exchange metrics. The run then ends with the
    final evaluation and checkpoint, and logs the text of the file. ``hooktrain eval --follow
    --patience`` writes such a file. The file is not deleted: remove it to continue the run.

    A signal only sets a flag, which a single process checks at the end of each iteration. Several
    ranks exchange their flags along with the metrics, or about every ten seconds if that is sooner,
    so all of them stop after the same iteration, even if only some received the signal. A gradient
    accumulation in progress is completed first. Then a checkpoint such as ``model_0000099.pth`` is
    saved, unless this iteration has just been saved, with the prefix and the ``max_to_keep`` of the
    run's :class:`PeriodicCheckpointer`. Finally ``SystemExit`` is raised with the code 128 + the
    signal number: 143 for SIGTERM, 130 for SIGINT, 129 for SIGHUP, which a closing terminal sends
    (nohup still ignores it). The final evaluation is skipped, and ``trainer.succeeded`` is False. A
    resumed run continues as if it had not been interrupted.

    If submitit handles a signal, its handler is called on every rank once the checkpoint is saved.
    If the main process's handler exits, as for SIGUSR2 when the job is requeued, all ranks end with
    its exit code. Otherwise the run continues, as after SIGTERM, which submitit ignores.

    A second signal ends the process at once, through the previously installed handlers. During the
    first second the same signal counts only once, since schedulers signal all processes and
    launchers then forward the signal to them again.

    Evaluations and saves are not interrupted, so leave time for the longest one: torchrun kills its
    processes ``--shutdown-timeout`` seconds after the signal, 30 by default. During the last
    iteration and the final evaluation a signal has no effect: the run ends anyway.

    The workers of a torch ``DataLoader`` that a trainer or an evaluation iterates over leave these
    signals to their parent process. Start the workers of other loaders with
    :func:`hooktrain.utils.workers.start_workers`.

    Register the hook on every rank. Python allows signal handlers only in the main thread: in
    another thread, as in a Ray worker, the hook does nothing.

    Args:
        checkpointer: the Checkpointer to save with.
        signals: the signals to act on. Add ``signal.SIGUSR1`` if the scheduler sends it shortly
            before the end of a job; torchrun then needs ``--signals-to-handle``, or it ends at
            once.
    """

    needs_every_rank = True
    phase = "save"

    def __init__(
        self,
        checkpointer: Checkpointer,
        signals: Sequence[int] = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP),
    ) -> None:
        self.checkpointer = checkpointer
        self._signals = signals
        self._previous: dict[int, Any] = {}
        self._received_at = 0.0  # the time of the first signal

    def before_train(self) -> None:
        """Install the handlers."""
        self.checkpointer.saved_iteration = None  # one of an earlier run does not count
        self._next_exchange = 0
        self._process = os.getpid()
        self._look_for_stop_file()
        of_scheduler = [n for n in ENDING if is_scheduler_handler(signal.getsignal(n))]
        # Another hook of this class may have installed its handler already.
        free = [
            n
            for n in {*self._signals, *of_scheduler}
            if getattr(signal.getsignal(n), "__func__", None) is not Preemption._receive
        ]
        self._previous = replace_handlers(free, self._receive)

    def after_train(self) -> None:
        """Restore the previous handlers."""
        restore_handlers(self._previous)

    def after_step(self) -> None:
        """Save and exit if the ranks have agreed on a signal."""
        trainer = self.trainer
        if trainer.is_last:  # the run ends anyway
            return
        self._exchange()
        number = trainer.agreement.signal
        if not number or not trainer.can_save:
            return
        logger.warning(
            "%s: saving after iteration %d", signal.Signals(number).name, trainer.iter
        )
        # A save in the background may be of this iteration, and it may fail.
        comm.on_all_ranks(self.checkpointer.wait)
        if comm.broadcast(self.checkpointer.saved_iteration) != trainer.iter:
            trainer.prepare_save()
            self._saving().save_numbered(trainer.iter)
        # A launcher takes a rank that exits for failed, and would kill one that still writes.
        comm.on_all_ranks_patiently(self.checkpointer.finish)
        code = comm.on_all_ranks(partial(self._call_scheduler, number))[0]
        if code is not None:
            # After the other hooks, so that train() can be called again, as in a notebook.
            trainer.raise_later(SystemExit(code))
            return
        self.checkpointer.begin_run()  # finish() has unlocked the folder
        trainer.agreement.signal = 0
        # Another signal may have come by now.
        if trainer.agreement.own_signal == number:
            trainer.agreement.own_signal = 0

    def _call_scheduler(self, number: int) -> Any:
        """Call the scheduler's handler, if there is one; return the exit code if the run ends."""
        handler: Any = self._previous.get(number)
        if not is_scheduler_handler(handler):
            return 128 + number
        try:
            handler(number, None)
        except SystemExit as end:
            return end.code
        return None

    def _saving(self) -> PeriodicCheckpointer:
        """The run's PeriodicCheckpointer, for its names and deletions; a new one if it has none."""
        own = self.checkpointer
        for hook in self.trainer.hooks:
            if isinstance(hook, PeriodicCheckpointer) and hook.checkpointer is own:
                return hook
        return PeriodicCheckpointer(own, 1)

    def _exchange(self) -> None:
        """Tell the ranks about signals. In a long period they exchange metrics early for this."""
        trainer = self.trainer
        if trainer.ends_period:
            self._look_for_stop_file()
        if comm.get_world_size() == 1:
            trainer.agreement.signal = trainer.agreement.own_signal
            return
        if not trainer.ends_period:
            if trainer.done < self._next_exchange:
                return
            trainer.synchronize()  # host-device synchronisation
        mean = max(trainer.clock.agreed / trainer.done, 1e-6)  # seconds of an iteration
        self._next_exchange = trainer.done + int(_ASK_SECONDS / mean)

    def _look_for_stop_file(self) -> None:
        folder = self.checkpointer.save_dir
        path = Path(folder, STOP_FILE)
        if folder and comm.is_main_process() and path.is_file():
            text = path.read_text("utf-8", "replace")
            self.trainer.request_stop(f"{path} exists. {text}")

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        # This runs between any two instructions of the main thread: no logging, no locks.
        now = time.monotonic()
        agreement = self.trainer.agreement
        received = agreement.own_signal
        if is_scheduler_handler(self._previous.get(number)):
            # The signal that requeues the job may come before or after SIGTERM.
            if not received or number != signal.SIGTERM:
                agreement.own_signal = number
            return
        if not received:
            self._received_at = now
            agreement.own_signal = received = number
            if comm.is_main_process():
                with suppress(OSError):  # if stderr is closed
                    os.write(2, _HEARD)
        is_child = os.getpid() != self._process  # after a fork
        is_another = number != received
        if is_child or is_another or now - self._received_at > _ONE_SIGNAL_SECONDS:
            self.after_train()
            signal.raise_signal(number)
