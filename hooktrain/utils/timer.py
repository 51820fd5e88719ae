"""The time of the last progress, for the hook ``Watchdog``."""

import time

last_beat = 0.0  # when beat() was called last, by time.monotonic()


def beat() -> None:
    """Record that the main thread makes progress; long loops call this."""
    global last_beat
    last_beat = time.monotonic()
