"""The time of a trainer's steps, by which periods such as ``"10 minutes"`` end."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction


@dataclass
class Clock:
    """The seconds that a trainer has spent in its steps.

    Evaluations and saves do not count, so that one that takes longer than its period does not
    follow upon itself. Several ranks take the most seconds of any rank, where they exchange
    metrics. So all of them see a period end after the same iteration.

    Args:
        read: gives the time in seconds.
        is_shared: whether there are several ranks.

    Attributes:
        own: the seconds of this process.
        agreed: the most of any rank at the last exchange.
        now: what the hooks of this iteration go by.
        before: what those of the iteration before went by.
    """

    read: Callable[[], float] = time.monotonic
    is_shared: bool = False
    own = agreed = now = before = since = 0.0

    def begin_step(self) -> None:
        """Begin to count."""
        self.since = self.read()

    def end_step(self) -> None:
        """Stop counting."""
        self.own += self.read() - self.since

    def advance(self) -> None:
        """Let the hooks of this iteration go by what the ranks have agreed on."""
        self.before = self.now
        self.now = self.agreed if self.is_shared else self.own

    def has_passed(self, seconds: Fraction) -> bool:
        """Whether a multiple of so many seconds has passed since the iteration before."""
        return self.now // seconds > self.before // seconds
