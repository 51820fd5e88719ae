"""A stopwatch, and the time of the last sign of progress."""

import time

last_beat = 0.0  # when beat() was called last, by time.monotonic()


def beat() -> None:
    """Say that the main thread makes progress, in loops that take long, such as evaluations."""
    global last_beat
    last_beat = time.monotonic()


class Timer:
    """Measures seconds on a clock that never jumps; runs from its construction on.

    Example:
        >>> timer = Timer()
        >>> timer.pause()
        >>> timer.is_paused()
        True
        >>> timer.resume()
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start again from zero, running."""
        self._resumed_at: float | None = time.perf_counter()
        self._seconds_before = 0.0
        self._starts = 1

    def pause(self) -> None:
        """Stop counting.

        Raises:
            ValueError: the timer is paused already.
        """
        if self._resumed_at is None:
            raise ValueError("cannot pause a Timer that is paused; call resume() first")
        self._seconds_before = self.seconds()
        self._resumed_at = None

    def is_paused(self) -> bool:
        """Whether the timer is paused."""
        return self._resumed_at is None

    def resume(self) -> None:
        """Go on counting.

        Raises:
            ValueError: the timer is running.
        """
        if self._resumed_at is not None:
            raise ValueError(
                "cannot resume a Timer that is running; call pause() first"
            )
        self._resumed_at = time.perf_counter()
        self._starts += 1

    def seconds(self) -> float:
        """The seconds since the last reset, without the pauses."""
        running = (
            0.0 if self._resumed_at is None else time.perf_counter() - self._resumed_at
        )
        return self._seconds_before + running

    def avg_seconds(self) -> float:
        """The seconds since the last reset, divided by the number of starts (one plus resumes)."""
        return self.seconds() / self._starts
