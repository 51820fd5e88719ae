"""Where the metrics of a run live."""

import logging
import math
import statistics
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import reduce
from itertools import islice, takewhile
from operator import add
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hooktrain.utils.file_io import AnyPath, atomic_write
from hooktrain.utils.names import did_you_mean


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
        return list(takewhile(lambda pair: pair[1] >= iteration, reversed(self._data)))[
            ::-1
        ]

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
            "values": torch.tensor(
                [value for value, _ in entries], dtype=torch.float64
            ),
            "iterations": torch.tensor([i for _, i in entries], dtype=torch.int64),
            "smoothing_hint": self.smoothing_hint,
            "count": self.count,
            "non_finite_count": self.count - self._finite_count,
            "finite_sum": self._finite_sum,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace everything by what :meth:`state_dict` returned."""
        values, iterations = (
            state_dict["values"].tolist(),
            state_dict["iterations"].tolist(),
        )
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


Array = Tensor | NDArray[Any]


def read_image(name: str, image: Array) -> Array:
    """A private copy of an image on the host, array or tensor; see ``EventStorage.put_image``."""
    tensor = torch.as_tensor(image).detach()
    can_be_shown = tensor.dtype == torch.uint8 or tensor.is_floating_point()
    if (
        not can_be_shown
        or tensor.dim() != 3
        or tensor.shape[0] not in (1, 3)
        or not tensor.numel()
    ):
        raise ValueError(
            f"image {name!r} must be uint8 (0..255) or floating point (0..1), of shape (channels, "
            f"height, width) with 1 or 3 channels, but is {tensor.dtype}, {tuple(tensor.shape)}"
        )
    copy = tensor.to(
        "cpu", copy=True
    )  # host-device synchronisation, if it is on a device
    return copy if isinstance(image, Tensor) else copy.numpy()


def make_histogram(
    name: str, values: Array, bins: int, iteration: int
) -> dict[str, Any]:
    """The arguments of ``SummaryWriter.add_histogram_raw``; see ``EventStorage.put_histogram``."""
    # Host-device synchronisation, if the values are on a device.
    array = torch.as_tensor(values).detach().cpu().double().numpy()
    counts, edges = np.histogram(array, bins)  # refuses values that are not finite
    return {
        "tag": name,
        "min": float(array.min()),
        "max": float(array.max()),
        "num": int(array.size),
        "sum": float(array.sum()),
        "sum_squares": float(np.square(array).sum()),
        "bucket_limits": edges[1:].tolist(),
        "bucket_counts": counts.tolist(),
        "global_step": iteration,
    }


def to_pixels(image: Array) -> NDArray[np.uint8]:
    """An image of :func:`read_image`'s kind as uint8 (height, width, channels), values clipped."""
    tensor = torch.as_tensor(image).detach()
    if tensor.is_floating_point():
        tensor = (tensor.clamp(0, 1) * 255).round().to(torch.uint8)
    pixels: NDArray[np.uint8] = tensor.permute(1, 2, 0).cpu().numpy()
    return pixels


def write_png(path: AnyPath, image: Array) -> None:
    """Write an image as a PNG file, all at once and durably.

    Args:
        path: the file; its folder must exist.
        image: as ``EventStorage.put_image`` takes it, on any device.

    Raises:
        OSError: if the file cannot be written.
    """
    pixels = to_pixels(image)
    height, width, channels = pixels.shape
    colour = {1: 0, 3: 2}[channels]  # grey, red-green-blue
    # The format (ISO/IEC 15948): each row begins with its filter, 0 for none.
    rows = np.pad(pixels.reshape(height, -1), ((0, 0), (1, 0)))
    with atomic_write(path) as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        file.write(
            _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0))
        )
        file.write(_chunk(b"IDAT", zlib.compress(rows.tobytes())))
        file.write(_chunk(b"IEND", b""))


def _chunk(kind: bytes, data: bytes) -> bytes:
    """Length, kind, data, and the checksum of the latter two."""
    return (
        struct.pack(">I", len(data))
        + kind
        + data
        + struct.pack(">I", zlib.crc32(kind + data))
    )


# What a metric's value may be; arrays and tensors must have one element.
Scalar = float | np.integer[Any] | np.floating[Any] | np.bool_ | NDArray[Any] | Tensor

# A thread or task sees the storages that it has entered itself, the innermost last.
_entered: ContextVar[tuple["EventStorage", ...]] = ContextVar("_entered", default=())

_MAX_PENDING = 4096

logger = logging.getLogger(__name__)


def get_event_storage() -> "EventStorage":
    """The storage of the innermost ``with storage:`` block around the caller.

    Raises:
        RuntimeError: if there is none.
    """
    entered = _entered.get()
    if not entered:
        raise RuntimeError(
            "there is no current EventStorage in this thread: call this inside of train() or of "
            "'with EventStorage(start_iter):'; in a thread of your own, enter the storage there too"
        )
    return entered[-1]


def has_event_storage() -> bool:
    """Whether the caller is inside a ``with storage:`` block."""
    return bool(_entered.get())


class EventStorage:
    """Collects the metrics of a run, by name and iteration.

    Putting costs nothing that can be measured. In particular it never waits for a device: a tensor
    on a device is copied there, and all copies are fetched in one transfer when somebody reads, or
    when 4096 of one metric wait. So read once in a while, not at each
    iteration.

    Example::

        with EventStorage(start_iter) as storage:
            for storage.iter in range(start_iter, max_iter):
                storage.put_scalar("total_loss", loss)

    Args:
        start_iter: the iteration to begin with.

    Attributes:
        iter: the current iteration, with which metrics are stamped. Set it, or call :meth:`step`.
        written: how far the writers of this package have written, and to which run of a service, by
            name; a part of the state.
    """

    def __init__(self, start_iter: int = 0) -> None:
        self.iter = int(start_iter)
        self._current_prefix = ""
        self._histories: dict[str, HistoryBuffer] = {}
        self._has_tensors = False  # whether a value has come from a device
        self._vis_data: deque[tuple[str, Array, int]] = deque(maxlen=64)
        self._histograms: deque[dict[str, Any]] = deque(maxlen=64)
        self._warned = False
        self._forget: Callable[[deque[Any]], None] = deque.clear
        self.written: dict[str, Any] = {}

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
            smoothing_hint: whether writers should show the median of the last iterations (right
                for a noisy loss) or the last value (right for a learning rate or an evaluation).
                The same at each call for a metric.
            cur_iter: when it was measured; None means the current iteration.

        Raises:
            TypeError: if ``value`` is not one real number.
            ValueError: for another ``smoothing_hint`` than before. Nothing is recorded then.
        """
        if type(value) is not float:
            value = _read_scalar(name, value)
            self._has_tensors |= type(value) is not float
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
        # Numbers wait as well: adding them to the history all at once takes less time.
        history.pending.append((value, self.iter if cur_iter is None else cur_iter))
        if len(history.pending) >= _MAX_PENDING:
            self._fetch_pending()

    def put_scalars(
        self, *, smoothing_hint: bool = True, cur_iter: int | None = None, **kwargs: Any
    ) -> None:
        """Record several metrics, ``name=value``, one after the other; see :meth:`put_scalar`."""
        for name, value in kwargs.items():
            self.put_scalar(name, value, smoothing_hint, cur_iter)

    def put_image(self, img_name: str, img_tensor: Array) -> None:
        """Queue an image for the writers, the oldest of 64 making room. Waits for its device.

        Args:
            img_name: its name; the current :meth:`name_scope` is put before it.
            img_tensor: of shape (channels, height, width), with 1 or 3 channels; uint8 in 0..255,
                or floating point in 0..1 (what lies outside is clipped where it is shown).

        Raises:
            ValueError: for another type or shape.
        """
        name = self._current_prefix + img_name
        self._queue(self._vis_data, (name, read_image(name, img_tensor), self.iter))

    def put_histogram(
        self, hist_name: str, hist_tensor: Array, bins: int = 1000
    ) -> None:
        """Queue a histogram for the writers, the oldest of 64 making room. Waits for its device.

        Args:
            hist_name: its name; the current :meth:`name_scope` is put before it.
            hist_tensor: all its elements are counted, whatever its shape.
            bins: the number of intervals of equal width between the extremes.

        Raises:
            ValueError: if there is no element or one that is not finite, or for ``bins`` below 1.
        """
        name = self._current_prefix + hist_name
        self._queue(
            self._histograms, make_histogram(name, hist_tensor, bins, self.iter)
        )

    def _queue(self, queue: deque[Any], item: Any) -> None:
        if len(queue) == queue.maxlen and not self._warned:
            self._warned = True
            text = "More than %d images or histograms wait for a writer: from now on the oldest "
            text += "are dropped. A writer such as TensorboardXWriter takes them whenever it writes"
            logger.warning(text, queue.maxlen)
        queue.append(item)

    def history(self, name: str) -> HistoryBuffer:
        """The values of one metric, complete at the time of the call.

        Raises:
            KeyError: if there is no such metric.
        """
        self._fetch_pending()
        if name not in self._histories:
            raise KeyError(
                f"there is no metric {name!r}{did_you_mean(name, self._histories)}"
            )
        return self._histories[name]

    def histories(self) -> dict[str, HistoryBuffer]:
        """The values of all metrics by name, in the order of their first appearance."""
        self._fetch_pending()
        return dict(self._histories)

    def latest(self) -> dict[str, tuple[float, int]]:
        """The last value of each metric and its iteration, by name."""
        return {name: history.tail(1)[0] for name, history in self.histories().items()}

    # detectron2's names of what is in it, which many projects read.
    _history, _latest_scalars = property(histories), property(latest)

    def latest_iter(self, name: str) -> int | None:
        """The iteration of a metric's last value, or None; in constant time, without a transfer."""
        history = self._histories.get(name)
        return (
            (history.pending or history.tail(1))[-1][1] if history is not None else None
        )

    def latest_with_smoothing_hint(
        self, window_size: int = 20
    ) -> dict[str, tuple[float, int]]:
        """What writers show: as :meth:`latest`, but smoothed where the metric's hint says so.

        Smoothed means the median of the values of the last ``window_size`` iterations.
        """
        latest = self.latest()
        for name, (_, iteration) in latest.items():
            if (history := self._histories[name]).smoothing_hint:
                latest[name] = (history.recent_median(window_size), iteration)
        return latest

    def count_samples(self, name: str, window_size: int = 20) -> int:
        """The number of values of the last ``window_size`` iterations, counted from the last value.

        Raises:
            KeyError: if there is no such metric.
            ValueError: for a ``window_size`` below 1.
        """
        return len(self.history(name).recent(window_size))

    def smoothing_hints(self) -> dict[str, bool]:
        """The hint that each metric was put with, by name."""
        return {
            name: history.smoothing_hint for name, history in self._histories.items()
        }

    def images(self) -> list[tuple[str, Array, int]]:
        """The queued images as (name, array or tensor on the host, iteration), the oldest first."""
        return list(self._vis_data)

    def histograms(self) -> list[dict[str, Any]]:
        """The queued histograms, as arguments of ``SummaryWriter.add_histogram_raw``."""
        return list(self._histograms)

    def clear_images(self) -> None:
        """Forget the queued images; the writer that has shown them calls this."""
        self._forget(self._vis_data)

    def clear_histograms(self) -> None:
        """Forget the queued histograms; the writer that has shown them calls this."""
        self._forget(self._histograms)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Let several writers write: what one of them has shown is forgotten after the block."""
        shown: list[deque[Any]] = []
        self._forget = shown.append
        try:
            yield
        finally:
            self._forget = deque.clear
            for queue in shown:
                queue.clear()

    def step(self) -> None:
        """Go on to the next iteration."""
        self.iter += 1

    @property
    def iteration(self) -> int:
        """The current iteration; another name of ``iter``."""
        return self.iter

    @contextmanager
    def name_scope(self, name: str) -> Iterator[None]:
        """Put ``name/`` before the names of what is put inside the block; blocks nest."""
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
        entered = _entered.get()
        if not entered or entered[-1] is not self:
            raise RuntimeError(
                "leave an EventStorage in its thread, the last one entered first"
            )
        _entered.set(entered[:-1])

    def state_dict(self) -> dict[str, Any]:
        """The iteration and the last 1000 values of each metric, in tensors and plain types.

        Images and histograms are not in it.
        """
        self._fetch_pending()
        return {
            "iteration": self.iter,
            "metrics": {
                name: history.state_dict() for name, history in self._histories.items()
            },
            "written": dict(self.written),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace the iteration and all metrics by what :meth:`state_dict` gave."""
        histories = {name: HistoryBuffer() for name in state_dict["metrics"]}
        for name, history in histories.items():
            history.load_state_dict(state_dict["metrics"][name])
        self.iter = state_dict["iteration"]
        self._histories = histories
        self.written = dict(state_dict.get("written", {}))

    def _fetch_pending(self) -> None:
        """Move what is waiting into the histories, tensors in one transfer."""
        histories = self._histories.values()
        pending = [v for h in histories if self._has_tensors for v, _ in h.pending]
        if tensors := [value for value in pending if type(value) is not float]:
            together = torch.stack([tensor.to(tensors[0].device) for tensor in tensors])
            values = iter(together.tolist())  # host-device synchronisation
            for h in histories:
                h.pending = [
                    (v if type(v) is float else next(values), i) for v, i in h.pending
                ]
        for history in histories:
            if history.pending:
                history.extend(history.pending)
                history.pending.clear()


def _read_scalar(name: str, value: Scalar) -> float | Tensor:
    """The value as a float; of a tensor on a device, a private copy there."""
    if isinstance(value, int | float | np.integer | np.floating | np.bool_):
        return float(value)
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if not isinstance(value, Tensor) or value.is_complex() or value.numel() != 1:
        raise TypeError(
            f"metric {name!r} must be a number or a tensor with one, but got {value!r}"
        )
    if value.is_cpu:
        return float(value.item())
    # Double holds all that the other types do; MPS does not have it. The copy is queued on the
    # device, so the host does not wait, and what is written into the original later has no effect.
    dtype = torch.float32 if value.device.type == "mps" else torch.float64
    return value.detach().reshape(()).to(dtype, copy=True)
