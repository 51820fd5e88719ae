"""What brings metrics out, and what every such writer has to remember."""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from operator import itemgetter
from typing import Any

from hooktrain.events.storage import EventStorage, HistoryBuffer


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

        Called inside of the run's storage when the run starts (``iteration`` is 0) or resumes,
        before the first :meth:`write`.
        """

    def add_config(self, config: Mapping[str, Any]) -> None:
        """Take the configuration of the run, dicts in dicts, to be shown with its metrics."""

    def close(self) -> None:
        """Release what the writer holds. Called at the end of a run."""


class UnwrittenScalars:
    """Picks the metrics that a writer has not written yet, by counting their values.

    Args:
        window_size: how many iterations to smooth over, where a metric's hint allows it.
    """

    def __init__(self, window_size: int) -> None:
        self._window_size = window_size
        self._counts: dict[HistoryBuffer, int] = {}  # of the values that are written
        self._found: dict[HistoryBuffer, int] = {}
        self._written: set[tuple[str, int]] = set()

    def rewind(self, written: Iterable[tuple[str, int]]) -> None:
        """Begin anew, where these values (name, iteration) are written already."""
        self._counts, self._written = {}, set(written)

    def skip(self, storage: EventStorage, end: int) -> None:
        """Begin anew, where everything before the iteration ``end`` is written already."""
        entries = (
            (name, i) for name, h in storage.histories().items() for _, i in h.values()
        )
        self.rewind((name, i) for name, i in entries if i < end)

    def find(self, storage: EventStorage) -> list[tuple[str, float, int]]:
        """(name, value, iteration) of what is new, in increasing order of iteration.

        Of a metric that is smoothed, one value. Of others all, unless one of the next iteration
        follows: of those that are put at each iteration, such as a learning rate, the last.
        """
        histories = storage.histories()
        self._found = {history: history.count for history in histories.values()}
        found = []
        for name, history in histories.items():
            entries = history.tail(history.count - self._counts.get(history, 0))
            if entries and history.smoothing_hint:
                entries = [(history.recent_median(self._window_size), entries[-1][1])]
            for (value, iteration), (_, following) in pairwise([*entries, (0.0, -1)]):
                if (
                    following != iteration + 1
                    and (name, iteration) not in self._written
                ):
                    found.append((name, value, iteration))
        return sorted(found, key=itemgetter(2))

    def mark_written(self) -> None:
        """Remember that what was found is written."""
        self._counts = self._found
        self._written.clear()
