"""The losses of the steps: recorded without waiting, checked, brought together across ranks."""

import math
import operator
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

from torch import Tensor

from hooktrain.utils import comm
from hooktrain.utils.events import EventStorage
from hooktrain.utils.events.pending import fetch, read_scalar

# The metrics of one iteration, by name.
Metrics = Mapping[str, Any]

RESERVED = frozenset({"data_time", "rank_data_time"})


class LossRecorder:
    """Records the losses of each step in an EventStorage, and checks that they are finite.

    On the CPU a loss is checked when it is recorded, before the update. Elsewhere that would make
    the host wait for the device: the losses stay there and are checked by :meth:`check`, at the
    end of a period. With several ranks they are kept until :meth:`merge` records the means.

    Args:
        check_at_once: whether to check at once where that is free.
    """

    def __init__(self, check_at_once: bool = True) -> None:
        self.check_at_once = check_at_once
        self._period: list[tuple[int, Metrics]] = []
        self._checked_names: set[str] = set()
        self._recorded = self._checked = -1
        self._tolerated: set[int] = set()
        self._alone = comm.get_world_size() == 1

    def tolerate(self, iteration: int) -> None:
        """Let the losses of an iteration be what they are: no update is made of them."""
        self._tolerated.add(iteration)

    def reset(self, iteration: int) -> None:
        """Forget what is pending: ``iteration`` is the last one of a loaded state."""
        self._period.clear()
        self._tolerated.clear()
        self._recorded = self._checked = iteration

    def rewind(self, iteration: int) -> None:
        """Forget what lies after ``iteration``, since the run goes on right after it."""
        self._alone = comm.get_world_size() == 1  # asked once a run, since it takes as long as all
        self._period = [entry for entry in self._period if entry[0] <= iteration]
        self._tolerated = {i for i in self._tolerated if i <= iteration}
        self._recorded = self._checked = min(self._checked, iteration)

    def record(
        self,
        storage: EventStorage,
        iteration: int,
        metrics: Metrics,
        data_time: float,
        prefix: str = "",
        add_up: bool = True,
    ) -> None:
        """Record one step: its losses, their sum as ``total_loss``, and the wait for data.

        Without ``add_up`` the metrics are what a model's own step returned: there is no sum, and
        those with "loss" in their name must be finite.

        Raises:
            FloatingPointError: if a loss is not finite, where it costs nothing to know.
            ValueError: for a name that is written here.
        """
        if not RESERVED.isdisjoint(metrics):
            raise ValueError(f"no loss may be named {' or '.join(RESERVED)}: those are measured")
        alone = self._alone
        check_now = alone and self.check_at_once
        total_name = prefix + "total_loss"
        # The sum comes first where metrics are shown.
        values: dict[str, Any] = {total_name: 0.0} if add_up else {}
        total: Any = None
        for name, value in metrics.items():
            if isinstance(value, Tensor):
                # On the CPU reading is free: no synchronisation.
                check_now = check_now and value.is_cpu
                value = value.item() if check_now else value.detach()
            if not alone:
                value = read_scalar(name, value)  # a copy, since it waits until the period ends
            values[prefix + name] = value
            if add_up:
                total = value if total is None else total + value
        if add_up:
            values[total_name] = total
            checked = [total_name]
        else:
            checked = [name for name in values if "loss" in name]
        self._recorded = iteration
        if not check_now:
            self._checked_names.update(checked)
        if not alone:
            storage.put_scalar("rank_data_time", data_time, True, iteration)
            self._period.append((iteration, {**values, "data_time": data_time}))
            return
        if check_now:
            for name in checked:
                if not math.isfinite(values[name]) and iteration not in self._tolerated:
                    raise non_finite_loss(iteration, values)
            self._checked = iteration
        for name, value in values.items():
            storage.put_scalar(name, value, True, iteration)
        storage.put_scalar("data_time", data_time, True, iteration)

    def take_period(self) -> list[tuple[int, dict[str, float]]]:
        """What this rank has recorded since the last call, for the other ranks."""
        period, self._period = self._period, []
        return read_period(period)

    def merge(
        self,
        storage: EventStorage,
        reports: Sequence[Sequence[tuple[int, Mapping[str, float]]]],
    ) -> None:
        """Record the means of what all ranks took from their periods."""
        for iteration, metrics in merge_periods(reports):
            for name, value in metrics.items():
                storage.put_scalar(name, value, cur_iter=iteration)

    def check(self, storage: EventStorage) -> None:
        """Check all recorded losses that were not checked yet.

        Raises:
            FloatingPointError: for the first one that was not finite, with its iteration.
        """
        for i, metrics in read_period(self._period):
            finite = all(math.isfinite(metrics[n]) for n in self._checked_names & set(metrics))
            if not finite and i not in self._tolerated:
                raise non_finite_loss(i, metrics)
        if self._checked >= self._recorded or self._period:
            # What the ranks have not brought together yet is left to their common verdict.
            return
        histories = storage.histories()
        for name in self._checked_names & set(histories):
            # Host-device synchronisation: reads what was recorded since the last reading.
            for value, i in histories[name].since(self._checked + 1):
                if not math.isfinite(value) and i not in self._tolerated:
                    at = {n: v for n, h in histories.items() for v, j in h.since(i) if j == i}
                    raise non_finite_loss(i, {n: v for n, v in at.items() if "loss" in n})
        self._checked = self._recorded
        self._tolerated.clear()


def non_finite_loss(iteration: int, losses: Mapping[str, float]) -> FloatingPointError:
    """The error that names the iteration and each of its losses."""
    return FloatingPointError(
        f"Loss became infinite or NaN at iteration={iteration}!\nloss_dict = {dict(losses)}"
    )


def as_loss_dict(output: Any) -> dict[str, Tensor]:
    """What a model returned in training, as losses by name.

    Raises:
        TypeError: for anything but a tensor or a dict of tensors.
        ValueError: for an empty dict, or one that names its own total beside other losses.
    """
    if isinstance(output, Tensor):
        return {"total_loss": output}
    if not isinstance(output, Mapping) or not all(isinstance(v, Tensor) for v in output.values()):
        raise TypeError(
            f"in training mode the model must return a loss or a dict of losses (tensors), "
            f"but it returned {output!r}"
        )
    if not output:
        raise ValueError("the model returned an empty dict of losses")
    if "total_loss" in output and len(output) > 1:
        raise ValueError(
            f"'total_loss' is the name of the sum, so it cannot be one of several losses: "
            f"{list(output)}"
        )
    return dict(output)


def sum_losses(losses: Mapping[str, Any]) -> Any:
    """The sum in the dict's order, without the addition to zero that ``sum`` starts with."""
    values = iter(losses.values())
    total = next(values)
    for value in values:
        total = total + value
    return total


def read_period(period: Sequence[tuple[int, Metrics]]) -> list[tuple[int, dict[str, float]]]:
    """The metrics of several iterations as floats: one stack and one transfer for all tensors."""
    queue = [(value, i) for i, metrics in period for value in metrics.values()]
    fetch([queue])  # host-device synchronisation: once a period
    values = iter(queue)
    return [(i, {name: float(next(values)[0]) for name in metrics}) for i, metrics in period]


def merge_periods(
    reports: Sequence[Sequence[tuple[int, Mapping[str, float]]]],
) -> list[tuple[int, dict[str, float]]]:
    """The mean over the ranks that have a metric; of ``data_time``, the slowest rank's.

    Args:
        reports: for each rank, its metrics by iteration. The ranks need not have the same names.
            A single one is taken as it is.
    """
    if len(reports) == 1:
        return [(iteration, dict(metrics)) for iteration, metrics in reports[0]]
    gathered: dict[tuple[int, str], list[float]] = {}
    for report in reports:
        for iteration, metrics in report:
            for name, value in metrics.items():
                gathered.setdefault((iteration, name), []).append(value)
    merged: dict[int, dict[str, float]] = {}
    for (iteration, name), values in gathered.items():
        # Not sum(), which rounds differently from Python 3.12 on.
        total = reduce(operator.add, values, 0.0)
        mean = max(values) if name == "data_time" else total / len(values)
        merged.setdefault(iteration, {})[name] = mean
    return sorted(merged.items())
