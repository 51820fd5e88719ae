"""What brings metrics out, and what every such writer has to remember."""

from collections.abc import Callable
from typing import Any

from hooktrain.events.history import Entry, HistoryBuffer
from hooktrain.events.storage import EventStorage, get_event_storage
from hooktrain.utils import comm

Metrics = dict[int, dict[str, float]]  # by iteration and by name

# Of these the mean counts: an evaluation in between is part of it.
TIMES = ("time", "data_time")


class EventWriter:
    """Brings metrics from the current storage to a file, a screen or elsewhere.

    Writers exist on every rank. A subclass has to define :meth:`write` only.
    """

    def write(self) -> None:
        """Write what is new in ``get_event_storage()``."""
        raise NotImplementedError

    def rewind(self, iteration: int) -> None:
        """Forget what was recorded at or after ``iteration``.

        Called in the run's storage when the run starts (at 0) or resumes.
        """

    def close(self) -> None:
        """Release what the writer holds, at the end of a run."""


class ScalarWriter(EventWriter):
    """Writes each value of a metric once, on the main process only.

    A subclass defines :meth:`write_scalars`.

    Args:
        name: of the writer; the storage keeps what it has written.
        window_size: how many iterations to smooth over, where a metric's hint says so.
    """

    def __init__(self, name: str, window_size: int) -> None:
        self._name = name
        self._window_size = window_size
        self._counts: dict[HistoryBuffer, int] = {}  # of the values that are written

    def write(self) -> None:
        """Write what is new; after an error it still is."""
        if comm.is_main_process():
            storage = get_event_storage()
            scalars = self.new_scalars(storage)
            self.write_scalars(storage, scalars)
            self.mark_written(storage)

    def write_scalars(self, storage: EventStorage, scalars: Metrics) -> None:
        """Write what :meth:`new_scalars` has found, if anything."""
        raise NotImplementedError

    def new_scalars(self, storage: EventStorage) -> Metrics:
        """What is new, by iteration in increasing order, and by name.

        Of a metric that is smoothed there is one value: the median, or the mean of times.
        Of others all are there, but of those that are put at each iteration, such as a
        learning rate, only the last.
        """
        found: Metrics = {}
        for name, history in storage.histories().items():
            for value, iteration in self._new_entries(name, history):
                found.setdefault(iteration, {})[name] = value
        return dict(sorted(found.items()))

    def _new_entries(self, name: str, history: HistoryBuffer) -> list[Entry]:
        new_count = history.count - self._counts.get(history, 0)
        if new_count > 0 and history.smoothing_hint:
            ((_, last),) = history.tail(1)
            smoothed = history.recent_median
            if name in TIMES:
                smoothed = history.avg
            return [(smoothed(self._window_size), last)]
        new = history.tail(new_count)
        iterations = {iteration for _, iteration in new}
        last_of_series = []
        for value, iteration in new:
            if iteration + 1 not in iterations:
                last_of_series.append((value, iteration))
        return last_of_series

    def mark_written(self, storage: EventStorage) -> None:
        """Remember that everything is written."""
        counts = {}
        for name, history in storage.histories().items():
            counts[name] = history.count
            self._counts[history] = history.count
        storage.written[self._name] = counts

    def rewind(self, iteration: int) -> None:
        """Go on after the last write before the storage was saved."""
        storage = get_event_storage()
        written = storage.written.get(self._name, {})
        self._counts = {}
        for name, history in storage.histories().items():
            self._counts[history] = written.get(name, 0)


class FunctionWriter(ScalarWriter):
    """Gives metrics to a function of an experiment tracker, on the main process only.

    Example::

        wandb.init(project="points")
        FunctionWriter(wandb.log)
        FunctionWriter(mlflow.log_metrics)

    After a kill, what came after the last checkpoint is given twice.

    Args:
        log: called as ``log(metrics, step=iteration)``, with a dict of floats by name, for
            each iteration that has something new.
        window_size: how many iterations to smooth over, at least 1.
    """

    def __init__(self, log: Callable[..., Any], window_size: int = 20) -> None:
        super().__init__("function", window_size)
        self._log = log

    def write_scalars(self, storage: EventStorage, scalars: Metrics) -> None:
        """Call the function."""
        for iteration, metrics in scalars.items():
            self._log(metrics, step=iteration)
