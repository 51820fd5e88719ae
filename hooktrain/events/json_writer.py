"""Metrics as lines of JSON, for programs."""

import json
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hooktrain.events.storage import get_event_storage
from hooktrain.events.writer import EventWriter, UnwrittenScalars
from hooktrain.utils import comm
from hooktrain.utils.file_io import atomic_write

logger = logging.getLogger(__name__)


class JSONWriter(EventWriter):
    """Appends metrics to a file, one JSON object a line, on the main process only.

    A line has ``iteration`` and the metrics that :meth:`UnwrittenScalars.find` finds for
    it, with sorted keys. A metric that is put later gets another line. NaN and infinities
    are the strings ``"nan"``, ``"inf"`` and ``"-inf"``. :func:`load_json_metrics` reads it
    back, and so does ``pandas.read_json(file, lines=True)``.

    What ``write()`` has written survives the process; ``close()`` brings it to the disk.

    Args:
        json_file: the file.
        window_size: how many iterations to smooth over, at least 1.
    """

    def __init__(
        self,
        json_file: str | os.PathLike[str],
        window_size: int = 20,
    ) -> None:
        self._path = Path(json_file)
        self._unwritten = UnwrittenScalars(self._path.name, window_size)

    def write(self) -> None:
        """Append what is new.

        Raises:
            OSError: if the disk is full or fails; what was new still is.
        """
        if not comm.is_main_process():
            return
        storage = get_event_storage()
        found = self._unwritten.find(storage)
        if found:
            text = ""
            for iteration, metrics in found.items():
                text += _encode({**metrics, "iteration": iteration})
            self._append(text.encode())
            self._unwritten.mark_written(storage, found)

    def _append(self, text: bytes) -> None:
        """Write all or nothing."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Without a buffer: one would write later what a full disk has refused.
        with open(self._path, "ab", buffering=0) as file:
            end = file.tell()
            try:
                while text:
                    written = file.write(text)
                    text = text[written:]
            except OSError:
                file.truncate(end)
                raise

    def rewind(self, iteration: int) -> None:
        """Remove the lines from ``iteration`` on.

        Incomplete lines of a killed run are removed too. What is not smoothed and missing
        in the earlier lines is written again.
        """
        if not comm.is_main_process():
            return
        kept = []
        if self._path.exists():
            for line in _read_lines(self._path):
                if line["iteration"] < iteration:
                    kept.append(line)
            with atomic_write(self._path) as file:
                for line in kept:
                    file.write(_encode(line).encode())
        in_file: set[tuple[str, int]] = set()
        last = -1
        for line in kept:
            last = max(last, line["iteration"])
            for name in line:
                in_file.add((name, line["iteration"]))
        self._unwritten.rewind(lambda *entry: entry in in_file)
        storage = get_event_storage()
        before = storage.written.get(self._path.name, -1)
        if last < before:
            text = "METRICS ARE LOST: %s ends at iteration %d, but was written up to %d"
            logger.error(text, self._path, last, before)

    def close(self) -> None:
        """Bring the file to the disk."""
        if self._path.exists() and comm.is_main_process():
            with open(self._path, "rb") as file:
                os.fsync(file.fileno())


def load_json_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read a file of :class:`JSONWriter`: a dict a line.

    NaN and infinities are floats again. Incomplete lines, as a killed run may leave, are
    left out with a warning.

    Raises:
        FileNotFoundError: if there is no such file.
    """
    lines = list(_read_lines(Path(path)))
    for line in lines:
        for name, value in line.items():
            if isinstance(value, str):
                line[name] = float(value)
    return lines


def _encode(line: dict[str, Any]) -> str:
    for name, value in line.items():
        if isinstance(value, float) and not math.isfinite(value):
            line[name] = str(value)
    return json.dumps(line, sort_keys=True) + "\n"


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, text in enumerate(file, 1):
            try:
                line = json.loads(text)
                int(line["iteration"])
            except (ValueError, TypeError, KeyError):
                logger.warning("%s: line %d is incomplete and left out", path, number)
            else:
                yield line
