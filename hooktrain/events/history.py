"""The values of one metric."""

import re
import statistics
from collections import deque
from collections.abc import Sequence
from itertools import islice, takewhile
from math import isfinite, isnan, nan
from typing import Any

import torch

from hooktrain.utils.names import State

Entry = tuple[float, int]  # a value and its iteration

# A metric with one of these words in its name is a measurement of the machine.
OF_THE_MACHINE = re.compile(
    "(?<![a-z])(times?|seconds?|secs?|s|ms|speed|fps|latency|throughput|mem|memory|mfu|util)"
    "(?![a-z])",
    re.IGNORECASE,
)

_MAX_SAVED = 1000  # values of a metric in a checkpoint
# The attributes that a checkpoint holds as they are.
_SAVED = (
    "smoothing_hint",
    "reproducible",
    "result",
    "count",
    "non_finite_count",
    "finite_sum",
)


class HistoryBuffer:
    """The last values of a metric, and the mean of all its values.

    A window is a number of iterations, ending with that of the last value. Its median and mean are
    NaN while one of its values is NaN. The global average includes only the finite values, so one
    NaN does not spoil it forever.

    Args:
        max_length: how many values to keep, at least 1. The oldest are dropped.
        result: the name that evaluations give these results; "" for a training metric.

    Attributes:
        count: the number of values that were ever added.
        non_finite_count: the number of them that were infinite or NaN.
        finite_sum: the sum of the finite values.
        smoothing_hint: whether writers should show the median of the last iterations.
        reproducible: whether a resumed run computes the same values again.
        result: the argument. Writers show every value of a result.
        pending: pairs (value, iteration) that the storage has not added yet. Some of the values
            may be tensors on a device.
        written: how many values each writer has written, by the names of the writers.
        shown: a cache for all writers, which the next value clears: the entries to write, by the
            number of new values and the size of the window.
    """

    def __init__(self, max_length: int = 10_000, result: str = "") -> None:
        self._data: deque[Entry] = deque(maxlen=max_length)
        self.smoothing_hint = not result
        self.reproducible = True
        self.result = result
        self.pending: list[tuple[Any, int]] = []
        self.count = 0
        self.non_finite_count = 0
        self.finite_sum = 0.0
        self.written: dict[str, int] = {}
        self.shown: dict[tuple[int, int], list[Entry]] = {}

    def update(self, value: float, iteration: int | None = None) -> None:
        """Add a value.

        Args:
            value: the value.
            iteration: the iteration of the value. None takes the number of values before it.
        """
        if iteration is None:
            iteration = self.count
        self.extend([(value, iteration)])

    def extend(self, entries: Sequence[Entry]) -> None:
        """Add pairs (value, iteration), in order."""
        self._data.extend(entries)
        self.shown.clear()
        self.count += len(entries)
        total = self.finite_sum
        for value, _ in entries:
            if isfinite(value):
                total += value
            else:
                self.non_finite_count += 1
        self.finite_sum = total

    def latest(self) -> float:
        """The value that was added last.

        Raises:
            IndexError: if there is none.
        """
        return self._data[-1][0]

    def recent(self, window_size: int) -> list[float]:
        """The values of a window."""
        _, last = self._data[-1]
        first = last - window_size + 1
        return [value for value, _ in self.since(first)]

    def median(self, window_size: int) -> float:
        """The median of a window; NaN if one of its values is NaN."""
        values = self.recent(window_size)
        return nan if any(map(isnan, values)) else statistics.median(values)

    def avg(self, window_size: int) -> float:
        """The mean of a window."""
        values = self.recent(window_size)
        return sum(values) / len(values)

    def global_avg(self) -> float:
        """The mean of all finite values ever added; NaN if there are none."""
        finite_count = self.count - self.non_finite_count
        return self.finite_sum / finite_count if finite_count else nan

    def values(self) -> list[Entry]:
        """The values that are kept, as pairs (value, iteration), the oldest first."""
        return list(self._data)

    def tail(self, count: int) -> list[Entry]:
        """The last ``count`` pairs (value, iteration), the oldest first."""
        return [*islice(reversed(self._data), count)][::-1]

    def since(self, iteration: int) -> list[Entry]:
        """The pairs (value, iteration) after the last one from before ``iteration``."""
        newest_first = takewhile(lambda e: e[1] >= iteration, reversed(self._data))
        return [*newest_first][::-1]

    def state_dict(self) -> State:
        """The last 1000 values, and the count and sum of the global average.

        Returns:
            ``values`` (float64) and ``iterations`` (int64) are tensors of one dimension,
            ``written`` is a dict, the other items are plain numbers.
        """
        values, iterations = zip(*self.tail(_MAX_SAVED), strict=True)
        return {
            "values": torch.tensor(values, dtype=torch.float64),
            "iterations": torch.tensor(iterations, dtype=torch.int64),
            "written": dict(self.written),
            **{name: getattr(self, name) for name in _SAVED},
        }

    def load_state_dict(self, state_dict: State) -> None:
        """Replace all values by those that :meth:`state_dict` returned."""
        values = state_dict["values"].tolist()
        iterations = state_dict["iterations"].tolist()
        self.pending.clear()
        self.shown.clear()
        entries = zip(values, iterations, strict=True)
        self._data = deque(entries, self._data.maxlen)
        self.written = dict(state_dict.get("written", {}))
        for name in _SAVED:  # earlier revisions lack some of them
            setattr(self, name, state_dict.get(name, getattr(self, name)))
