"""The time of the last sign of progress, which the watchdog looks at."""

import time

last_beat = 0.0  # when beat() was called last, by time.monotonic()


def beat() -> None:
    """Say that the main thread makes progress, in loops that take long."""
    global last_beat
    last_beat = time.monotonic()
