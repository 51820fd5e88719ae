"""Goes on without the updates that would ruin the model."""

import json
import logging
import math
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from tabulate import tabulate

from hooktrain.engine.train_loop import HookBase
from hooktrain.solver.optim_wrapper import wrappers_by_name
from hooktrain.utils import comm, timer
from hooktrain.utils.tensors import is_sharded, non_finite

logger = logging.getLogger(__name__)


class SkipNonFinite(HookBase):
    """Skips an update whose gradients are infinite or NaN, up to so many times in a row.

    Without it such a loss ends the run by a FloatingPointError. With it parameters and optimizer
    stay as they were, schedules go on, and the loss is logged as it was. The optimizer's wrapper
    counts ``skipped_updates``. Where ranks exchange gradients, all of them have the same ones and
    skip the same update; of a sharded model they exchange one number.

    A loss that is not finite though its gradients are, and a buffer such as a batch norm's that
    has taken in what is not finite, still end the run: skipping an update does not repair them. Of
    several passes that are accumulated, the gradients alone decide.

    A scaler of float16 skips updates while it looks for its scale, which counts here too.

    It costs a host-device synchronisation and the largest gradient in each iteration.

    Args:
        max_skips: how many in a row.
        on_limit: after one more, ``"raise"`` raises a FloatingPointError and ``"stop"`` ends the
            run in order.

    Raises:
        ValueError: for another ``on_limit``.
    """

    def __init__(self, max_skips: int = 20, on_limit: str = "raise") -> None:
        if on_limit not in ("raise", "stop"):
            raise ValueError(
                f"on_limit must be 'raise' or 'stop', but got {on_limit!r}"
            )
        self._max_skips = max_skips
        self._on_limit = on_limit
        self._in_a_row = 0

    def before_train(self) -> None:
        """Note which buffers can be checked: some, such as masks, are meant to be infinite."""
        self._meant_so = non_finite(dict(self.trainer.model.named_buffers()))

    def before_step(self) -> None:
        """Nothing is skipped in this iteration yet; whether it will be, may be known later only."""
        self._skipping = False
        wrappers = wrappers_by_name(self.trainer.optim_wrapper).values()
        if not all(wrapper.should_sync() for wrapper in wrappers):
            self.trainer.tolerate_losses()

    def after_backward(self) -> None:
        """Drop the gradients, if some are not finite: the optimizer passes them over then."""
        wrapper = self.trainer.updating
        parameters = [
            p for group in wrapper.optimizer.param_groups for p in group["params"]
        ]
        gradients = {
            str(i): p.grad for i, p in enumerate(parameters) if p.grad is not None
        }
        has_bad = bool(non_finite(gradients))  # host-device synchronisation
        if any(map(is_sharded, gradients.values())):
            has_bad = comm.any_rank(has_bad)
        if not has_bad:
            return
        buffers = dict(self.trainer.model.named_buffers())
        broken = sorted(non_finite(buffers) - self._meant_so)
        if comm.any_rank(bool(broken)):
            whose = broken or "those of another rank"
            raise FloatingPointError(
                f"buffers of the model are not finite any more: {whose}"
            )
        for parameter in parameters:
            parameter.grad = None
        scaler = getattr(wrapper, "grad_scaler", None)
        if scaler is None or not scaler.is_enabled():  # a scaler counts what it skips
            wrapper.count_skipped_update()
        self._skipping = True
        self.trainer.tolerate_losses()
        if comm.is_main_process():
            logger.warning(
                "Iteration %d: gradients are not finite: no update", self.trainer.iter
            )

    def after_step(self) -> None:
        """Raise or stop, if there were too many in a row."""
        self._in_a_row = self._in_a_row + 1 if self._skipping else 0
        if self._in_a_row <= self._max_skips:
            return
        message = (
            f"gradients were not finite in {self._in_a_row} iterations in a row, up to "
        )
        message += f"iteration {self.trainer.iter}; max_skips is {self._max_skips}"
        if self._on_limit == "raise":
            raise FloatingPointError(message)
        self.trainer.request_stop(message)

    def state_dict(self) -> dict[str, Any]:
        """How many in a row there were."""
        return {"in_a_row": self._in_a_row}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned."""
        self._in_a_row = state_dict["in_a_row"]


EXIT_HUNG = 124  # as that of timeout(1)


class Watchdog(HookBase):
    """Says which rank hangs, and where, when a run makes no progress.

    A thread of each rank looks four times in ``timeout_s``, and at least every ten seconds, for
    progress since it looked last. After ``timeout_s`` without any, the rank prints to its stderr
    how far every rank has come, which of them are behind, and the stack of each of its own
    threads. A rank that hangs makes the others wait for it, so all of them report; behind are those
    that have begun fewer iterations or collectives than others. The ranks share their progress
    through the store of the process group. There is no collective, and a step costs two calls of a
    clock.

    ``timeout_s`` must exceed the longest iteration, also the first one with its compilation, and
    the longest save. Each batch of :func:`~hooktrain.evaluation.inference_on_dataset` counts as
    progress. Call :func:`hooktrain.utils.timer.beat` inside of anything else that takes long.
    The final evaluation is watched if the hook is registered last. A process that was suspended
    does not hang.

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
            raise ValueError(
                f"timeout_s must be above 0 seconds, but got {timeout_s!r}"
            )
        if on_timeout not in ("report", "abort"):
            raise ValueError(
                f"on_timeout must be 'report' or 'abort', but got {on_timeout!r}"
            )
        self.timeout_s = timeout_s
        self.on_timeout = on_timeout

    def before_train(self) -> None:
        """Begin to watch."""
        self.before_step()
        self._watched = threading.get_ident()
        self._store: Any = dist.HashStore()  # type: ignore[attr-defined]
        if comm.get_world_size() > 1:
            store: Any = dist.distributed_c10d._get_default_store()
            # A second connection: the main thread may hang in a request of the other one.
            self._store = store.clone()
        self._end = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name="watchdog", daemon=True
        )
        self._thread.start()

    def before_step(self) -> None:
        """Progress: an iteration begins."""
        self._iteration = self.trainer.iter
        timer.beat()

    def after_step(self) -> None:
        """Progress: an iteration ends."""
        timer.beat()

    def after_train(self) -> None:
        """Stop watching."""
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        pause = min(10.0, self.timeout_s / 4)
        limit = math.ceil(self.timeout_s / pause)
        seen, looks = timer.last_beat, 0
        while not self._end.wait(pause):
            # Looks are counted, since the clock also runs while the process is suspended.
            beat = timer.last_beat
            looks = looks + 1 if beat == seen else 0
            seen = beat
            self._share_progress()
            if looks == limit:
                self._report()

    def _share_progress(self) -> None:
        """Write this rank's progress to the store."""
        group: Any = dist.group.WORLD
        collectives = (
            group._get_sequence_number_for_group() if comm.get_world_size() > 1 else 0
        )
        place = traceback.extract_stack(sys._current_frames()[self._watched])[-1]
        where = f"{place.name} ({os.path.basename(place.filename)}:{place.lineno})"
        key, progress = (
            _key(comm.get_rank()),
            json.dumps([self._iteration, collectives, where]),
        )
        try:
            self._store.set(key, progress)
        except RuntimeError as error:  # the process that holds the store is gone
            logger.warning("Watchdog: cannot reach the other ranks: %s", error)
            self._store = dist.HashStore()  # type: ignore[attr-defined]
            self._store.set(key, progress)

    def _report(self) -> None:
        rank, store = comm.get_rank(), self._store
        # get() would wait for a rank that has not shared its progress.
        shared = [
            other
            for other in range(comm.get_world_size())
            if store.check([_key(other)])
        ]
        progress = {other: json.loads(store.get(_key(other))) for other in shared}
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = [
            f"Stack of thread {names.get(ident, ident)!r} of rank {rank}:\n"
            f"{''.join(traceback.format_stack(frame))}"
            for ident, frame in sys._current_frames().items()
        ]
        limit = f"its limit of {self.timeout_s:g} s"
        verdict = f"Watchdog: rank {rank} has made no progress for {limit}. {describe(progress)}"
        logger.critical("%s", verdict)
        sys.stderr.write("\n".join([verdict, *stacks]))
        sys.stderr.flush()
        if self.on_timeout == "abort":
            logging.shutdown()  # os._exit() leaves out what Python does at its end
            os._exit(EXIT_HUNG)


def _key(rank: int) -> str:
    return f"hooktrain/watchdog/{rank}"


def describe(progress: dict[int, list[Any]]) -> str:
    """Which ranks the others wait for, and a table of all.

    Args:
        progress: by rank, the numbers of iterations and collectives begun, and where it is.
    """
    least = min(p[:2] for p in progress.values())
    behind = [str(rank) for rank, p in progress.items() if p[:2] == least]
    verdict = f"Behind: rank {', '.join(behind)}."
    if len(behind) == len(progress):
        verdict = "All ranks have come equally far."
    rows = [(rank, *p) for rank, p in sorted(progress.items())]
    headers = ["rank", "iteration", "collectives", "where"]
    return f"{verdict}\n{tabulate(rows, headers=headers)}"
