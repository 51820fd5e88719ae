"""A sign of life of the main thread, for whoever watches that it does not hang."""

import time

_last = 0.0


def beat() -> None:
    """Tell that there is progress: for loops that take long by right, such as evaluations."""
    global _last
    _last = time.monotonic()


def last_beat() -> float:
    """When that was told last, by ``time.monotonic()``; 0 before the first time."""
    return _last
