"""The time of the last sign of progress, which the hook ``Watchdog`` reads."""

import time

last_beat = 0.0  # when beat() was called last, by time.monotonic()


def beat() -> None:
    """Record that the main thread makes progress. Long loops call it."""
    global last_beat
    last_beat = time.monotonic()
