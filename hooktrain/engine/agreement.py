"""Lets the ranks agree: on a run's settings when it begins, on stops and time at each exchange."""

import logging
from collections.abc import Iterable

from hooktrain.engine.clock import Clock
from hooktrain.engine.hook_base import HookBase
from hooktrain.engine.hook_list import named_hooks
from hooktrain.utils import comm
from hooktrain.utils.names import Numbers, State

logger = logging.getLogger(__name__)


class Agreement:
    """Stop requests, signals and the time, which the ranks exchange along with the metrics.

    Each rank proposes numbers by name, and all ranks receive the maxima.

    Args:
        clock: the trainer's clock, which receives the longest time of any rank.

    Attributes:
        stop_reason: why the run ends early; None until all ranks know it.
        own_signal: the number of a signal that asks this process to end, or 0.
        signal: the highest such number of any rank; 0 until all ranks know it.
    """

    def __init__(self, clock: Clock) -> None:
        self.stop_reason: str | None = None
        self.own_signal = 0
        self.signal = 0
        self._clock = clock
        self._own_reason: str | None = None

    def request_stop(self, reason: str, iteration: int) -> None:
        """Request an early end of the run. In a single process it is agreed on at once."""
        if self._own_reason is None:
            logger.info("Stop requested at iteration %d: %s", iteration, reason)
            self._own_reason = reason
        if comm.get_world_size() == 1:
            self.stop_reason = self._own_reason

    def proposals(self) -> Numbers:
        """This rank's numbers, by name."""
        return {
            "rank_that_stops": -1 if self._own_reason is None else comm.get_rank(),
            "seconds": self._clock.own,
            "signal": self.own_signal,
        }

    def settle(self, maxima: Numbers) -> None:
        """Accept the maxima over the ranks. A collective if a rank requests a stop."""
        self._clock.agreed = maxima["seconds"]
        self.signal = int(maxima["signal"])
        rank = int(maxima["rank_that_stops"])
        if rank >= 0 and self.stop_reason is None:
            self.stop_reason = comm.broadcast(self._own_reason, rank)
            logger.info(
                "Stopping at the request of rank %d: %s", rank, self.stop_reason
            )


def agree_on_run(hooks: Iterable[HookBase], settings: State) -> State:
    """Determine which hooks all ranks have, and the main process's settings. A collective.

    Returns:
        The settings of the main process.

    Raises:
        RuntimeError: if a hook that all ranks need is not registered on all of them.
    """
    named = named_hooks(hooks)
    ranks = comm.all_gather((list(named), settings))
    for name, hook in named.items():
        hook.on_every_rank = all(name in names for names, _ in ranks)
        if hook.needs_every_rank and not hook.on_every_rank:
            raise RuntimeError(f"register {name} on every rank, or on none")
    return ranks[0][1]
