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

__all__ = ["EXIT_HUNG", "Watchdog"]

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
    others wait for it, so that all of them report; behind are those that have begun fewer
    collectives or iterations than others. The ranks tell each other by the store of the process
    group, once in a quarter of ``timeout_s`` and at most once in ten seconds; there is no
    collective, and a step costs two calls of a clock.

    ``timeout_s`` must exceed the longest iteration, also the first one with its compilation, and
    the longest save. Each batch of an evaluation counts as progress, if it goes by
    :func:`~hooktrain.evaluation.inference_on_dataset`; call
    :func:`hooktrain.utils.heartbeat.beat` inside of whatever else takes long by right. The final
    evaluation is watched if the hook is registered last.

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
        self._iteration = 0
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def before_train(self) -> None:
        """Begin to watch."""
        self.beat()
        self._end.clear()
        board = _Board(threading.get_ident())
        self._thread = threading.Thread(
            target=self._watch, args=(board,), name="watchdog", daemon=True
        )
        self._thread.start()

    def before_step(self) -> None:
        """An iteration begins: progress."""
        self.beat()

    def after_step(self) -> None:
        """An iteration ends: progress."""
        self.beat()

    def after_train(self) -> None:
        """Watch no longer."""
        self._end.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def beat(self) -> None:
        """Tell that this rank makes progress; the iterations do so by themselves."""
        self._iteration = self.trainer.iter
        heartbeat.beat()

    def _watch(self, board: "_Board") -> None:
        reported = None
        pause = min(10.0, self.timeout_s / 4)
        while True:
            beat = (self._iteration, heartbeat.last_beat())
            board.publish(beat[0])
            stalled = time.monotonic() - beat[1]
            if stalled >= self.timeout_s and reported != beat and not self._end.is_set():
                reported = beat
                self._report(board, stalled)
            left = self.timeout_s - stalled
            if self._end.wait(min(pause, left) if left > 0 else pause):
                return

    def _report(self, board: "_Board", stalled: float) -> None:
        progress = board.read()
        behind = ranks_behind(progress)
        verdict = (
            f"Watchdog: rank {comm.get_rank()} has made no progress for {stalled:.1f} s, over its "
            f"limit of {self.timeout_s:g} s. " + describe(behind, progress)
        )
        logger.critical("%s", verdict)
        sys.stderr.write(f"{verdict}\n{all_stacks()}")
        sys.stderr.flush()
        if self.on_timeout == "abort":
            logging.shutdown()  # nothing of Python's own end happens in os._exit()
            os._exit(EXIT_HUNG)


class _Board:
    """Where the ranks write how far they have come: the store of the process group."""

    def __init__(self, main_thread: int) -> None:
        self._main_thread = main_thread
        self._own = Progress(0, 0, "")
        self._store: Any = None
        if comm.get_world_size() > 1:
            store: Any = dist.distributed_c10d._get_default_store()
            # A connection of its own: the main thread may hang in a request of the other one.
            self._store = store.clone()

    def publish(self, iteration: int) -> None:
        """Write this rank's progress."""
        self._own = Progress(iteration, _begun_collectives(), position(self._main_thread))
        if self._store is not None:
            text = "\n".join(map(str, self._own))
            self._try(lambda: self._store.set(_key(comm.get_rank()), text))

    def read(self) -> dict[int, Progress]:
        """What each rank has written, by rank; only this one's if the store is gone."""
        found = {comm.get_rank(): self._own}
        for rank in range(comm.get_world_size()):
            if self._store is not None and rank not in found:
                self._try(lambda rank=rank: found.update(self._read_rank(rank)))
        return dict(sorted(found.items()))

    def _read_rank(self, rank: int) -> dict[int, Progress]:
        if not self._store.check([_key(rank)]):  # get() would wait for it
            return {}
        iteration, collectives, where = self._store.get(_key(rank)).decode().split("\n", 2)
        return {rank: Progress(int(iteration), int(collectives), where)}

    def _try(self, request: Any) -> None:
        try:
            request()
        except RuntimeError as error:  # torch's DistError: the process that holds the store is gone
            logger.warning("Watchdog: cannot reach the other ranks: %s", error)
            self._store = None


def _key(rank: int) -> str:
    return f"hooktrain/watchdog/{rank}"


def _begun_collectives() -> int:
    group: Any = dist.group.WORLD if comm.get_world_size() > 1 else None
    return 0 if group is None else int(group._get_sequence_number_for_group())


def ranks_behind(progress: dict[int, Progress]) -> list[int]:
    """The ranks that others wait for: those that have come least far, if they differ."""
    least = min(p[:2] for p in progress.values())
    return [rank for rank, p in progress.items() if p[:2] == least]


def describe(behind: list[int], progress: dict[int, Progress]) -> str:
    """The verdict, and a table of the ranks."""
    if len(progress) == 1:
        return f"It is in iteration {progress[behind[0]].iteration}, {progress[behind[0]].where}"
    verdict = f"Behind: rank {', '.join(map(str, behind))}."
    if len(behind) == len(progress):
        verdict = "All ranks have come equally far."
    table = tabulate(
        [(rank, *p) for rank, p in progress.items()],
        headers=["rank", "iteration", "collectives", "where"],
    )
    return f"{verdict}\n{table}"


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
