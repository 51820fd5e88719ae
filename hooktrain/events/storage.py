"""Holds the metrics of a run."""

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hooktrain.events.history import OF_THE_MACHINE, Entry, HistoryBuffer
from hooktrain.utils.logger import log_once
from hooktrain.utils.names import Numbers, State

Array = Tensor | NDArray[Any]
Scalar = float | np.generic | Array  # with one element
Image = tuple[str, Tensor, int]  # a name, an image on the CPU, its iteration
Histogram = dict[str, Any]  # the arguments of SummaryWriter.add_histogram_raw

_MAX_PENDING = 4096  # how many values of a metric may wait to be fetched
_MAX_QUEUED = 64  # how many images, or histograms, may wait for a writer

# The fields that JSONWriter adds to a row.
_COLUMNS = ("iteration", "mean_loss")
# A result with one of these names is renamed, even if the training has no such metric yet.
_RESERVED = (*_COLUMNS, "total_loss", "time", "data_time", "lr")

# In the earliest checkpoints all other metrics that are not smoothed are results of evaluations.
_NOT_SMOOTHED = ("lr", "eta_seconds", "skipped_updates")

_TWICE = (
    "%r has two values in one iteration, which are kept as values of one metric: give one of them "
    "another name"
)

logger = logging.getLogger(__name__)

# The storages that this thread or task has entered, the innermost last.
_entered: ContextVar[tuple["EventStorage", ...]] = ContextVar("_entered", default=())


def get_event_storage() -> "EventStorage":
    """The storage of the innermost ``with storage:`` block.

    Raises:
        RuntimeError: outside such a block.
    """
    entered = _entered.get()
    if not entered:
        raise RuntimeError(
            "this thread has no EventStorage: call this inside train() or "
            "'with EventStorage(start_iter):'"
        )
    return entered[-1]


def has_event_storage() -> bool:
    """Whether the caller is inside a ``with storage:`` block."""
    return bool(_entered.get())


class EventStorage:
    """The metrics of a run, by name and iteration.

    Training metrics and evaluation results are kept apart: a result with the name of a training
    metric is read and written as ``"eval/<name>"``.

    Recording a value never waits for a device. All tensors move to the host in one transfer when a
    metric is read, or when 4096 values of a metric are waiting.

    Example::

        with EventStorage(start_iter) as storage:
            for storage.iter in range(start_iter, max_iter):
                storage.put_scalar("total_loss", loss)

    Args:
        start_iter: the iteration to begin with.

    Attributes:
        iter: the current iteration.
        max_iter: the iteration at which the run ends, exclusive; 0 if unknown.
        epoch_length: the number of iterations per epoch; None if unknown.
        written: the last iteration that the writers of a run have written.
        info: plain values that are saved with the metrics, such as the size of each metrics file in
            bytes, by its name.
    """

    max_iter: int = 0
    epoch_length: int | None = None
    written: int = -1

    def __init__(self, start_iter: int = 0) -> None:
        self.iter = int(start_iter)
        self.info: dict[str, Any] = {}
        self._writers: dict[str, object] = {}
        self._current_prefix = ""
        self._histories: dict[str, HistoryBuffer] = {}
        self._tensors: list[Tensor] = []  # the pending values that are on a device
        # These are detectron2's names, which its users' writers read.
        self._vis_data: deque[Image] = deque(maxlen=_MAX_QUEUED)
        self._histograms: deque[Histogram] = deque(maxlen=_MAX_QUEUED)

    def put_scalar(
        self,
        name: str,
        value: Scalar,
        smoothing_hint: bool = True,
        cur_iter: int | None = None,
        reproducible: bool = True,
    ) -> None:
        """Record a value of a metric.

        Args:
            name: the name of the metric; the current :meth:`name_scope` is prepended.
            value: a number, or a tensor with one element, on any device.
            smoothing_hint: whether writers show medians, as for a noisy loss, or each value, as for
                an evaluation. The first call for a metric decides.
            cur_iter: the iteration of the value; None takes the current one.
            reproducible: False for a measurement of the machine, such as a speed, whose values
                before and after a resume are not compared. The first call for a metric decides.

        Raises:
            TypeError: if ``value`` is not one real number, or ``smoothing_hint`` no bool when the
                metric begins.
            ValueError: if the name is ``"iteration"``.
        """
        if type(value) is not float:
            value = self._read_scalar(name, value)
        name = self._current_prefix + name
        history = self._histories.get(name)
        if history is None or history.result:
            if not isinstance(smoothing_hint, bool):
                raise TypeError(
                    f"smoothing_hint (the third argument) of metric {name!r} must be a bool, not "
                    f"{smoothing_hint!r}: a value has no weight or count of samples"
                )
            history = self._new_history(name)
            history.smoothing_hint = smoothing_hint
            history.reproducible = reproducible
        # Numbers wait too, since adding many at once is faster.
        if cur_iter is None:
            cur_iter = self.iter
            if cur_iter == self.written:
                log_once(
                    logger.info,
                    "The metric %r is recorded after the writers, so it gets a separate row, a "
                    "period later: record it earlier, for example in a hook of the phase 'run'",
                    name,
                )
        pending = history.pending
        pending.append((value, cur_iter))
        if len(pending) >= _MAX_PENDING:
            self._fetch_pending()

    def _new_history(self, name: str) -> HistoryBuffer:
        """Begin a training metric. A result of the same name is renamed."""
        if name == "iteration":
            raise ValueError(
                "no metric can be named 'iteration': rows have a field of that name"
            )
        result = self._histories.pop(name, None)
        history = self._histories[name] = HistoryBuffer()
        if result is not None:
            self._name_result(result)
        return history

    def _name_result(self, history: HistoryBuffer) -> None:
        """Give evaluation results a free name, and log it if it is not their own."""
        name = history.result
        while name in self._histories or name in _RESERVED:
            name = f"eval/{name}"
        self._histories[name] = history
        if name != history.result:
            is_column = history.result in _COLUMNS  # with which it would be mixed up
            logger.log(
                logging.WARNING if is_column else logging.INFO,
                "The evaluation result %r is recorded as %r, since the training has a metric of "
                "that name",
                history.result,
                name,
            )

    def put_scalars(
        self, *, smoothing_hint: bool = True, cur_iter: int | None = None, **kwargs: Any
    ) -> None:
        """Call :meth:`put_scalar` for several metrics, given as ``name=value``."""
        for name, value in kwargs.items():
            self.put_scalar(name, value, smoothing_hint, cur_iter)

    def put_results(self, results: Numbers, iteration: int) -> None:
        """Record the results of an evaluation; ``trainer.after_evaluation`` calls it.

        Args:
            results: the numbers by name.
            iteration: the iteration whose weights were evaluated.
        """
        known = self.results()
        for name, value in results.items():
            if name not in known:
                known[name] = HistoryBuffer(result=name)
                self._name_result(known[name])
            if any(other != value for other, _ in known[name].since(iteration)):
                log_once(logger.warning, _TWICE, name)
            known[name].update(value, iteration)

    def put_image(self, img_name: str, img_tensor: Array) -> None:
        """Queue a copy of an image for the writers. This waits for the image's device.

        The last 64 images are kept until they are written.

        Args:
            img_name: the name, as for :meth:`put_scalar`.
            img_tensor: the image, of shape (1 or 3, height, width). It is uint8 in 0..255, or
                floating point in 0..1.

        Raises:
            ValueError: if it has another shape.
        """
        name = self._current_prefix + img_name
        image = torch.as_tensor(img_tensor).detach()
        if image.dim() != 3 or len(image) not in (1, 3):
            raise ValueError(
                f"image {name!r} must have the shape (channels, height, width) with 1 or 3 "
                f"channels, but has {tuple(image.shape)}"
            )
        copied = image.to("cpu", copy=True)  # host-device synchronisation
        self._vis_data.append((name, copied, self.iter))

    def put_histogram(
        self, hist_name: str, hist_tensor: Array, bins: int = 1000
    ) -> None:
        """Queue a histogram for the writers, as :meth:`put_image` queues an image.

        Args:
            hist_name: the name, as for :meth:`put_scalar`.
            hist_tensor: the values to count, of any shape.
            bins: the number of intervals of equal width, at least 1.

        Raises:
            ValueError: if there are no elements, if one is infinite or NaN, or if ``bins`` is below
                1.
        """
        tensor = torch.as_tensor(hist_tensor).detach()
        values = tensor.cpu().double().numpy()  # host-device synchronisation
        counts, edges = np.histogram(values, bins)
        histogram = {
            "tag": self._current_prefix + hist_name,
            "min": float(values.min()),
            "max": float(values.max()),
            "num": values.size,
            "sum": float(values.sum()),
            "sum_squares": float(np.square(values).sum()),
            "bucket_limits": edges[1:].tolist(),
            "bucket_counts": counts.tolist(),
            "global_step": self.iter,
        }
        self._histograms.append(histogram)

    def history(self, name: str) -> HistoryBuffer:
        """The values of a metric; KeyError if there is none of this name."""
        return self.histories()[name]

    def histories(self) -> dict[str, HistoryBuffer]:
        """The values of all metrics by name."""
        self._fetch_pending()
        return self._histories

    def results(self) -> dict[str, HistoryBuffer]:
        """The evaluation results, by the names that the evaluations gave them."""
        histories = self._histories.values()
        return {h.result: h for h in histories if h.result}

    def latest(self) -> dict[str, Entry]:
        """The last value and its iteration, by metric."""
        return {name: h.tail(1)[0] for name, h in self.histories().items()}

    # These are detectron2's names, which its users' writers read.
    _history = property(histories)
    _latest_scalars = property(latest)

    def latest_with_smoothing_hint(self, window_size: int = 20) -> dict[str, Entry]:
        """The last value, or the median of the last iterations if the hint says so, by metric."""
        latest = self.latest()
        for name, history in self._histories.items():
            if history.smoothing_hint:
                _, iteration = latest[name]
                latest[name] = (history.median(window_size), iteration)
        return latest

    def count_samples(self, name: str, window_size: int = 20) -> int:
        """The number of values of a metric in the last ``window_size`` iterations."""
        return len(self.history(name).recent(window_size))

    def smoothing_hints(self) -> dict[str, bool]:
        """Whether writers should smooth a metric, by metric."""
        return {name: h.smoothing_hint for name, h in self._histories.items()}

    def is_reproducible(self, name: str) -> bool:
        """Whether a resumed run computes the same values of a metric again, which it may lack."""
        history = self._histories.get(name, HistoryBuffer())
        return history.reproducible and not OF_THE_MACHINE.search(name)

    def clear_images(self) -> None:
        """Remove the images from the queue."""
        self._vis_data.clear()

    def clear_histograms(self) -> None:
        """Remove the histograms from the queue."""
        self._histograms.clear()

    def add_writer(self, name: str, writer: object) -> None:
        """Add a writer to those of this run. A run that enters the storage begins without writers.

        Raises:
            ValueError: if another writer has this name, under which each history keeps how much
                the writer has written.
        """
        if self._writers.setdefault(name, writer) is not writer:
            raise ValueError(
                f"two writers are named {name!r}: are hooks registered twice? If both are wanted, "
                "set the attribute 'name' of one of them"
            )

    def step(self) -> None:
        """Advance to the next iteration."""
        self.iter += 1

    @property
    def iteration(self) -> int:
        """An alias of ``iter``."""
        return self.iter

    @contextmanager
    def name_scope(self, name: str) -> Iterator[None]:
        """Prepend ``name/`` to the names of metrics inside the block."""
        outer = self._current_prefix
        self._current_prefix = f"{outer}{name.rstrip('/')}/"
        try:
            yield
        finally:
            self._current_prefix = outer

    def __enter__(self) -> "EventStorage":
        self._writers = {}
        self.written = -1
        outer = _entered.get()
        _entered.set((*outer, self))
        return self

    def __exit__(self, *exc_info: object) -> None:
        _entered.set(_entered.get()[:-1])

    def state_dict(self) -> State:
        """The iteration and the last 1000 values of each metric, without images."""
        self._fetch_pending()
        return {
            "iteration": self.iter,
            "metrics": {n: h.state_dict() for n, h in self._histories.items()},
            "info": dict(self.info),
        }

    def load_state_dict(self, state_dict: State) -> None:
        """Replace all metrics by those that :meth:`state_dict` returned."""
        self._histories = {}
        for name, state in state_dict["metrics"].items():
            history = self._histories[name] = HistoryBuffer()
            history.load_state_dict(state)
        if "written_counts" in state_dict:
            self._complete(state_dict["written_counts"])
        self.iter = state_dict["iteration"]
        # Earlier checkpoints have the sizes of files in a dict of their own.
        self.info = {**state_dict.get("file_sizes", {}), **state_dict["info"]}

    def _complete(self, counts: Mapping[str, Mapping[str, int]]) -> None:
        """Add the attributes that histories of the earliest checkpoints lack.

        Args:
            counts: how many values were written, by writer and metric.
        """
        for name, history in self._histories.items():
            if not history.smoothing_hint and not name.endswith(_NOT_SMOOTHED):
                history.result = name
            for writer, written in counts.items():
                history.written[writer] = written.get(name, 0)

    def _read_scalar(self, name: str, value: Scalar) -> float | Tensor:
        """The value as a float, or a copy of a tensor on a device."""
        if isinstance(value, Real | np.bool_):
            return float(value)
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value)
        if not isinstance(value, Tensor) or value.is_complex() or value.numel() != 1:
            raise TypeError(
                f"metric {name!r} must be one real number, but is {value!r}"
            )
        if value.is_cpu:
            return float(value.item())
        # MPS has no doubles.
        dtype = torch.float32 if value.is_mps else torch.float64
        scalar = value.detach().reshape(()).to(dtype, copy=True)
        self._tensors.append(scalar)
        return scalar

    def _fetch_pending(self) -> None:
        """Add the pending values to the histories."""
        if self._tensors:
            self._fetch_tensors()
        for name, history in self._histories.items():
            if history.pending:
                pending = history.pending
                # The trainer records these once per iteration.
                iterations = pending[-1][1] - pending[0][1] + 1
                if name in _RESERVED and len(pending) > iterations:
                    log_once(logger.warning, _TWICE, name)
                history.extend(pending)
                pending.clear()

    def _fetch_tensors(self) -> None:
        """Replace the pending tensors by their values, in one transfer."""
        device = self._tensors[0].device
        tensors = [tensor.to(device) for tensor in self._tensors]
        values = torch.stack(tensors).tolist()  # host-device synchronisation
        fetched: dict[Any, float] = dict(zip(self._tensors, values, strict=True))
        for history in self._histories.values():
            history.pending = [(fetched.get(v, v), i) for v, i in history.pending]
        self._tensors.clear()
