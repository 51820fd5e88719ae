"""The losses of the steps: recorded, checked, and brought together across ranks."""

import math
from collections.abc import Mapping
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hooktrain.events import EventStorage
from hooktrain.utils import comm
from hooktrain.utils.names import is_loss


def parse_losses(output: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Split what a model returned in training into the loss and the values to record.

    - A tensor is the loss; so is ``loss`` of an object, as of Hugging Face's models.
    - The losses in a dict are added up. Its metrics are what has neither a gradient nor
      "loss" in its name.

    Returns:
        The loss to go backward from, and all values by name, with the sum of the losses
        as ``total_loss`` if there are metrics.

    Raises:
        TypeError: without a loss, or for a value that is not a tensor with one element.
        ValueError: if no loss has a gradient, or ``total_loss`` is one of several values.
    """
    if isinstance(output, Tensor) and output.numel() == 1 and output.requires_grad:
        return output, {"total_loss": output}
    values = _values_by_name(output)
    if "total_loss" in values and len(values) > 1:
        raise ValueError(
            f"'total_loss' is the name of the sum: leave it out of {list(values)}"
        )
    scalars = [v for v in values.values() if isinstance(v, Tensor) and v.numel() == 1]
    if not values or len(scalars) < len(values):
        raise TypeError(
            "a model in training must return a loss or a dict of losses, of one element "
            f"each, not {_describe(output)}"
        )
    losses = [v for name, v in values.items() if v.requires_grad or is_loss(name)]
    if not any(loss.requires_grad for loss in losses):
        raise ValueError(f"no loss has a gradient: {_describe(output)}")
    loss = reduce(add, losses)
    if len(losses) < len(values):
        values = {"total_loss": loss, **values}
    return loss, values


def _values_by_name(output: Any) -> dict[str, Any]:
    if isinstance(output, Tensor):
        return {"total_loss": output}
    # Some dicts have an attribute for each item. Only one of their class is meant.
    owner = type(output) if isinstance(output, Mapping) else output
    if hasattr(owner, "loss"):
        return {"total_loss": output.loss}
    return dict(output) if isinstance(output, Mapping) else {}


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        items = [f"{name!r}: {_describe(item)}" for name, item in value.items()]
        return f"{{{', '.join(items)}}}"
    return type(value).__name__


class LossRecorder:
    """Records the losses of each step of a run, and checks that they are finite.

    With several ranks they wait until :meth:`exchange` puts their means into the storage.

    On the CPU of a single process a loss is checked before the update. Elsewhere the host
    would have to wait, so :meth:`check` does it at the end of a period.

    Args:
        iteration: the first iteration of the run.
    """

    def __init__(self, iteration: int = 0) -> None:
        self._alone = comm.get_world_size() == 1
        self._waiting = EventStorage()
        self._columns: dict[str, int] = {}  # the names that all ranks know
        # The iterations before these are exchanged, and checked.
        self._exchanged = iteration
        self._checked = iteration
        self._to_check: set[str] = set()
        self._tolerated: set[int] = set()

    def tolerate(self, iteration: int) -> None:
        """Let the losses of an iteration be infinite or NaN."""
        self._tolerated = {i for i in self._tolerated if i >= self._checked}
        self._tolerated.add(iteration)

    def record(
        self,
        storage: EventStorage,
        iteration: int,
        losses: Mapping[str, Any],
        data_time: float,
        total: str | None = "total_loss",
        check_now: bool = True,
    ) -> None:
        """Record one step.

        Args:
            storage: the trainer's storage.
            iteration: the iteration.
            losses: numbers, or tensors with one element, by name.
            data_time: seconds that the step waited for data.
            total: the name of the sum, which must be finite. With None there is no sum, and
                those with "loss" in their names must be finite.
            check_now: whether to check at once, where that is free.

        Raises:
            FloatingPointError: if a loss is not finite.
        """
        values = {name: _on_host_if_free(value) for name, value in losses.items()}
        on_device = any(isinstance(value, Tensor) for value in values.values())
        if total is None:
            checked = [name for name in values if is_loss(name)]
        else:
            checked = [total]
            if total not in values:  # the sum comes first where metrics are shown
                values = {total: reduce(add, values.values()), **values}
        if on_device or not check_now or not self._alone:
            self._to_check.update(checked)
        elif iteration not in self._tolerated:
            for name in checked:
                if not math.isfinite(values[name]):
                    raise _non_finite(iteration, values)
            self._checked = iteration + 1
        target = storage if self._alone else self._waiting
        for name, value in values.items():
            target.put_scalar(name, value, True, iteration)
        target.put_scalar("data_time", data_time, True, iteration)
        if not self._alone:
            storage.put_scalar("rank_data_time", data_time, True, iteration)

    def exchange(self, storage: EventStorage, finished: int, asks: bool) -> int:
        """Put the means over the ranks of the finished iterations into the storage.

        A collective of two calls: :meth:`_agree`, by a maximum, and a sum.

        Args:
            storage: the trainer's storage.
            finished: the number of finished iterations.
            asks: whether this rank asks for something.

        Returns:
            The highest rank that asks for something, or -1.
        """
        first = self._exchanged
        count = finished - first
        entries = {}
        for name, history in self._waiting.histories().items():
            entries[name] = history.since(first)
        self._exchanged = finished
        self._waiting = EventStorage()
        data_times = np.full(count, -1.0)
        for seconds, i in entries.pop("data_time", []):
            data_times[i - first] = seconds
        asking, slowest = self._agree(list(entries), data_times, asks)
        # The sums of the values, and how many there are.
        sums = np.zeros((2, count, len(self._columns)))
        for name, values in entries.items():
            for value, i in values:
                sums[:, i - first, self._columns[name]] += (value, 1)
        if sums.size:
            comm.all_reduce(torch.from_numpy(sums))
        for step in range(count):
            iteration = first + step
            means = zip(self._columns, *sums[:, step].tolist(), strict=True)
            for name, total, ranks in means:
                if ranks:
                    storage.put_scalar(name, total / ranks, cur_iter=iteration)
            if slowest[step] >= 0:
                storage.put_scalar("data_time", slowest[step], cur_iter=iteration)
        return asking

    def _agree(
        self,
        names: list[str],
        data_times: np.ndarray,
        asks: bool,
    ) -> tuple[int, list[float]]:
        """Learn all ranks' names; return who asks, and the slowest times.

        The maximum tells whether a rank has new names, which it then broadcasts.
        """
        rank = comm.get_rank()
        while True:
            new = [name for name in names if name not in self._columns]
            has_new = rank if new else -1
            asking = rank if asks else -1
            largest = torch.tensor([has_new, asking, *data_times], dtype=torch.float64)
            comm.all_reduce(largest, dist.ReduceOp.MAX)
            speaker, highest, *slowest = largest.tolist()
            if speaker < 0:
                return int(highest), slowest
            for name in comm.broadcast(new, int(speaker)):
                self._columns[name] = len(self._columns)

    def check(self, storage: EventStorage, finished: int) -> None:
        """Check what was not checked yet of the finished iterations.

        Raises:
            FloatingPointError: for the first one that is not finite, with its iteration.
        """
        if self._checked >= finished or not self._to_check:
            return
        for source in (storage, self._waiting):
            losses: dict[int, dict[str, float]] = {}  # by iteration
            # Host-device synchronisation: reads what was recorded since the last time.
            for name, history in source.histories().items():
                if is_loss(name) or name in self._to_check:
                    for value, i in history.since(self._checked):
                        losses.setdefault(i, {})[name] = value
            for i in sorted(losses.keys() - self._tolerated):
                for name in self._to_check:
                    if not math.isfinite(losses[i].get(name, 0.0)):
                        raise _non_finite(i, losses[i])
        self._checked = finished if self._alone else self._exchanged


def _on_host_if_free(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.item() if value.is_cpu else value.detach()


def _non_finite(iteration: int, losses: Mapping[str, float]) -> FloatingPointError:
    return FloatingPointError(
        f"Loss became infinite or NaN at iteration={iteration}!\n"
        f"loss_dict = {dict(losses)}\n{LOOK_AGAIN}"
    )


LOOK_AGAIN = (
    "To see in which layer that begins, compute the iteration again: docs/guide.md, "
    '"When a run goes wrong"'
)
