"""The values of one metric: the recent ones, and the mean of all."""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import islice, takewhile
from operator import add
from typing import Any

import torch


class HistoryBuffer:
    """Keeps the last values of a metric, and the mean of all its values.

    Adding a value takes constant time, and reading a window touches only that window. A window
    shows a NaN as long as it lies inside. The global average is that of the finite values, so that
    it recovers.

    Args:
        max_length: how many values to keep, at least 1; the oldest are dropped.

    Attributes:
        count: how many values were ever added.
        smoothing_hint: whether writers should show the median of the last iterations.
        pending: values that a storage has not added yet, some of them tensors on a device.
    """

    def __init__(self, max_length: int = 10_000) -> None:
        self._data: deque[tuple[float, int]] = deque(maxlen=max_length)
        self.smoothing_hint = True
        self.pending: list[tuple[Any, int]] = []
        self.count = self._finite_count = 0
        self._finite_sum = 0.0

    def update(self, value: float, iteration: int | None = None) -> None:
        """Add a value.

        Args:
            value: the value.
            iteration: when it was measured. None means the number of values before it.
        """
        self.extend([(value, self.count if iteration is None else iteration)])

    def extend(self, entries: Sequence[tuple[float, int]]) -> None:
        """Add pairs (value, iteration), in order."""
        self._data.extend(entries)
        self.count += len(entries)
        finite = [value for value, _ in entries if math.isfinite(value)]
        self._finite_count += len(finite)
        self._finite_sum = reduce(add, finite, self._finite_sum)

    def latest(self) -> float:
        """The value that was added last.

        Raises:
            IndexError: if there is none.
        """
        return self._data[-1][0]

    def median(self, window_size: int) -> float:
        """The median of the last ``window_size`` values, or of all if fewer; NaN if one is."""
        return _median([value for value, _ in self.tail(window_size)])

    def avg(self, window_size: int) -> float:
        """The mean of the last ``window_size`` values, or of all if there are fewer."""
        values = [value for value, _ in self.tail(window_size)]
        return sum(values) / len(values)

    def global_avg(self) -> float:
        """The mean of all finite values ever added, also those dropped since; NaN without any."""
        return self._finite_sum / self._finite_count if self._finite_count else math.nan

    def values(self) -> list[tuple[float, int]]:
        """All values that are kept, as pairs (value, iteration), the oldest first."""
        return list(self._data)

    def tail(self, window_size: int) -> list[tuple[float, int]]:
        """The last ``window_size`` pairs (value, iteration), the oldest first."""
        return list(islice(reversed(self._data), window_size))[::-1]

    def since(self, iteration: int) -> list[tuple[float, int]]:
        """The pairs (value, iteration) from ``iteration`` on, the oldest first.

        Looks back from the last pair up to the first that is older.
        """
        return list(takewhile(lambda pair: pair[1] >= iteration, reversed(self._data)))[::-1]

    def recent(self, window_size: int) -> list[float]:
        """The last values that belong to the ``window_size`` iterations up to the latest.

        The newest comes first. Empty if there are no values.
        """
        last = self._data[-1][1] if self._data else 0
        first = last - window_size
        entries = takewhile(lambda pair: first < pair[1] <= last, reversed(self._data))
        return [value for value, _ in entries]

    def recent_median(self, window_size: int) -> float:
        """The median of :meth:`recent`; NaN if one of the values is."""
        return _median(self.recent(window_size))

    def __len__(self) -> int:
        return len(self._data)

    def state_dict(self) -> dict[str, Any]:
        """The last 1000 values, and what the global average needs.

        Returns:
            ``values`` (float64) and ``iterations`` (int64), tensors of one dimension, and plain
            numbers.
        """
        entries = list(self._data)[-1000:]
        return {
            "values": torch.tensor([value for value, _ in entries], dtype=torch.float64),
            "iterations": torch.tensor([i for _, i in entries], dtype=torch.int64),
            "smoothing_hint": self.smoothing_hint,
            "count": self.count,
            "non_finite_count": self.count - self._finite_count,
            "finite_sum": self._finite_sum,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace everything by what :meth:`state_dict` returned."""
        values, iterations = state_dict["values"].tolist(), state_dict["iterations"].tolist()
        self.pending.clear()
        self._data.clear()
        self._data.extend(zip(values, iterations, strict=True))
        self.smoothing_hint = state_dict["smoothing_hint"]
        self.count = state_dict["count"]
        self._finite_count = self.count - state_dict["non_finite_count"]
        self._finite_sum = state_dict["finite_sum"]


def _median(values: list[float]) -> float:
    # The sum of values with a NaN is one; that of infinities may be, so look again.
    has_nan = math.isnan(sum(values)) and any(map(math.isnan, values))
    return math.nan if has_nan else statistics.median(values)
