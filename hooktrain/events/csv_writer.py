"""Metrics as a table, for spreadsheets and pandas."""

import csv
import io
import os
from collections.abc import Iterable
from typing import Any

from hooktrain.events.json_writer import JSONWriter


class CSVWriter(JSONWriter):
    """Appends metrics to a file with the columns ``iteration``, ``name`` and ``value``.

    It has the values of :class:`JSONWriter`, a line each, so a metric that first comes later needs
    no new column. ``pandas.read_csv(file).pivot(index="iteration", columns="name",
    values="value")`` has a column for each metric. Files survive and resume as those of
    :class:`JSONWriter` do.

    Args:
        csv_file: the file; its folder is made if there is none.
        window_size: the number of iterations to smooth over, at least 1.
    """

    _header = "iteration,name,value\n"

    def __init__(self, csv_file: str | os.PathLike[str], window_size: int = 20) -> None:
        super().__init__(csv_file, window_size)

    def _encode(self, scalars: Iterable[tuple[str, float, int]]) -> str:
        lines = io.StringIO()
        rows = ((iteration, name, value) for name, value, iteration in scalars)
        csv.writer(lines, lineterminator="\n").writerows(rows)
        return lines.getvalue()

    @staticmethod
    def _decode(text: str) -> dict[str, Any]:
        # Without NUL, which a power cut may leave and Python 3.10 does not read.
        iteration, name, value = next(csv.reader([text.replace("\0", "")]))
        return {name: float(value), "iteration": int(iteration)}
