"""Measures where the time of a run goes, and when periods such as ``"10 minutes"`` end."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction

from hooktrain.utils.names import Numbers, State


class Clock:
    """Counts the seconds that a run spends in its steps, and in named pauses between them.

    They are saved in checkpoints, so a resumed run continues counting.

    Periods are measured in the time of steps alone: otherwise an evaluation that takes longer than
    its period would be due again at once. Several ranks use the longest time of any rank, which
    they exchange with the metrics, so that a period ends after the same iteration on all of them.

    Attributes:
        is_shared: whether there are several ranks.
        own: the seconds that this process has spent in its steps.
        begun: the same when the current step began.
        pauses: the seconds that it has spent in evaluations, saves and the like, by name.
        agreed: the largest ``own`` of any rank at the last exchange.
        now: the seconds by which the hooks of this iteration measure their periods.
        before: the same in the previous iteration.
        read: returns the time in seconds.
    """

    is_shared = False
    read = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self.pauses: Numbers = defaultdict(float)
        self.own = self.begun = self.agreed = self.now = self.before = 0.0
        self._since = 0.0

    def begin_step(self) -> None:
        """Start counting."""
        self.begun = self.own
        self._since = self.read()

    def lap(self) -> None:
        """Add the time since this step began, or since its last lap."""
        now = self.read()
        self.own += now - self._since
        self._since = now

    def advance(self) -> None:
        """Set the time that the hooks of this iteration use, which is the same on all ranks."""
        self.before = self.now
        self.now = self.agreed if self.is_shared else self.own

    def has_passed(self, seconds: Fraction) -> bool:
        """Whether a multiple of ``seconds`` has passed since the previous iteration."""
        return self.now // seconds > self.before // seconds

    @contextmanager
    def pause(self, name: str) -> Iterator[None]:
        """A context whose time is counted under a name."""
        start = self.read()
        yield
        self.pauses[name] += self.read() - start

    def state_dict(self) -> State:
        """The seconds by pause, those of the steps, and the time that the hooks last used."""
        return {**self.pauses, "step": self.own, "now": self.now}

    def load_state_dict(self, state_dict: State) -> None:
        """Load what :meth:`state_dict` returned."""
        self.pauses = defaultdict(float, state_dict)
        self.own = self.pauses.pop("step", 0.0)
        self.agreed = self.now = self.before = self.pauses.pop("now", self.own)
