"""Where the time of a run goes, and when periods such as ``"10 minutes"`` end."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction

from hooktrain.utils.names import Numbers, State


class Clock:
    """The seconds that a run has spent in its steps, and by name in what comes between them.

    A checkpoint has them, so they go on in a resumed run.

    Periods go by the steps alone, so that an evaluation that takes longer than its period does not
    follow upon itself. Several ranks take the most seconds of any rank, which they exchange with
    the metrics. So all of them see a period end after the same iteration.

    Attributes:
        is_shared: whether there are several ranks.
        own: the seconds of this process in its steps.
        pauses: by name, the seconds of this process in evaluations, saves and the like.
        agreed: the most of ``own`` on any rank at the last exchange.
        now: what the hooks of this iteration go by.
        before: what those of the iteration before went by.
        read: gives the time in seconds.
    """

    is_shared = False
    read = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self.pauses: Numbers = defaultdict(float)
        self.own = self.agreed = self.now = self.before = 0.0
        self._since = 0.0

    def begin_step(self) -> None:
        """Begin to count."""
        self._since = self.read()

    def lap(self) -> None:
        """Add what has passed in this step since it began, or since the last lap."""
        now = self.read()
        self.own += now - self._since
        self._since = now

    def advance(self) -> None:
        """Let the hooks of this iteration go by what the ranks have agreed on."""
        self.before = self.now
        self.now = self.agreed if self.is_shared else self.own

    def has_passed(self, seconds: Fraction) -> bool:
        """Whether a multiple of so many seconds has passed since the iteration before."""
        return self.now // seconds > self.before // seconds

    @contextmanager
    def pause(self, name: str) -> Iterator[None]:
        """Count the time inside of this under a name."""
        start = self.read()
        yield
        self.pauses[name] += self.read() - start

    def state_dict(self) -> State:
        """The seconds: by pause, in the steps, and those that the last periods went by."""
        return {**self.pauses, "step": self.own, "now": self.now}

    def load_state_dict(self, state_dict: State) -> None:
        """Load what :meth:`state_dict` returned."""
        self.pauses = defaultdict(float, state_dict)
        self.own = self.pauses.pop("step", 0.0)
        self.agreed = self.now = self.before = self.pauses.pop("now", self.own)
