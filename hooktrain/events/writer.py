"""The base classes of writers of metrics, and a writer for experiment trackers."""

from collections.abc import Callable, Iterable
from typing import Any

from hooktrain.events.history import Entry, HistoryBuffer
from hooktrain.events.storage import EventStorage, get_event_storage
from hooktrain.utils import comm
from hooktrain.utils.file_io import AnyPath
from hooktrain.utils.names import Numbers

Metrics = dict[int, Numbers]  # by iteration and by name

_MAX_UNDELIVERED = 10_000  # rows that wait for a tracker

# These metrics are smoothed by the mean, which includes evaluations in between.
TIMES = ("time", "data_time")


class EventWriter:
    """Writes metrics of the current storage to a file, a terminal or elsewhere.

    Every rank has its own writers. A subclass only has to define :meth:`write`.

    Attributes:
        may_fail: whether the run continues if :meth:`write` or :meth:`close` fails, as it should
            for a service that may be temporarily unavailable.
    """

    may_fail = False

    def write(self) -> None:
        """Write the new values in ``get_event_storage()``."""
        raise NotImplementedError

    def rewind(self, iteration: int) -> None:
        """Forget the values recorded at or after ``iteration``.

        Called inside the run's storage when the run starts (at 0) or resumes.
        """

    def run_files(self) -> Iterable[AnyPath]:
        """The paths of the files to upload to a store with each checkpoint of the run."""
        return ()

    def close(self) -> None:
        """Release files and other resources, at the end of a run."""


class ScalarWriter(EventWriter):
    """Writes each value of a metric once, on the main process only.

    A subclass defines :meth:`write_scalars`.

    Args:
        name: the name, such as ``"tensorboard"``, which no other writer of the run may have.
        window_size: how many iterations to smooth over, if a metric's hint says so.

    Attributes:
        name: the name. A resumed run continues after the values that the writer of this name has
            written.
    """

    def __init__(self, name: str, window_size: int) -> None:
        self.name = name
        self._window_size = window_size

    def write(self) -> None:
        """Write the new values, which remain new if there is an error."""
        if comm.is_main_process():
            storage = get_event_storage()
            storage.add_writer(self.name, self)
            scalars = self.new_scalars(storage)
            self.write_scalars(storage, scalars)
            self.mark_written(storage)

    def write_scalars(self, storage: EventStorage, scalars: Metrics) -> None:
        """Write the metrics that :meth:`new_scalars` has found; there may be none."""
        raise NotImplementedError

    def new_scalars(self, storage: EventStorage) -> Metrics:
        """The new values, by iteration in increasing order, and by name.

        A smoothed metric has one value: its median, or for a time its mean. Results and other
        metrics have all their new values, but a training metric that is recorded in each iteration,
        like a learning rate, has only the last one.
        """
        found: Metrics = {}
        for name, history in storage.histories().items():
            new_count = history.count - history.written.get(self.name, 0)
            key = (new_count, self._window_size)
            if key not in history.shown:
                history.shown[key] = _new_entries(name, history, *key)
            for value, iteration in history.shown[key]:
                found.setdefault(iteration, {})[name] = value
        return dict(sorted(found.items()))

    def mark_written(self, storage: EventStorage) -> None:
        """Remember that all values are written."""
        for history in storage.histories().values():
            history.written[self.name] = history.count

    def rewind(self, iteration: int) -> None:
        """Continue after the last write before the storage was saved.

        Raises:
            ValueError: if another writer of this run has the name.
        """
        get_event_storage().add_writer(self.name, self)


def _new_entries(
    name: str, history: HistoryBuffer, new_count: int, window_size: int
) -> list[Entry]:
    if new_count > 0 and history.smoothing_hint:
        ((_, last),) = history.tail(1)
        smooth = history.avg if name in TIMES else history.median
        return [(smooth(window_size), last)]
    new = history.tail(new_count)
    if history.result:
        return new
    iterations = {iteration for _, iteration in new}
    return [entry for entry in new if entry[1] + 1 not in iterations]


class FunctionWriter(ScalarWriter):
    """Calls a function of an experiment tracker with the metrics, on the main process only.

    Example::

        wandb.init(project="points")
        FunctionWriter(wandb.log)
        FunctionWriter(mlflow.log_metrics)

    Values that the function refuses are passed to it again, in order, by the next write. They wait
    in the storage, and so in each checkpoint, up to 10,000 iterations with values. After a kill the
    function gets the values after the last checkpoint twice; docs/guide/trackers.md shows how a
    tracker keeps them once.

    Args:
        log: the function. It is called as ``log(metrics, step=iteration)``, with a dict of floats
            by name, for each iteration that has new values.
        window_size: how many iterations to smooth over, at least 1.
        name: the name of the writer; a second function of a run needs another one.
    """

    may_fail = True

    def __init__(
        self, log: Callable[..., Any], window_size: int = 20, name: str = "function"
    ) -> None:
        super().__init__(name, window_size)
        self._log = log

    def write_scalars(self, storage: EventStorage, scalars: Metrics) -> None:
        """Call the function for each iteration that waits, and for the new ones."""
        key = f"undelivered by {self.name}"
        rows = [*storage.info.get(key, []), *scalars.items()][-_MAX_UNDELIVERED:]
        storage.info[key] = rows
        self.mark_written(storage)
        while rows:
            iteration, metrics = rows[0]
            self._log(metrics, step=iteration)
            del rows[0]
