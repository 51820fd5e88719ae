"""The base classes of writers of metrics, and a writer for experiment trackers."""

from collections.abc import Callable
from typing import Any

from hooktrain.events.history import Entry, HistoryBuffer
from hooktrain.events.storage import EventStorage, get_event_storage
from hooktrain.utils import comm

Metrics = dict[int, dict[str, float]]  # by iteration and by name

# These metrics are smoothed by the mean, which includes evaluations in between.
TIMES = ("time", "data_time")


class EventWriter:
    """Writes metrics of the current storage to a file, a terminal or elsewhere.

    Every rank has its writers. A subclass has to define :meth:`write` only.
    """

    def write(self) -> None:
        """Write what is new in ``get_event_storage()``."""
        raise NotImplementedError

    def rewind(self, iteration: int) -> None:
        """Forget what was recorded at or after ``iteration``.

        The run calls it inside of its storage when it starts (at 0) or resumes.
        """

    def close(self) -> None:
        """Release files and other resources, at the end of a run."""


class ScalarWriter(EventWriter):
    """Writes each value of a metric once, on the main process only.

    A subclass defines :meth:`write_scalars`.

    Args:
        kind: what it writes to, such as ``"tensorboard"``.
        window_size: how many iterations to smooth over, where a metric's hint says so.

    Attributes:
        name: the name under which the storage keeps how much the writer has written: its kind.
            Further writers of a kind get ``#1``, ``#2`` behind it, in the order of their rewinds.
    """

    def __init__(self, kind: str, window_size: int) -> None:
        self.name = self._kind = kind
        self._window_size = window_size
        self._counts: dict[HistoryBuffer, int] = {}  # of the values that are written

    def write(self) -> None:
        """Write the new values. After an error they are still new."""
        if comm.is_main_process():
            storage = get_event_storage()
            scalars = self.new_scalars(storage)
            self.write_scalars(storage, scalars)
            self.mark_written(storage)

    def write_scalars(self, storage: EventStorage, scalars: Metrics) -> None:
        """Write the metrics that :meth:`new_scalars` has found; there may be none."""
        raise NotImplementedError

    def new_scalars(self, storage: EventStorage) -> Metrics:
        """The new values, by iteration in increasing order, and by name.

        A smoothed metric has one value: the median, or the mean of a time. Of other metrics all
        new values are there. If such a metric is put at each iteration, like a learning rate, only
        its last value is there.
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
        """Remember that all values are written."""
        counts = {}
        for name, history in storage.histories().items():
            counts[name] = history.count
            self._counts[history] = history.count
        storage.written[self.name] = counts

    def rewind(self, iteration: int) -> None:
        """Continue after the last write before the storage was saved."""
        storage = get_event_storage()
        count = 0
        self.name = self._kind
        while storage.writers.setdefault(self.name, self) is not self:
            count += 1
            self.name = f"{self._kind}#{count}"
        written = storage.written.get(self.name, {})
        self._counts = {}
        for name, history in storage.histories().items():
            self._counts[history] = written.get(name, 0)


class FunctionWriter(ScalarWriter):
    """Calls a function of an experiment tracker with the metrics, on the main process only.

    Example::

        wandb.init(project="points")
        FunctionWriter(wandb.log)
        FunctionWriter(mlflow.log_metrics)

    After a kill, the tracker gets the values after the last checkpoint twice.

    Args:
        log: the function. It is called as ``log(metrics, step=iteration)``, with a dict of floats
            by name, for each iteration that has new values.
        window_size: how many iterations to smooth over, at least 1.
    """

    def __init__(self, log: Callable[..., Any], window_size: int = 20) -> None:
        super().__init__("function", window_size)
        self._log = log

    def write_scalars(self, storage: EventStorage, scalars: Metrics) -> None:
        """Call the function for each iteration."""
        for iteration, metrics in scalars.items():
            self._log(metrics, step=iteration)
