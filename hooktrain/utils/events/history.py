"""The values of one metric: the recent ones, and the mean of all."""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice, takewhile
from math import isfinite
from typing import Any

import torch

__all__ = ["HistoryBuffer"]


class HistoryBuffer:
    """Keeps the last values of a metric, and the mean of all that it ever had.

    Adding a value takes constant time, and reading a window touches that window only. A window
    shows a NaN as long as it lies inside. The global average is that of the finite values, so that
    it recovers.

    Args:
        max_length: how many values to keep, at least 1; the oldest are dropped.

    Raises:
        ValueError: for a ``max_length`` below 1.
    """

    __slots__ = ("_count", "_entries", "_finite_sum", "_non_finite_count")

    def __init__(self, max_length: int = 10_000) -> None:
        if max_length < 1:
            raise ValueError(f"max_length must be at least 1, but got {max_length!r}")
        self._entries: deque[tuple[float, int]] = deque(maxlen=max_length)
        self._count = 0
        self._non_finite_count = 0
        self._finite_sum = 0.0

    def update(self, value: float, iteration: int | None = None) -> None:
        """Add a value.

        Args:
            value: the value.
            iteration: when it was measured. None means the number of values before it.
        """
        self.extend([(value, self._count if iteration is None else iteration)])

    def extend(self, entries: Iterable[tuple[float, int]]) -> None:
        """Add pairs (value, iteration), in order."""
        append, count, finite_sum = self._entries.append, self._count, self._finite_sum
        for entry in entries:
            append(entry)
            count += 1
            if isfinite(entry[0]):
                finite_sum += entry[0]
            else:
                self._non_finite_count += 1
        self._count, self._finite_sum = count, finite_sum

    def latest(self) -> float:
        """The value that was added last.

        Raises:
            ValueError: if there is none, as in all that reads values.
        """
        return self.latest_entry()[0]

    def latest_entry(self) -> tuple[float, int]:
        """The pair (value, iteration) that was added last."""
        if not self._entries:
            raise ValueError("this history has no values yet")
        return self._entries[-1]

    def median(self, window_size: int) -> float:
        """The median of the last ``window_size`` values (or of all, if fewer); NaN if one is."""
        return _median(self._window(window_size))

    def avg(self, window_size: int) -> float:
        """The mean of the last ``window_size`` values, or of all, if there are fewer."""
        values = self._window(window_size)
        return sum(values) / len(values)

    def global_avg(self) -> float:
        """The mean of all finite values ever added, also those dropped since; NaN without any."""
        self._window(1)
        finite_count = self._count - self._non_finite_count
        return self._finite_sum / finite_count if finite_count else math.nan

    def values(self) -> list[tuple[float, int]]:
        """All values that are kept, as pairs (value, iteration), the oldest first."""
        return list(self._entries)

    def tail(self, window_size: int) -> list[tuple[float, int]]:
        """The last ``window_size`` pairs (value, iteration), the oldest first.

        Raises:
            ValueError: for a ``window_size`` below 1.
        """
        if window_size < 1:
            raise ValueError(f"window_size must be at least 1, but got {window_size!r}")
        return list(islice(reversed(self._entries), window_size))[::-1]

    def since(self, iteration: int) -> list[tuple[float, int]]:
        """The pairs (value, iteration) from ``iteration`` on, the oldest first.

        Looks back from the last pair up to the first that is older.
        """
        return list(takewhile(lambda pair: pair[1] >= iteration, reversed(self._entries)))[::-1]

    def recent(self, window_size: int) -> list[float]:
        """The last values that belong to the ``window_size`` iterations up to the latest.

        The newest comes first. Empty if there are no values.

        Raises:
            ValueError: for a ``window_size`` below 1.
        """
        if window_size < 1:
            raise ValueError(f"window_size must be at least 1, but got {window_size!r}")
        last = self._entries[-1][1] if self._entries else 0
        first = last - window_size
        values = []
        for value, iteration in reversed(self._entries):
            if not first < iteration <= last:
                break
            values.append(value)
        return values

    def recent_median(self, window_size: int) -> float:
        """The median of :meth:`recent`; NaN if one of the values is."""
        return _median(self.recent(window_size))

    def __len__(self) -> int:
        return len(self._entries)

    def state_dict(self, tail: int = 1000) -> dict[str, Any]:
        """The last ``tail`` values, and what the global average needs.

        Returns:
            ``values`` (float64) and ``iterations`` (int64), tensors of one dimension; plain numbers
            besides.
        """
        values, iterations = zip(*self.tail(tail), strict=True) if self._entries else ((), ())
        return {
            "values": torch.tensor(values, dtype=torch.float64),
            "iterations": torch.tensor(iterations, dtype=torch.int64),
            "count": self._count,
            "non_finite_count": self._non_finite_count,
            "finite_sum": self._finite_sum,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace everything by what :meth:`state_dict` gave."""
        values, iterations = state_dict["values"].tolist(), state_dict["iterations"].tolist()
        self._entries.clear()
        self._entries.extend(zip(values, iterations, strict=True))
        self._count = state_dict["count"]
        self._non_finite_count = state_dict["non_finite_count"]
        self._finite_sum = state_dict["finite_sum"]

    def _window(self, window_size: int) -> list[float]:
        values = [value for value, _ in self.tail(window_size)]
        if not values:
            raise ValueError("this history has no values yet")
        return values


def _median(values: list[float]) -> float:
    # The sum of values with a NaN is one; that of infinities may be, hence the second look.
    if math.isnan(sum(values)) and any(map(math.isnan, values)):
        return math.nan
    values.sort()
    middle = len(values) // 2
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2
