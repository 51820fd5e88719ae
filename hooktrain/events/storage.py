"""Where the metrics of a run live."""

import math
import statistics
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from numbers import Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hooktrain.utils.names import did_you_mean

Array = Tensor | NDArray[Any]
Scalar = float | np.generic | Array  # with one element
Entry = tuple[float, int]  # a value and its iteration
Image = tuple[str, Tensor, int]  # a name, an image on the CPU, its iteration

_MAX_PENDING = 4096  # values of a metric that wait to be fetched
_MAX_QUEUED = 64  # images or histograms that wait for a writer
_MAX_SAVED = 1000  # values of a metric in a checkpoint


class HistoryBuffer:
    """The last values of a metric, and the mean of all its values.

    A window shows a NaN as long as it lies inside. The global average is that of the
    finite values, so that it recovers.

    Args:
        max_length: how many values to keep, at least 1; the oldest are dropped.

    Attributes:
        count: how many values were ever added.
        smoothing_hint: whether writers should show the median of the last iterations.
        pending: values that the storage has put here and not added yet. Some of them
            may be tensors on a device.
    """

    def __init__(self, max_length: int = 10_000) -> None:
        self._data: deque[Entry] = deque(maxlen=max_length)
        self.smoothing_hint = True
        self.pending: list[tuple[Any, int]] = []
        self.count = 0
        self._finite_count = 0
        self._finite_sum = 0.0

    def update(self, value: float, iteration: int | None = None) -> None:
        """Add a value.

        Args:
            value: the value.
            iteration: when it was measured. None means the number of values before it.
        """
        if iteration is None:
            iteration = self.count
        self.extend([(value, iteration)])

    def extend(self, entries: Sequence[Entry]) -> None:
        """Add pairs (value, iteration), in order."""
        self._data.extend(entries)
        self.count += len(entries)
        for value, _ in entries:
            if math.isfinite(value):
                self._finite_count += 1
                self._finite_sum += value

    def latest(self) -> float:
        """The value that was added last.

        Raises:
            IndexError: if there is none.
        """
        return self._data[-1][0]

    def median(self, window_size: int) -> float:
        """The median of the last ``window_size`` values; NaN if one of them is."""
        values = [value for value, _ in self.tail(window_size)]
        return _median(values)

    def avg(self, window_size: int) -> float:
        """The mean of the last ``window_size`` values."""
        values = [value for value, _ in self.tail(window_size)]
        return sum(values) / len(values)

    def global_avg(self) -> float:
        """The mean of all finite values ever added; NaN if there are none."""
        if self._finite_count == 0:
            return math.nan
        return self._finite_sum / self._finite_count

    def values(self) -> list[Entry]:
        """All values that are kept, as pairs (value, iteration), the oldest first."""
        return list(self._data)

    def tail(self, window_size: int) -> list[Entry]:
        """The last ``window_size`` pairs (value, iteration), the oldest first."""
        newest_first = islice(reversed(self._data), window_size)
        return list(newest_first)[::-1]

    def since(self, iteration: int) -> list[Entry]:
        """The pairs (value, iteration) after the last one older than ``iteration``."""
        newest_first = []
        for entry in reversed(self._data):
            if entry[1] < iteration:
                break
            newest_first.append(entry)
        return newest_first[::-1]

    def recent(self, window_size: int) -> list[float]:
        """The values of the last ``window_size`` iterations, up to the last value."""
        _, last = self._data[-1]
        return [value for value, _ in self.since(last - window_size + 1)]

    def recent_median(self, window_size: int) -> float:
        """The median of :meth:`recent`; NaN if one of the values is."""
        return _median(self.recent(window_size))

    def __len__(self) -> int:
        return len(self._data)

    def state_dict(self) -> dict[str, Any]:
        """The last 1000 values, and what the global average needs.

        Returns:
            ``values`` (float64) and ``iterations`` (int64), tensors of one dimension,
            and plain numbers.
        """
        values = []
        iterations = []
        for value, iteration in self.tail(_MAX_SAVED):
            values.append(value)
            iterations.append(iteration)
        return {
            "values": torch.tensor(values, dtype=torch.float64),
            "iterations": torch.tensor(iterations, dtype=torch.int64),
            "smoothing_hint": self.smoothing_hint,
            "count": self.count,
            "non_finite_count": self.count - self._finite_count,
            "finite_sum": self._finite_sum,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace everything by what :meth:`state_dict` returned."""
        values = state_dict["values"].tolist()
        iterations = state_dict["iterations"].tolist()
        self.pending.clear()
        self._data.clear()
        self._data.extend(zip(values, iterations, strict=True))
        self.smoothing_hint = state_dict["smoothing_hint"]
        self.count = state_dict["count"]
        self._finite_count = self.count - state_dict["non_finite_count"]
        self._finite_sum = state_dict["finite_sum"]


def _median(values: list[float]) -> float:
    if any(map(math.isnan, values)):
        return math.nan
    return statistics.median(values)


# A thread or task sees the storages that it has entered itself, the innermost last.
_Stack = tuple["EventStorage", ...]
_entered: ContextVar[_Stack] = ContextVar("_entered", default=())


def get_event_storage() -> "EventStorage":
    """The storage of the innermost ``with storage:`` block around the caller.

    Raises:
        RuntimeError: if there is none.
    """
    entered = _entered.get()
    if not entered:
        raise RuntimeError(
            "there is no current EventStorage in this thread: call this inside of "
            "train() or of 'with EventStorage(start_iter):'"
        )
    return entered[-1]


def has_event_storage() -> bool:
    """Whether the caller is inside a ``with storage:`` block."""
    return bool(_entered.get())


class EventStorage:
    """Collects the metrics of a run, by name and iteration.

    Putting never waits for a device. A tensor on a device is copied there, and all
    copies are fetched in one transfer when somebody reads, or when 4096 values of a
    metric wait. So read once in a while, not at each iteration.

    Example::

        with EventStorage(start_iter) as storage:
            for storage.iter in range(start_iter, max_iter):
                storage.put_scalar("total_loss", loss)

    Args:
        start_iter: the iteration to begin with.

    Attributes:
        iter: the current iteration, with which metrics are stamped.
        written: how far each writer has written, by its name; a part of the state.
    """

    def __init__(self, start_iter: int = 0) -> None:
        self.iter = int(start_iter)
        self.written: dict[str, int] = {}
        self._current_prefix = ""
        self._histories: dict[str, HistoryBuffer] = {}
        self._vis_data: deque[Image] = deque(maxlen=_MAX_QUEUED)
        self._histograms: deque[dict[str, Any]] = deque(maxlen=_MAX_QUEUED)

    def put_scalar(
        self,
        name: str,
        value: Scalar,
        smoothing_hint: bool = True,
        cur_iter: int | None = None,
    ) -> None:
        """Record a value of a metric.

        Args:
            name: the metric; the current :meth:`name_scope` is put before it.
            value: a number, or a tensor with one element, on any device.
            smoothing_hint: whether writers should show the median of the last
                iterations (right for a noisy loss) or each value (right for a learning
                rate or an evaluation). The same at each call for a metric.
            cur_iter: when it was measured; None means the current iteration.

        Raises:
            TypeError: if ``value`` is not one real number.
            ValueError: for another ``smoothing_hint`` than before.
        """
        if type(value) is not float:
            value = _read_scalar(name, value)
        name = self._current_prefix + name
        history = self._histories.get(name)
        if history is None:
            history = self._histories[name] = HistoryBuffer()
            history.smoothing_hint = bool(smoothing_hint)
        elif history.smoothing_hint != smoothing_hint:
            hint = f"smoothing_hint={history.smoothing_hint}"
            raise ValueError(
                f"metric {name!r} was put with {hint} before, not {smoothing_hint!r}"
            )
        # Numbers wait as well: adding them all at once takes less time.
        if cur_iter is None:
            cur_iter = self.iter
        history.pending.append((value, cur_iter))
        if len(history.pending) >= _MAX_PENDING:
            self._fetch_pending()

    def put_scalars(
        self,
        *,
        smoothing_hint: bool = True,
        cur_iter: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Record several metrics, ``name=value``; see :meth:`put_scalar`."""
        for name, value in kwargs.items():
            self.put_scalar(name, value, smoothing_hint, cur_iter)

    def put_image(self, img_name: str, img_tensor: Array) -> None:
        """Queue a copy of an image for the writers. Waits for the image's device.

        Args:
            img_name: its name; the current :meth:`name_scope` is put before it.
            img_tensor: of shape (channels, height, width), with 1 or 3 channels; uint8
                in 0..255, or floating point in 0..1.

        Raises:
            ValueError: for another shape.
        """
        name = self._current_prefix + img_name
        image = torch.as_tensor(img_tensor).detach()
        channels = image.shape[0] if image.dim() == 3 else 0
        if channels not in (1, 3):
            raise ValueError(
                f"image {name!r} must have the shape (channels, height, width) with 1 "
                f"or 3 channels, but has {tuple(image.shape)}"
            )
        image = image.to("cpu", copy=True)  # host-device synchronisation
        _queue(self._vis_data, (name, image, self.iter))

    def put_histogram(
        self,
        hist_name: str,
        hist_tensor: Array,
        bins: int = 1000,
    ) -> None:
        """Queue a histogram for the writers. Waits for the tensor's device.

        Args:
            hist_name: its name; the current :meth:`name_scope` is put before it.
            hist_tensor: all its elements are counted, whatever its shape.
            bins: the number of intervals of equal width between the extremes.

        Raises:
            ValueError: if there is no element or one that is not finite, or for
                ``bins`` below 1.
        """
        tensor = torch.as_tensor(hist_tensor).detach()
        values = tensor.cpu().double().numpy()  # host-device synchronisation
        counts, edges = np.histogram(values, bins)
        histogram = {  # the arguments of SummaryWriter.add_histogram_raw
            "tag": self._current_prefix + hist_name,
            "min": float(values.min()),
            "max": float(values.max()),
            "num": int(values.size),
            "sum": float(values.sum()),
            "sum_squares": float(np.square(values).sum()),
            "bucket_limits": edges[1:].tolist(),
            "bucket_counts": counts.tolist(),
            "global_step": self.iter,
        }
        _queue(self._histograms, histogram)

    def history(self, name: str) -> HistoryBuffer:
        """The values of one metric.

        Raises:
            KeyError: if there is no such metric.
        """
        self._fetch_pending()
        if name not in self._histories:
            hint = did_you_mean(name, self._histories)
            raise KeyError(f"there is no metric {name!r}{hint}")
        return self._histories[name]

    def histories(self) -> dict[str, HistoryBuffer]:
        """The values of all metrics by name, in the order of their first appearance."""
        self._fetch_pending()
        return dict(self._histories)

    def latest(self) -> dict[str, Entry]:
        """The last value of each metric and its iteration, by name."""
        histories = self.histories()
        return {name: history.tail(1)[0] for name, history in histories.items()}

    # detectron2's names of what is in it, which many projects read.
    _history = property(histories)
    _latest_scalars = property(latest)

    def latest_iter(self, name: str) -> int | None:
        """The iteration of a metric's last value, or None. Needs no transfer."""
        history = self._histories.get(name)
        if history is None:
            return None
        entries = history.pending or history.tail(1)
        return entries[-1][1]

    def latest_with_smoothing_hint(self, window_size: int = 20) -> dict[str, Entry]:
        """As :meth:`latest`, with the median of the last iterations where hinted."""
        latest = self.latest()
        for name, (_, iteration) in latest.items():
            history = self._histories[name]
            if history.smoothing_hint:
                median = history.recent_median(window_size)
                latest[name] = (median, iteration)
        return latest

    def count_samples(self, name: str, window_size: int = 20) -> int:
        """The number of values in the last ``window_size`` iterations of a metric.

        Raises:
            KeyError: if there is no such metric.
        """
        return len(self.history(name).recent(window_size))

    def smoothing_hints(self) -> dict[str, bool]:
        """The hint that each metric was put with, by name."""
        return {name: h.smoothing_hint for name, h in self._histories.items()}

    def images(self) -> list[Image]:
        """The queued images as (name, tensor on the CPU, iteration), the oldest first."""
        return list(self._vis_data)

    def histograms(self) -> list[dict[str, Any]]:
        """The queued histograms: arguments of ``SummaryWriter.add_histogram_raw``."""
        return list(self._histograms)

    def clear_images(self) -> None:
        """Forget the queued images. The writer that has shown them calls this."""
        self._vis_data.clear()

    def clear_histograms(self) -> None:
        """Forget the queued histograms. The writer that has shown them calls this."""
        self._histograms.clear()

    def step(self) -> None:
        """Go on to the next iteration."""
        self.iter += 1

    @property
    def iteration(self) -> int:
        """The current iteration; another name of ``iter``."""
        return self.iter

    @contextmanager
    def name_scope(self, name: str) -> Iterator[None]:
        """Put ``name/`` before the names of what is put inside the block."""
        outer = self._current_prefix
        self._current_prefix = f"{outer}{name.rstrip('/')}/"
        try:
            yield
        finally:
            self._current_prefix = outer

    def __enter__(self) -> "EventStorage":
        _entered.set((*_entered.get(), self))
        return self

    def __exit__(self, *exc_info: object) -> None:
        *outer, innermost = _entered.get()
        assert innermost is self, "the storage that was entered last is left first"
        _entered.set(tuple(outer))

    def state_dict(self) -> dict[str, Any]:
        """The iteration and the last 1000 values of each metric.

        It has tensors and plain types only. Images and histograms are not in it.
        """
        histories = self.histories()
        metrics = {name: h.state_dict() for name, h in histories.items()}
        return {
            "iteration": self.iter,
            "metrics": metrics,
            "written": dict(self.written),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace the iteration and all metrics by what :meth:`state_dict` gave."""
        histories = {}
        for name, state in state_dict["metrics"].items():
            history = HistoryBuffer()
            history.load_state_dict(state)
            histories[name] = history
        self.iter = state_dict["iteration"]
        self.written = dict(state_dict.get("written", {}))
        self._histories = histories

    def _fetch_pending(self) -> None:
        """Add what is waiting to the histories, the tensors in one transfer."""
        histories = self._histories.values()
        tensors = []
        for history in histories:
            for value, _ in history.pending:
                if type(value) is not float:
                    tensors.append(value)
        fetched = iter(_to_floats(tensors))
        for history in histories:
            entries = []
            for value, iteration in history.pending:
                if type(value) is not float:
                    value = next(fetched)
                entries.append((value, iteration))
            history.pending.clear()
            history.extend(entries)


def _read_scalar(name: str, value: Scalar) -> float | Tensor:
    """The value as a float; of a tensor on a device, a private copy there."""
    if isinstance(value, Real | np.bool_):
        return float(value)
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if not isinstance(value, Tensor) or value.is_complex() or value.numel() != 1:
        raise TypeError(f"metric {name!r} must be one real number, but is {value!r}")
    if value.is_cpu:
        return float(value.item())
    # Double holds all that the other types do; MPS does not have it. The copy is queued
    # on the device: the host does not wait, and a later write changes nothing.
    dtype = torch.float32 if value.is_mps else torch.float64
    scalar = value.detach().reshape(())
    return scalar.to(dtype, copy=True)


def _to_floats(tensors: list[Tensor]) -> list[float]:
    if not tensors:
        return []
    device = tensors[0].device
    together = torch.stack([tensor.to(device) for tensor in tensors])
    floats: list[float] = together.tolist()  # host-device synchronisation
    return floats


def _queue(queue: deque[Any], item: Any) -> None:
    if len(queue) == queue.maxlen:
        warnings.warn(
            f"more than {_MAX_QUEUED} images or histograms wait for a writer, such as "
            "TensorboardXWriter: the oldest are dropped",
            stacklevel=3,
        )
    queue.append(item)
