"""What brings metrics out, and what every such writer has to remember."""

from collections import deque
from collections.abc import Iterable

from hooktrain.utils.events.storage import EventStorage


class EventWriter:
    """Brings metrics from the current storage to a file, a screen or elsewhere.

    Writers exist on every rank. One that should write once does so on the main process only. A
    subclass has to define :meth:`write` and nothing else.
    """

    def write(self) -> None:
        """Write what is new in ``get_event_storage()``."""
        raise NotImplementedError(f"{type(self).__qualname__} must define write")

    def rewind(self, iteration: int) -> None:
        """Forget everything that this writer has recorded at or after ``iteration``.

        Called when a run starts (``iteration`` is 0) or resumes, before the first :meth:`write`.
        """

    def close(self) -> None:
        """Release what the writer holds. Called at the end of a run."""


class UnwrittenScalars:
    """Picks the metrics that a writer has not written yet.

    It remembers for each metric the last 64 iterations that were written. So a value that comes
    with an older iteration than others is neither lost nor written twice.

    Args:
        window_size: how many iterations to smooth over, where a metric's hint allows it.
    """

    def __init__(self, window_size: int) -> None:
        self._window_size = window_size
        self._written: dict[str, deque[int]] = {}

    def find(self, storage: EventStorage) -> list[tuple[str, float, int]]:
        """(name, value, iteration) of each metric with news, in increasing order of iteration."""
        latest = storage.latest_with_smoothing_hint(self._window_size)
        unwritten = [
            (name, value, iteration)
            for name, (value, iteration) in latest.items()
            if iteration not in self._written.get(name, ())
        ]
        return sorted(unwritten, key=lambda scalar: scalar[2])

    def mark_written(self, names: Iterable[str], iteration: int) -> None:
        """Remember that the values of these metrics at an iteration are written."""
        for name in names:
            self._written.setdefault(name, deque(maxlen=64)).append(iteration)

    def rewind(self, iteration: int) -> None:
        """Forget what was written at or after ``iteration``."""
        for name, written in self._written.items():
            self._written[name] = deque((i for i in written if i < iteration), written.maxlen)
