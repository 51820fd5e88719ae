"""What the ranks tell each other while training, in as few bytes as it takes.

Most periods are alike: every rank has recorded the metrics that the main process has, in each
iteration, and nobody wants to stop. Then only numbers travel, and only their sums: one all-reduce,
of a size that hardly grows with the number of ranks, and nothing to do for each rank afterwards.
Anything else is said in objects, of which every rank gets everyone's.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hooktrain.utils import comm

__all__ = ["ReportExchange", "hooks_of_some_ranks"]

logger = logging.getLogger(__name__)

Report = dict[str, Any]

# The slowest rank's, where of the others it is the mean.
DATA_TIME = "data_time"

# Up to so many ranks the sums are taken in the order of ranks, as they are of objects: the same
# bits whatever the numbers are. Of more ranks that is so for float32, as most losses are: their
# sum in float64 is exact, unless they differ by a factor of a million or more.
RANKS_IN_ORDER = 8


class ReportExchange:
    """Brings the reports of all ranks together, again and again.

    The ranks must take the same way through this. So each decision depends on what all of them
    know: the names that the main process has sent, the iterations of the period, at which all
    ranks are alike, and the sum in which each rank says whether its report fits.
    """

    def __init__(self) -> None:
        self._names: tuple[str, ...] | None = None
        self._finished = 0

    def start(self, finished: int) -> None:
        """Begin anew, on all ranks, after so many finished iterations."""
        self._names, self._finished = None, finished

    def exchange(self, report: Report, finished: int) -> list[Report]:
        """Give this rank's report, get those of all. A collective.

        Args:
            report: ``{"stop": None}`` and maybe ``"metrics"``, as
                :meth:`~hooktrain.engine.metrics.LossRecorder.take_period` gives them. With
                anything else, it can only travel as an object.
            finished: how many iterations are finished, the same number on every rank.

        Returns:
            The reports in the order of ranks; or, if no rank says anything but metrics of the same
            names, a single one with the means over the ranks (of ``data_time``, the maximum).
        """
        iterations, self._finished = range(self._finished, finished), finished
        if self._names is None and iterations:
            self._names = comm.broadcast(_names_of(report))
        names = self._names or ()
        table = _table(report, names, iterations)
        # One number says whether a report does not fit; then each rank's waiting times stand in
        # places of their own, where adding up leaves them as they are.
        ranks, count = comm.get_world_size(), len(iterations) if names else 0
        rows = min(ranks, RANKS_IN_ORDER)
        values = torch.zeros(1 + (ranks + rows * len(names)) * count, dtype=torch.float64)
        times = values[1 : 1 + ranks * count].view(count, ranks)
        sums = values[1 + ranks * count :].view(rows, count, len(names))
        if table is None:
            values[0] = 1
        elif count:
            rank = comm.get_rank()
            times[:, rank] = table[:, 0]
            sums[rank % rows] = table[:, 1:]
        if comm.all_reduce(values)[0] > 0:
            reports = comm.all_gather(report)
            self._names = _names_of(reports[0]) or self._names
            return reports
        if not count:
            return [report]
        total = sums[0]
        for row in sums[1:]:
            total = total + row
        means = (total / ranks).tolist()
        slowest = times.amax(1).tolist()
        merged = [
            (iteration, {**dict(zip(names, row, strict=True)), DATA_TIME: slow})
            for iteration, row, slow in zip(iterations, means, slowest, strict=True)
        ]
        return [{**report, "metrics": merged}]


def hooks_of_some_ranks(names: Sequence[str], sync_period: int) -> frozenset[str]:
    """The names of hooks that some ranks have and others do not. A collective.

    Where all ranks have the same ones, that costs one broadcast and one sum of one number.

    Raises:
        ValueError: on every rank, if they would exchange reports at different iterations.
    """
    first_names, first_period = comm.broadcast((names, sync_period))
    if not comm.any_rank(set(first_names) != set(names) or first_period != sync_period):
        return frozenset()
    gathered = comm.all_gather((names, sync_period))
    periods = [period for _, period in gathered]
    if len({*periods}) > 1:
        raise ValueError(
            f"gather_metric_period (sync_period) must be the same on all ranks, but is {periods}"
        )
    everywhere = [frozenset(of_rank) for of_rank, _ in gathered]
    partial = frozenset[str]().union(*everywhere) - frozenset.intersection(*everywhere)
    logger.info(
        "Registered on some ranks only: %s. A checkpointer that runs on every rank also saves "
        "every rank's random state; who writes is decided inside.",
        sorted(partial),
    )
    return partial


def _names_of(report: Report) -> tuple[str, ...]:
    """The metrics of the first iteration in a report, but for ``data_time``."""
    period: Sequence[tuple[int, Mapping[str, float]]] = report.get("metrics") or [(0, {})]
    return tuple(name for name in period[0][1] if name != DATA_TIME)


def _table(report: Report, names: tuple[str, ...], iterations: Sequence[int]) -> Tensor | None:
    """The metrics, a row for each iteration with ``data_time`` first; None if they do not fit."""
    if report["stop"] is not None or not report.keys() <= {"stop", "metrics"}:
        return None
    period: Sequence[tuple[int, Mapping[str, float]]] = report.get("metrics", [])
    if [iteration for iteration, _ in period] != (list(iterations) if names else []):
        return None
    columns = (DATA_TIME, *names)
    expected = frozenset(columns)
    if any(metrics.keys() != expected for _, metrics in period):
        return None
    rows = [[metrics[name] for name in columns] for _, metrics in period]
    return torch.tensor(rows, dtype=torch.float64).view(len(rows), len(columns))
