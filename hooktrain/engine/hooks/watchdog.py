"""Names the rank that hangs."""

import logging
import math
import os
import sys
import threading
import time
import traceback
from typing import Any, NamedTuple

import torch.distributed as dist
from tabulate import tabulate

from hooktrain.engine.train_loop import HookBase
from hooktrain.utils import comm, heartbeat

logger = logging.getLogger(__name__)

EXIT_HUNG = 124  # as that of timeout(1)


class Progress(NamedTuple):
    """How far a rank has come. What is compared comes first."""

    iteration: int
    collectives: int
    where: str


class Watchdog(HookBase):
    """Says which rank hangs, and where, when a run makes no progress.

    A thread of each rank looks at the time since the rank's last iteration began or ended. When
    that exceeds ``timeout_s``, the rank prints to its stderr how far every rank has come, which
    of them are behind, and the stack of each of its own threads. A rank that hangs makes the
    others wait for it, so all of them report; behind are those that have begun fewer collectives
    or iterations than others. The ranks share their progress through the store of the process
    group, four times in ``timeout_s`` and at most once in ten seconds. There is no collective, and
    a step costs two calls of a clock.

    ``timeout_s`` must exceed the longest iteration, also the first one with its compilation, and
    the longest save. Each batch of :func:`~hooktrain.evaluation.inference_on_dataset` counts as
    progress. Call :func:`hooktrain.utils.heartbeat.beat` inside of anything else that takes long.
    The final evaluation is watched if the hook is registered last.

    Args:
        timeout_s: in seconds, above 0.
        on_timeout: ``"report"`` reports each hang once and goes on waiting; ``"abort"`` then ends
            the process at once with the exit code 124 (:data:`EXIT_HUNG`), so that torchrun
            restarts the run, or ends it.

    Raises:
        ValueError: for arguments out of range.
    """

    def __init__(self, timeout_s: float, on_timeout: str = "report") -> None:
        if not 0 < timeout_s < math.inf:
            raise ValueError(f"timeout_s must be above 0 seconds, but got {timeout_s!r}")
        if on_timeout not in ("report", "abort"):
            raise ValueError(f"on_timeout must be 'report' or 'abort', but got {on_timeout!r}")
        self.timeout_s = timeout_s
        self.on_timeout = on_timeout
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def before_train(self) -> None:
        """Begin to watch."""
        self.before_step()
        self._watched = threading.get_ident()
        self._store: Any = None
        if comm.get_world_size() > 1:
            # A connection of its own: the main thread may hang in a request of the other one.
            store: Any = dist.distributed_c10d._get_default_store()
            self._store = store.clone()
        self._end.clear()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def before_step(self) -> None:
        """Progress: an iteration begins."""
        self._iteration = self.trainer.iter
        heartbeat.beat()

    def after_step(self) -> None:
        """Progress: an iteration ends."""
        self.before_step()

    def after_train(self) -> None:
        """Stop watching."""
        self._end.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _watch(self) -> None:
        reported = None
        pause = min(10.0, self.timeout_s / 4)
        while True:
            beat = (self._iteration, heartbeat.last_beat())
            stalled = time.monotonic() - beat[1]
            hangs = stalled >= self.timeout_s and reported != beat and not self._end.is_set()
            progress = self._share_progress(read=hangs)
            if hangs:
                reported = beat
                self._report(stalled, progress)
            left = self.timeout_s - stalled
            if self._end.wait(min(pause, left) if left > 0 else pause):
                return

    def _share_progress(self, read: bool) -> dict[int, Progress]:
        """Write this rank's progress to the store; return it by rank, and others' if asked."""
        rank, ranks = comm.get_rank(), comm.get_world_size()
        group: Any = dist.group.WORLD if ranks > 1 else None
        collectives = 0 if group is None else group._get_sequence_number_for_group()
        found = {rank: Progress(self._iteration, collectives, position(self._watched))}
        try:
            if self._store is not None:
                self._store.set(_key(rank), "\n".join(map(str, found[rank])))
                for other in set(range(ranks)) - {rank} if read else ():
                    if self._store.check([_key(other)]):  # get() would wait for it
                        words = self._store.get(_key(other)).decode().split("\n", 2)
                        found[other] = Progress(int(words[0]), int(words[1]), words[2])
        except RuntimeError as error:  # torch's DistError: the process that holds the store is gone
            logger.warning("Watchdog: cannot reach the other ranks: %s", error)
            self._store = None
        return dict(sorted(found.items()))

    def _report(self, stalled: float, progress: dict[int, Progress]) -> None:
        verdict = (
            f"Watchdog: rank {comm.get_rank()} has made no progress for {stalled:.1f} s, over its "
            f"limit of {self.timeout_s:g} s. {describe(progress)}"
        )
        logger.critical("%s", verdict)
        sys.stderr.write(f"{verdict}\n{all_stacks()}")
        sys.stderr.flush()
        if self.on_timeout == "abort":
            logging.shutdown()  # nothing of Python's own end happens in os._exit()
            os._exit(EXIT_HUNG)


def _key(rank: int) -> str:
    return f"hooktrain/watchdog/{rank}"


def describe(progress: dict[int, Progress]) -> str:
    """Which ranks the others wait for, and a table of all."""
    least = min(p[:2] for p in progress.values())
    behind = [rank for rank, p in progress.items() if p[:2] == least]
    if len(progress) == 1:
        return f"It is in iteration {least[0]}, {progress[behind[0]].where}"
    verdict = f"Behind: rank {', '.join(map(str, behind))}."
    if len(behind) == len(progress):
        verdict = "All ranks have come equally far."
    rows = [(rank, *p) for rank, p in progress.items()]
    return f"{verdict}\n{tabulate(rows, headers=['rank', *Progress._fields])}"


def position(thread: int) -> str:
    """Where a thread is, in a few words; "" if it has ended."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return ""
    code = frame.f_code
    return f"{code.co_name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})"


def all_stacks() -> str:
    """The Python stack of every thread of this process, the newest call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    rank = comm.get_rank()
    return "".join(
        f"Stack of thread {names.get(ident, ident)!r} of rank {rank}:\n"
        f"{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )
