"""Ends a process that hangs."""

import faulthandler
import os
import tempfile
import threading
from contextlib import suppress

from hooktrain.engine.hook_base import HookBase
from hooktrain.utils import comm, timer

EXIT_HUNG = 124  # the exit code of timeout(1)


class Watchdog(HookBase):
    """Ends a process that makes no progress, after printing the stacks of all its threads.

    torchrun then restarts or ends the run. The other ranks wait for a rank that hangs, so they
    print their stacks and end too. The culprit hangs outside a collective, or prints nothing.

    With NCCL all ranks may wait at the same line of Python. Their last collectives are in torch's
    flight recorder (``TORCH_FR_BUFFER_SIZE``), which torch writes to files at the timeout of the
    process group (``TORCH_NCCL_DUMP_ON_TIMEOUT=1``). Make that shorter than ``timeout_s``.

    ``timeout_s`` must exceed the longest iteration and the longest save. Each batch of
    :func:`hooktrain.evaluation.inference_on_dataset` counts as progress. Call
    :func:`hooktrain.utils.timer.beat` inside anything else that takes long.

    A thread checks for progress four times per ``timeout_s``, and at least every ten seconds. It
    counts its checks, so a suspended process does not seem to hang. It cannot check while C code
    holds the interpreter's lock; the timeout of the process group covers that case.

    Args:
        timeout_s: the seconds without progress after which the process exits with code 124; above
            0.
        first_s: the limit until the end of the first iteration, which may compile, if this is
            longer.
    """

    phase = "end"

    def __init__(self, timeout_s: float, first_s: float = 0) -> None:
        self.timeout_s = timeout_s
        self._limit_s = max(first_s, timeout_s)

    def before_train(self) -> None:
        """Start the watchdog's thread."""
        timer.beat()
        self._end = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name="watchdog", daemon=True
        )
        self._thread.start()

    def after_step(self) -> None:
        """Record the progress; from now on the limit is ``timeout_s``."""
        timer.beat()
        self._limit_s = self.timeout_s

    def after_train(self) -> None:
        """End the thread."""
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        pause = min(10.0, self.timeout_s / 4)
        checks = 0  # without progress
        while checks * pause < self._limit_s:
            seen = timer.last_beat
            if self._end.wait(pause):
                return
            checks = checks + 1 if timer.last_beat == seen else 0
        text = (
            f"Watchdog: rank {comm.get_rank()} has made no progress for "
            f"{self._limit_s:g} s. Its threads:\n"
        )
        with suppress(OSError), tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            # One call, since other ranks may write to the same terminal at the same time. Not by
            # logging, whose lock the hanging thread may hold.
            os.write(2, text.encode() + file.read())
        self._end.wait(pause)  # until the other ranks have printed theirs
        os._exit(EXIT_HUNG)  # Python's own exit would wait for the hanging thread
