"""The values of one metric."""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from math import isfinite, isnan, nan
from typing import Any

import torch

Entry = tuple[float, int]  # a value and its iteration

_MAX_SAVED = 1000  # values of a metric in a checkpoint


class HistoryBuffer:
    """The last values of a metric, and the mean of all its values.

    The median and the mean of a window are NaN while one of its values is NaN. The global average
    is that of the finite values only, so one NaN does not spoil it for good.

    Args:
        max_length: how many values to keep, at least 1. The oldest are dropped.

    Attributes:
        count: how many values were ever added.
        smoothing_hint: whether writers should show the median of the last iterations.
        is_result: whether these are results of evaluations, of which writers show each.
        pending: pairs (value, iteration) that the storage has not added yet. Some of the values
            may be tensors on a device.
        written: by the name of a writer, how many values it has written.
        shown: the entries that writers show of the newest values, computed once for all writers.
            The next value clears it.
    """

    def __init__(self, max_length: int = 10_000) -> None:
        self._data: deque[Entry] = deque(maxlen=max_length)
        self.smoothing_hint = True
        self.is_result = False
        self.pending: list[tuple[Any, int]] = []
        self.count = 0
        self._finite_count = 0
        self._finite_sum = 0.0
        self.written: dict[str, int] = {}
        self.shown: dict[tuple[int, int], list[Entry]] = {}

    def update(self, value: float, iteration: int | None = None) -> None:
        """Add a value.

        Args:
            value: the value.
            iteration: when it was measured. None is the number of values before it.
        """
        if iteration is None:
            iteration = self.count
        self.extend([(value, iteration)])

    def extend(self, entries: Sequence[Entry]) -> None:
        """Add pairs (value, iteration), in order."""
        self._data.extend(entries)
        self.shown.clear()
        self.count += len(entries)
        count = self._finite_count
        total = self._finite_sum
        for value, _ in entries:
            if isfinite(value):
                count += 1
                total += value
        self._finite_count = count
        self._finite_sum = total

    def latest(self) -> float:
        """The value that was added last.

        Raises:
            IndexError: if there is none.
        """
        return self._data[-1][0]

    def median(self, window_size: int) -> float:
        """The median of the last ``window_size`` values; NaN if one of them is NaN."""
        return median(_values(self.tail(window_size)))

    def avg(self, window_size: int) -> float:
        """The mean of the last ``window_size`` values."""
        return mean(_values(self.tail(window_size)))

    def global_avg(self) -> float:
        """The mean of all finite values ever added; NaN if there are none."""
        if self._finite_count == 0:
            return nan
        return self._finite_sum / self._finite_count

    def values(self) -> list[Entry]:
        """The values that are kept, as pairs (value, iteration), the oldest first."""
        return list(self._data)

    def tail(self, window_size: int) -> list[Entry]:
        """The last ``window_size`` pairs (value, iteration), the oldest first."""
        newest = list(islice(reversed(self._data), window_size))
        newest.reverse()
        return newest

    def since(self, iteration: int) -> list[Entry]:
        """The newest pairs (value, iteration), back to the last one before ``iteration``."""
        newest_first = []
        for entry in reversed(self._data):
            if entry[1] < iteration:
                break
            newest_first.append(entry)
        return newest_first[::-1]

    def recent(self, window_size: int) -> list[float]:
        """The values of the ``window_size`` iterations that end with the last value's."""
        _, last = self._data[-1]
        entries = self.since(last - window_size + 1)
        return _values(entries)

    def state_dict(self) -> dict[str, Any]:
        """The last 1000 values, and the count and sum of the global average.

        Returns:
            ``values`` (float64) and ``iterations`` (int64) are tensors of one dimension,
            ``written`` is a dict, the other items are plain numbers.
        """
        entries = self.tail(_MAX_SAVED)
        iterations = [iteration for _, iteration in entries]
        return {
            "values": torch.tensor(_values(entries), dtype=torch.float64),
            "iterations": torch.tensor(iterations, dtype=torch.int64),
            "smoothing_hint": self.smoothing_hint,
            "count": self.count,
            "non_finite_count": self.count - self._finite_count,
            "finite_sum": self._finite_sum,
            "written": dict(self.written),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace all values by those that :meth:`state_dict` returned."""
        values = state_dict["values"].tolist()
        iterations = state_dict["iterations"].tolist()
        self.pending.clear()
        self.shown.clear()
        entries = zip(values, iterations, strict=True)
        self._data = deque(entries, self._data.maxlen)
        self.smoothing_hint = state_dict["smoothing_hint"]
        self.count = state_dict["count"]
        self._finite_count = self.count - state_dict["non_finite_count"]
        self._finite_sum = state_dict["finite_sum"]
        self.written = dict(state_dict.get("written", {}))


def _values(entries: Sequence[Entry]) -> list[float]:
    return [value for value, _ in entries]


def mean(values: Sequence[float]) -> float:
    """The mean of some values."""
    return sum(values) / len(values)


def median(values: Sequence[float]) -> float:
    """The median of some values; NaN if one of them is NaN."""
    if any(map(isnan, values)):
        return nan
    return statistics.median(values)
