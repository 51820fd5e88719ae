"""The time of the last progress, which the hook ``Watchdog`` checks."""

import time

last_beat = 0.0  # the time.monotonic() of the last call of beat()


def beat() -> None:
    """Record that the main thread makes progress; long loops call this."""
    global last_beat
    last_beat = time.monotonic()
