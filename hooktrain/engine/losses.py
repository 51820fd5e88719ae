"""Records the losses of each step, checks them, and averages them over the ranks."""

import math
from collections.abc import Iterable, Mapping
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hooktrain.events import EventStorage, HistoryBuffer
from hooktrain.utils import comm
from hooktrain.utils.names import Numbers, is_loss

# Advice for errors about numbers that are not finite.
WHERE_IT_BEGINS = (
    "To find where it begins, resume inside torch.autograd.set_detect_anomaly(True), "
    "or see docs/guide/debugging.md"
)
NONFINITE_HINT = f"hooks.SkipNonFinite() skips such updates. {WHERE_IT_BEGINS}"


class LossRecorder:
    """Records the losses of each step of a run, and checks that they are finite.

    With several ranks the losses wait until :meth:`exchange` puts their means into the storage.
    A single process on the CPU checks a loss before the update. Otherwise :meth:`check` does so at
    the end of a period, so that the host need not wait for the device.

    Args:
        storage: the EventStorage to record in.
        iteration: the first iteration of the run.
    """

    def __init__(self, storage: EventStorage, iteration: int = 0) -> None:
        self._storage = storage
        self._alone = comm.get_world_size() == 1
        self._waiting = storage if self._alone else EventStorage()
        self._data_times: dict[int, float] = {}  # by iteration; they wait too
        # The column of each name that all ranks know.
        self._columns: dict[str, int] = {}
        # The first iterations that have not been exchanged, and not been checked.
        self._exchanged = iteration
        self._checked = iteration
        self._to_check: set[str] = set()
        self._tolerated: set[int] = set()

    def tolerate(self, iteration: int) -> None:
        """Allow infinite and NaN losses in an iteration."""
        self._tolerated = {i for i in self._tolerated if i >= self._checked}
        self._tolerated.add(iteration)

    def record(
        self,
        iteration: int,
        losses: Mapping[str, Any],
        data_time: float,
        total: str | None = "total_loss",
        check_now: bool = True,
    ) -> None:
        """Record one step.

        Args:
            iteration: the iteration.
            losses: numbers, or tensors with one element, by name.
            data_time: seconds that the step waited for data.
            total: the name to record the sum under, which must be finite; if None, there is no
                sum, and each loss must be finite.
            check_now: whether to check the losses at once if that costs nothing.

        Raises:
            FloatingPointError: if a loss is not finite.
        """
        check_now = check_now and self._alone
        values: dict[str, Any] = {}
        for name, value in losses.items():
            if isinstance(value, Tensor):
                if value.is_cpu:
                    value = value.item()
                else:
                    value = value.detach()
                    check_now = False
            values[name] = value
        if total is None:
            checked = list(filter(is_loss, values))
        else:
            checked = [total]
            if total not in values:  # the sum is shown before the other metrics
                values = {total: reduce(add, values.values()), **values}
        if not check_now:
            self._to_check.update(checked)
        elif iteration not in self._tolerated:
            _refuse_non_finite(checked, values, iteration)
        for name, value in values.items():
            self._waiting.put_scalar(name, value, True, iteration)
        if self._alone:
            self._storage.put_scalar("data_time", data_time, True, iteration)
        else:  # recorded at the exchange, which takes the slowest rank's
            self._data_times[iteration] = data_time

    def exchange(self, finished: int, numbers: Numbers) -> Numbers:
        """Record the losses of the finished iterations, averaged over the ranks. A collective.

        Args:
            finished: the number of finished iterations.
            numbers: further numbers of this rank, by name. All ranks give the same names in the
                same order.

        Returns:
            The maxima of the numbers over the ranks, by name.
        """
        first = self._exchanged
        waiting = self._waiting.histories()
        times = [self._data_times.pop(i, -1.0) for i in range(first, finished)]
        self._exchanged = finished
        self._waiting = EventStorage()
        own = [*numbers.values(), *times]
        largest, sums = self._reduce(waiting, own, first, finished)
        for name, column in self._columns.items():
            for i, (total, ranks) in enumerate(sums[:, column].tolist(), first):
                if ranks:
                    self._storage.put_scalar(name, total / ranks, cur_iter=i)
        for i, seconds in enumerate(largest[len(numbers) :], first):
            if seconds >= 0:
                self._storage.put_scalar("data_time", seconds, cur_iter=i)
        return dict(zip(numbers, largest, strict=False))

    def _reduce(
        self,
        waiting: Mapping[str, HistoryBuffer],
        numbers: list[float],
        first: int,
        finished: int,
    ) -> tuple[list[float], NDArray[np.float64]]:
        """The maxima of numbers over the ranks, and the sums of losses. A collective.

        Only losses whose names all ranks know are summed. A rank with a new name adds its rank to
        the maxima; the highest such rank broadcasts its new names, and all ranks start over, until
        no rank has a new name.
        """
        while True:
            new = [name for name in waiting if name not in self._columns]
            largest = [comm.get_rank() if new else -1, *numbers]
            # By iteration and name: the sum of the values, and their number.
            sums = np.zeros((finished - first, len(self._columns), 2))
            for name in waiting.keys() & self._columns.keys():
                for value, i in waiting[name].since(first):
                    sums[i - first, self._columns[name]] += (value, 1)
            both = np.concatenate([largest, sums.ravel()])
            comm.max_and_sum(torch.from_numpy(both), len(largest))
            speaker, *maxima = both[: len(largest)].tolist()
            if speaker < 0:
                return maxima, both[len(largest) :].reshape(sums.shape)
            for name in comm.broadcast(new, int(speaker)):
                self._columns[name] = len(self._columns)

    def check(self, finished: int) -> None:
        """Check the losses of the finished iterations that were not checked yet.

        Raises:
            FloatingPointError: for the first iteration with a loss that is not finite.
        """
        losses: dict[int, Numbers] = {}  # by iteration
        sources = {self._storage, self._waiting} if self._to_check else ()
        for source in sources:
            # Host-device synchronisation: reads the values recorded since the last check.
            for name, history in source.histories().items():
                if is_loss(name) or name in self._to_check:
                    for value, i in history.since(self._checked):
                        losses.setdefault(i, {})[name] = value
        for i in sorted(losses.keys() - self._tolerated):
            _refuse_non_finite(self._to_check, losses[i], i)
        self._checked = finished if self._alone else self._exchanged


def _refuse_non_finite(names: Iterable[str], losses: Numbers, iteration: int) -> None:
    for name in names:
        if not math.isfinite(losses.get(name, 0.0)):
            raise FloatingPointError(
                f"Loss became infinite or NaN at iteration={iteration}!\n"
                f"loss_dict = {losses}\n{NONFINITE_HINT}"
            )
