"""The losses of the steps: how they are recorded, checked, and brought together across ranks."""

import logging
import math
import reprlib
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from traceback import walk_tb
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hooktrain.events import EventStorage
from hooktrain.utils import comm

logger = logging.getLogger(__name__)


def parse_losses(output: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """What a model returned in training, as the loss to go backward from and the values to record.

    A tensor is the loss. Of an object with ``loss``, such as the outputs of Hugging Face's models,
    only that is. Of a dict all tensors are added up, as in detectron2, but for those that have
    neither a gradient nor "loss" in their names: these are metrics, as in MMEngine, such as an
    accuracy.

    Returns:
        The loss, and all values by name. The sum is among them where metrics are.

    Raises:
        TypeError: if there is no loss, or a value is not a tensor with one element.
        ValueError: if the loss has no gradient; or if the sum is among several values, so that all
            would count twice.
    """
    if isinstance(output, Tensor):
        if output.numel() == 1 and output.requires_grad:
            return output, {"total_loss": output}
        values: dict[str, Tensor] = {"total_loss": output}
    # A dict may have an attribute for each item; that of a class is another matter.
    elif hasattr(type(output) if isinstance(output, Mapping) else output, "loss"):
        values = {"total_loss": output.loss}
    else:
        values = dict(output) if isinstance(output, Mapping) else {}
    if "total_loss" in values and len(values) > 1:
        raise ValueError(
            f"'total_loss' is the name of the sum: leave it out of {list(values)}"
        )
    for value in values.values() or [None]:
        if not isinstance(value, Tensor) or value.numel() != 1:
            text = "a model in training must return a loss or a dict of losses, of one element each"
            raise TypeError(f"{text}, not {describe(output)}")
    losses = [
        value for name, value in values.items() if value.requires_grad or "loss" in name
    ]
    if not any(loss.requires_grad for loss in losses):
        raise ValueError(f"no loss has a gradient: {describe(output)}")
    loss = reduce(add, losses)
    return loss, values if len(losses) == len(values) else {
        "total_loss": loss,
        **values,
    }


def note_batch(error: Exception) -> None:
    """Let an error of a step say what the last batch was: types, keys and shapes."""
    for frame, _ in walk_tb(error.__traceback__):
        if (
            frame.f_code.co_name in ("run_step", "_accumulate")
            and "data" in frame.f_locals
        ):
            text = f"The last batch: {describe(frame.f_locals['data'])}"
            getattr(error, "add_note", logger.error)(
                text
            )  # there are notes since Python 3.11


class _Describer(reprlib.Repr):
    """Short texts of nested values; of a tensor its shape and more, never the elements."""

    def repr_instance(self, x: Any, level: int) -> str:
        if isinstance(x, Mapping):
            return f"{type(x).__name__}({self.repr_dict(dict(x), level)})"
        if isinstance(x, Tensor):
            return f"{type(x).__name__}({tuple(x.shape)}, {x.dtype}, {x.device})"
        return repr(x) if x is None or isinstance(x, float) else f"<{type(x).__name__}>"


describe = _Describer().repr


RESERVED = frozenset({"data_time", "rank_data_time"})


class LossRecorder:
    """Records the losses of each step, and checks that they are finite.

    A single process puts them into the trainer's storage. With several ranks they wait in another
    storage until :meth:`exchange` puts the means over the ranks into the trainer's.

    On the CPU of a single process a loss is checked when it is recorded, before the update.
    Elsewhere the host would have to wait for the device or for other ranks, so :meth:`check` does
    it at the end of a period.

    Args:
        check_at_once: whether to check a loss when it is recorded, where that is free.
    """

    def __init__(self, check_at_once: bool = True) -> None:
        self.check_at_once = check_at_once
        self._alone = True
        self._waiting = EventStorage()
        self._names: dict[
            str, int
        ] = {}  # those that all ranks know, with their columns
        self._together = (
            0  # the ranks have brought together the iterations before this one
        )
        self._checked = 0  # the iterations before this one are checked
        self._checked_names: set[str] = set()
        self._tolerated: set[int] = set()

    def reset(self, iteration: int) -> None:
        """Forget everything: the next iteration is ``iteration``."""
        self._waiting = EventStorage()
        self._tolerated.clear()
        self._together = self._checked = iteration

    def begin(self, iteration: int) -> None:
        """Begin a run, perhaps by doing again an ``iteration`` that broke off."""
        self._alone = (
            comm.get_world_size() == 1
        )  # once a run, since it takes a microsecond
        self._names.clear()
        self._checked = min(self._checked, iteration)
        self._tolerated = {i for i in self._tolerated if i < iteration}

    def tolerate(self, iteration: int) -> None:
        """Let the losses of an iteration be infinite or NaN: no update is made of them."""
        self._tolerated.add(iteration)

    def record(
        self,
        storage: EventStorage,
        iteration: int,
        losses: Mapping[str, Any],
        data_time: float,
        total: str | None = "total_loss",
    ) -> None:
        """Record one step.

        Args:
            storage: the trainer's storage.
            iteration: the iteration.
            losses: losses by name.
            data_time: the seconds that the step waited for data.
            total: the name of their sum, which must be finite; it may be one of them. None means
                that ``losses`` are metrics of any kind: they are not summed, and those with "loss"
                in their names must be finite.

        Raises:
            FloatingPointError: if a loss is not finite, where it costs nothing to know.
            TypeError: for a tensor with several elements.
            ValueError: for a name that is used here.
        """
        if not RESERVED.isdisjoint(losses):
            raise ValueError(
                f"no loss may be named {' or '.join(RESERVED)}: those are measured"
            )
        check_now = self._alone and self.check_at_once
        values = {}
        for name, value in losses.items():
            if isinstance(value, Tensor):
                if value.numel() != 1:
                    raise TypeError(
                        f"{name!r} must be one number: it has shape {[*value.shape]}"
                    )
                if value.is_cpu:
                    value = value.item()  # no synchronisation on the CPU
                else:
                    value, check_now = value.detach(), False
            values[name] = value
        names: Sequence[str] = (
            (total,) if total else [name for name in values if "loss" in name]
        )
        if total and total not in values:
            # The sum comes first where metrics are shown.
            values = {total: reduce(add, values.values()), **values}
        if check_now:
            for name in names:
                if not math.isfinite(values[name]) and iteration not in self._tolerated:
                    raise _non_finite(iteration, values)
            self._checked = iteration + 1
        else:
            self._checked_names.update(names)
        target = storage if self._alone else self._waiting
        for name, value in values.items():
            target.put_scalar(name, value, True, iteration)
        target.put_scalar("data_time", data_time, True, iteration)
        if not self._alone:
            storage.put_scalar("rank_data_time", data_time, True, iteration)

    def exchange(self, storage: EventStorage, finished: int, asks: bool) -> int:
        """Put the means over the ranks of the finished iterations into the storage.

        One maximum says what needs more words (new names, a request to stop) and finds the
        slowest data time of each iteration; one sum adds up the values and how many there are.
        A collective, which every rank calls after the same iteration.

        Args:
            storage: the trainer's storage.
            finished: the number of finished iterations.
            asks: whether this rank has something to ask for.

        Returns:
            The highest rank that asks for something, -1 if none does.
        """
        first, count = self._together, finished - self._together
        histories = {n: h.since(first) for n, h in self._waiting.histories().items()}
        self._together, self._waiting = finished, EventStorage()
        rank = comm.get_rank()
        largest = torch.full((2 + count,), -1.0, dtype=torch.float64)
        largest[1] = rank if asks else -1
        for seconds, i in histories.pop("data_time", []):
            largest[2 + i - first] = seconds
        while True:
            new = [name for name in histories if name not in self._names]
            largest[0] = rank if new else -1
            speaker, asking, *slowest = comm.all_reduce(
                largest, dist.ReduceOp.MAX
            ).tolist()
            if speaker < 0:
                break
            for name in comm.broadcast(new, int(speaker)):
                self._names[name] = len(self._names)
        sums = np.zeros(
            (2, count, len(self._names))
        )  # of the values, and how many there are
        for name, entries in histories.items():
            column = self._names[name]
            for value, i in entries:
                sums[:, i - first, column] += (value, 1)
        if sums.size:
            comm.all_reduce(torch.from_numpy(sums))
        for i, values, counts, seconds in zip(
            range(count), *sums.tolist(), slowest, strict=True
        ):
            for name, value, ranks in zip(self._names, values, counts, strict=True):
                if ranks:
                    storage.put_scalar(name, value / ranks, cur_iter=first + i)
            if seconds >= 0:
                storage.put_scalar("data_time", seconds, cur_iter=first + i)
        return int(asking)

    def check(self, storage: EventStorage, finished: int) -> None:
        """Check the losses of the finished iterations that were not checked yet.

        With several ranks those that are not brought together yet are only looked at: the ranks
        come to the same verdict at the next exchange.

        Raises:
            FloatingPointError: for the first one that is not finite, with its iteration.
        """
        if self._checked >= finished or not self._checked_names:
            return
        for source in (storage, self._waiting):
            # Host-device synchronisation: reads what was recorded since the last reading.
            histories = source.histories()
            bad = [
                i
                for name in self._checked_names & set(histories)
                for value, i in histories[name].since(self._checked)
                if not math.isfinite(value) and i not in self._tolerated
            ]
            if bad:
                first = min(bad)
                losses = [
                    (n, h.since(first)) for n, h in histories.items() if "loss" in n
                ]
                raise _non_finite(
                    first, {n: v for n, h in losses for v, i in h if i == first}
                )
        self._checked = finished if self._alone else self._together
        self._tolerated = {i for i in self._tolerated if i >= self._checked}


LOOK_AGAIN = (
    "To see in which layer that begins, compute the iteration again: docs/guide.md, "
    '"When a run goes wrong"'
)


def _non_finite(iteration: int, losses: Mapping[str, float]) -> FloatingPointError:
    return FloatingPointError(
        f"Loss became infinite or NaN at iteration={iteration}!\nloss_dict = {dict(losses)}\n"
        f"{LOOK_AGAIN}"
    )
