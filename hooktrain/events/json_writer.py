"""Metrics as lines of JSON, which programs read."""

import json
import logging
import math
import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

from hooktrain.events.storage import EventStorage, get_event_storage
from hooktrain.events.writer import Metrics, ScalarWriter
from hooktrain.utils import comm
from hooktrain.utils.file_io import atomic_write, lock_folder

logger = logging.getLogger(__name__)

_encoder = json.JSONEncoder(sort_keys=True)


class JSONWriter(ScalarWriter):
    """Appends metrics to a file, one JSON object a line, on the main process only.

    A line has the ``iteration`` and the metrics that :meth:`new_scalars` finds for it. A metric
    that is put later gets another line. NaN and infinities are written as the strings ``"nan"``,
    ``"inf"`` and ``"-inf"``. :func:`load_json_metrics` reads the file, and so does
    ``pandas.read_json(file, lines=True)``.

    Args:
        json_file: the file.
        window_size: how many iterations to smooth over, at least 1.
    """

    def __init__(
        self, json_file: str | os.PathLike[str], window_size: int = 20
    ) -> None:
        self._path = Path(json_file)
        super().__init__(self._path.name, window_size)

    def write_scalars(self, storage: EventStorage, scalars: Metrics) -> None:
        """Append what is new.

        Raises:
            OSError: if the disk is full or fails.
        """
        text = ""
        for iteration, metrics in scalars.items():
            line = {**metrics, "iteration": iteration}
            text += _encode(line)
        if text:
            size = self._append(text.encode())
            storage.file_sizes[self.name] = size

    def _append(self, text: bytes) -> int:
        """Append all of the text or nothing, and return the new size of the file."""
        # There is no buffer, since one would write later what a full disk has refused.
        with self._open() as file:
            end = file.tell()
            try:
                while text:
                    written = file.write(text)
                    text = text[written:]
            except OSError:
                file.truncate(end)
                raise
            return file.tell()

    def _open(self) -> FileIO:
        try:
            return open(self._path, "ab", buffering=0)
        except FileNotFoundError:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            return open(self._path, "ab", buffering=0)

    def rewind(self, iteration: int) -> None:
        """Remove what was written after the storage was saved, or from ``iteration`` on.

        Incomplete lines are removed too. If a power cut has taken lines that were written before,
        the log says so. The folder of a file that is there is locked first.

        Raises:
            RuntimeError: if another run is using the folder.
            ValueError: if another writer of this run writes to the file.
        """
        storage = get_event_storage()
        path = str(self._path.resolve())
        if storage.writers.setdefault(path, self) is not self:
            raise ValueError(f"two writers of {path!r}: are hooks registered twice?")
        if not comm.is_main_process():
            return
        super().rewind(iteration)
        saved_size = storage.file_sizes.get(self.name)
        data = b""
        if self._path.exists():
            lock_folder(self._path.parent)  # the lines may be another run's
            data = self._path.read_bytes()
        if saved_size is not None:
            saved_at = iteration - 1
            saved_size = self._with_late_write(data, saved_size, saved_at)
        kept = []
        last = -1
        for text, line in _read_lines(self._path, data[:saved_size]):
            if line["iteration"] < iteration:
                text = text.rstrip() + b"\n"
                kept.append(text)
                last = max(last, line["iteration"])
        cut = b"".join(kept)
        if cut != data:
            with atomic_write(self._path) as file:
                file.write(cut)
        storage.file_sizes[self.name] = len(cut)
        if saved_size is not None and len(data) < saved_size:
            lost = "METRICS ARE LOST: %s has %d of %d bytes, nothing after iteration %d"
            logger.error(lost, self._path, len(data), saved_size, last)

    def _with_late_write(self, data: bytes, size: int, iteration: int) -> int:
        """The saved size, and the line of the saved iteration if it was written after the save.

        This happens where a checkpointer comes before the writers.
        """
        storage = get_event_storage()
        found = self.new_scalars(storage)
        if iteration not in found:
            return size
        wanted = dict(found[iteration])
        wanted["iteration"] = iteration
        end = size
        for text, line in _read_lines(self._path, data[size:]):
            end += len(text)
            if wanted.items() <= line.items():
                self.mark_written(storage)
                return end
        return size


def load_json_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read a file of :class:`JSONWriter` into a list with a dict for each line.

    NaN and infinities become floats again. Incomplete lines, which a killed run may leave, are left
    out with a warning.

    Raises:
        FileNotFoundError: if there is no such file.
    """
    path = Path(path)
    lines = []
    for _, line in _read_lines(path, path.read_bytes()):
        for name, value in line.items():
            if isinstance(value, str):
                line[name] = float(value)
        lines.append(line)
    return lines


def _encode(line: dict[str, Any]) -> str:
    for name, value in line.items():
        if isinstance(value, float) and not math.isfinite(value):
            line[name] = str(value)
    return _encoder.encode(line) + "\n"


def _read_lines(path: Path, data: bytes) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The complete lines in the data of a file, each with the dict that it holds."""
    texts = data.splitlines(keepends=True)
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            int(line["iteration"])
        except (ValueError, TypeError, KeyError):
            logger.warning("%s: line %d is incomplete and left out", path, number)
        else:
            yield text, line
