"""What brings metrics out, and what every such writer has to remember."""

from collections.abc import Callable
from typing import Any

from hooktrain.events.history import Entry, HistoryBuffer
from hooktrain.events.storage import EventStorage, get_event_storage
from hooktrain.utils import comm

Metrics = dict[int, dict[str, float]]  # by iteration and by name
IsWritten = Callable[[str, int], bool]  # of a metric's name and an iteration


class EventWriter:
    """Brings metrics from the current storage to a file, a screen or elsewhere.

    Writers exist on every rank. A subclass has to define :meth:`write` only.
    """

    def write(self) -> None:
        """Write what is new in ``get_event_storage()``."""
        raise NotImplementedError(f"{type(self).__qualname__} must define write")

    def rewind(self, iteration: int) -> None:
        """Forget everything that was recorded at or after ``iteration``.

        Called in the run's storage when the run starts (at 0) or resumes.
        """

    def close(self) -> None:
        """Release what the writer holds, at the end of a run."""


class UnwrittenScalars:
    """Finds the metrics that a writer has not written yet.

    Args:
        name: of the writer; the storage keeps how far it has written.
        window_size: how many iterations to smooth over, where a metric's hint says so.
    """

    def __init__(self, name: str, window_size: int) -> None:
        self._name = name
        self._window_size = window_size
        self._counts: dict[HistoryBuffer, int] = {}  # of the values that are written
        self._is_written: IsWritten = _never

    def find(self, storage: EventStorage) -> Metrics:
        """What is new, by iteration in increasing order, and by name.

        Of a metric that is smoothed there is one value. Of others all are there, but of
        those that are put at each iteration, such as a learning rate, only the last.
        """
        found: Metrics = {}
        for name, history in storage.histories().items():
            for value, iteration in self._new_entries(history):
                if not self._is_written(name, iteration):
                    found.setdefault(iteration, {})[name] = value
        return {iteration: found[iteration] for iteration in sorted(found)}

    def _new_entries(self, history: HistoryBuffer) -> list[Entry]:
        new_count = history.count - self._counts.get(history, 0)
        if new_count > 0 and history.smoothing_hint:
            ((_, iteration),) = history.tail(1)
            return [(history.recent_median(self._window_size), iteration)]
        new = history.tail(new_count)
        iterations = {iteration for _, iteration in new}
        last_of_series = []
        for value, iteration in new:
            if iteration + 1 not in iterations:
                last_of_series.append((value, iteration))
        return last_of_series

    def mark_written(
        self,
        storage: EventStorage,
        found: Metrics,
    ) -> None:
        """Remember that what was found is written."""
        for history in storage.histories().values():
            self._counts[history] = history.count
        self._is_written = _never
        before = storage.written.get(self._name, -1)
        storage.written[self._name] = max([before, *found])

    def rewind(self, is_written: IsWritten) -> None:
        """Begin anew, with what is written already."""
        self._counts = {}
        self._is_written = is_written

    def resume(self, storage: EventStorage) -> None:
        """Begin anew after the storage's last write."""
        last = storage.written.get(self._name, -1)
        self.rewind(lambda name, iteration: iteration <= last)


def _never(name: str, iteration: int) -> bool:
    return False


class FunctionWriter(EventWriter):
    """Gives metrics to a function of an experiment tracker, on the main process only.

    Example::

        wandb.init(project="points")
        FunctionWriter(wandb.log)
        FunctionWriter(mlflow.log_metrics)

    After a kill, what came after the last checkpoint is given a second time.

    Args:
        log: called as ``log(metrics, step=iteration)``, with a dict of floats by name, for
            each iteration that has something new.
        window_size: how many iterations to smooth over, at least 1.
    """

    def __init__(
        self,
        log: Callable[..., Any],
        window_size: int = 20,
    ) -> None:
        self._log = log
        self._unwritten = UnwrittenScalars("function", window_size)

    def write(self) -> None:
        """Call the function."""
        if not comm.is_main_process():
            return
        storage = get_event_storage()
        found = self._unwritten.find(storage)
        for iteration, metrics in found.items():
            self._log(metrics, step=iteration)
        self._unwritten.mark_written(storage, found)

    def rewind(self, iteration: int) -> None:
        """Go on after the last write before the checkpoint."""
        self._unwritten.resume(get_event_storage())
