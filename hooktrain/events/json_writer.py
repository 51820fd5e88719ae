"""Writes metrics as lines of JSON, for programs to read."""

import json
import logging
import math
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hooktrain.events.storage import EventStorage, get_event_storage
from hooktrain.events.writer import Metrics, ScalarWriter
from hooktrain.utils import comm
from hooktrain.utils.file_io import AnyPath, atomic_write, lock_folder
from hooktrain.utils.names import is_loss

logger = logging.getLogger(__name__)

Row = dict[str, Any]
Line = tuple[int, bytes, Row]  # its end in the file, its text, its content

_encoder = json.JSONEncoder(sort_keys=True)

_CUT = "Rows of %s after the checkpoint, which this run computes again and compares: %d"
_LOST = "METRICS ARE LOST, if the checkpoint is of a run in this folder: %s has %d of %d bytes"
_EXACT = "Resumed exactly: %d rows computed again are equal"
_NOT_EXACT = (
    "Not resumed exactly: %s of iteration %d is %r, and was %r before the resume. This is expected "
    "if the configuration, the number of ranks or the machine has changed, or on an "
    "accelerator without torch.use_deterministic_algorithms. Otherwise see "
    "docs/guide/debugging.md"
)


class JSONWriter(ScalarWriter):
    """Appends metrics to a file, one JSON object per line, on the main process only.

    A line has the ``iteration`` and the metrics that :meth:`new_scalars` finds for it. Besides
    medians of losses it has ``mean_loss``, the mean of the total loss, or of the first loss, over
    the same iterations. A metric recorded later gets a separate line. NaN and infinities are
    written as the strings ``"nan"``, ``"inf"`` and ``"-inf"``. :func:`load_json_metrics` reads the
    file, and so does ``pandas.read_json(file, lines=True)``.

    A resume proves itself: the lines that :meth:`rewind` cuts are compared, value by value, with
    those that are computed and written again, and the verdict is logged. A small change of a
    weight may leave medians unchanged, but ``mean_loss`` shows it. Measurements of the machine are
    not compared: metrics recorded with ``reproducible=False``, and names with a word such as
    ``time``, ``seconds``, ``fps`` or ``memory``.

    Args:
        json_file: the file.
        window_size: how many iterations to smooth over, at least 1.
    """

    def __init__(self, json_file: AnyPath, window_size: int = 20) -> None:
        self._path = Path(json_file).absolute()
        self._cut: deque[Row] = deque()  # rows that have not been computed again yet
        self._equal = 0  # how many were computed again and are equal
        super().__init__(self._path.name, window_size)

    def write_scalars(self, storage: EventStorage, scalars: Metrics) -> None:
        """Append the new metrics.

        Raises:
            OSError: if the disk is full or fails.
        """
        rows: list[Row] = []
        histories = storage.histories()
        for iteration, metrics in scalars.items():
            row = {**metrics, "iteration": iteration}
            for name in filter(is_loss, metrics):
                if histories[name].smoothing_hint:
                    row.setdefault("mean_loss", histories[name].avg(self._window_size))
                    break
            rows.append(row)
        if rows:
            text = "".join(map(encode_row, rows))
            storage.info[self.name] = self._append(text.encode())
        for row in rows:
            self._compare(row, storage)

    def _append(self, text: bytes) -> int:
        """Append all of the text or nothing, and return the new size of the file."""
        # Unbuffered, since a buffer would later write the data that a full disk has refused. The
        # file is closed after each row, since some file systems send it to the server only then.
        # The folder is created if it is missing, since creating it before each row takes longer.
        try:
            file = open(self._path, "ab", buffering=0)  # noqa: SIM115
        except FileNotFoundError:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = open(self._path, "ab", buffering=0)  # noqa: SIM115
        with file:
            end = file.tell()
            try:
                while text:
                    written = file.write(text)
                    text = text[written:]
            except OSError as error:
                file.truncate(end)
                error.filename = str(self._path)
                raise
            return file.tell()

    def rewind(self, iteration: int) -> None:
        """Remove the lines written after the storage was saved, and those from ``iteration`` on.

        Incomplete lines are removed too. If a power cut has destroyed earlier lines, the log says
        so. If the file exists, its folder is locked first. If ``iteration`` is at least 1, the
        removed lines are kept for the comparison.

        Raises:
            RuntimeError: if another run is using the folder.
            ValueError: if another writer of this run has the name of the file.
        """
        super().rewind(iteration)
        if not comm.is_main_process():
            return
        storage = get_event_storage()
        data = b""
        if self._path.exists():
            lock_folder(self._path.parent)  # the lines may be another run's
            data = self._path.read_bytes()
        size = storage.info.get(self.name, len(data))
        lines = [*_read_lines(self._path, data)]
        size = self._with_late_row(lines, size, iteration - 1)
        self._cut.clear()
        kept = []
        for end, text, line in lines:
            if line["iteration"] < iteration and end <= size:
                kept.append(text.rstrip() + b"\n")
            elif iteration > 0:  # it is a resume
                self._cut.append(line)
        if iteration > 0:
            logger.info(_CUT, self._path, len(self._cut))
        whole = b"".join(kept)
        if whole != data:
            with atomic_write(self._path) as file:
                file.write(whole)
        storage.info[self.name] = len(whole)
        if len(data) < size:
            logger.error(_LOST, self._path, len(data), size)

    def _with_late_row(self, lines: list[Line], size: int, iteration: int) -> int:
        """The saved size, plus the row of the saved iteration if it was written after the save.

        This happens if a checkpointer runs before the writers.
        """
        storage = get_event_storage()
        found = self.new_scalars(storage).get(iteration)
        for end, _, row in lines:
            is_late = end > size and row["iteration"] == iteration
            if is_late and found and found.items() <= row.items():
                self.mark_written(storage)
                return end
        return size

    def run_files(self) -> list[Path]:
        """The metrics file."""
        return [self._path]

    def _compare(self, row: Row, storage: EventStorage) -> None:
        """Compare a row with the next one that a resume has cut: they come in the same order."""
        iteration = row["iteration"]
        while self._cut and self._cut[0]["iteration"] < iteration:
            self._cut.popleft()  # such as the last row of a run that ended there
        if not self._cut or self._cut[0]["iteration"] > iteration:
            return
        before = self._cut.popleft()
        for name, was in before.items():
            value = row.get(name, "missing")
            if value != was and storage.is_reproducible(name):
                logger.warning(_NOT_EXACT, name, iteration, value, was)
                self._cut.clear()
                self._equal = 0
                return
        self._equal += 1
        if not self._cut:
            self.close()

    def close(self) -> None:
        """Log how many rows were computed again and are equal, unless that was logged already."""
        if self._equal:
            logger.info(_EXACT, self._equal)
        self._equal = 0


def load_json_metrics(path: AnyPath) -> list[Row]:
    """Read a file of :class:`JSONWriter` into a list of dicts, one for each line.

    NaN and infinities become floats again. Incomplete lines, which a killed run may leave, are left
    out with a warning.

    Raises:
        FileNotFoundError: if the file does not exist.
    """
    path = Path(path)
    lines = []
    for _, _, line in _read_lines(path, path.read_bytes()):
        for name, value in line.items():
            if value in ("nan", "inf", "-inf"):
                line[name] = float(value)
        lines.append(line)
    return lines


def encode_row(line: Row) -> str:
    """The text of a row of numbers. Those that are not finite are replaced by their names."""
    for name, value in line.items():
        if not math.isfinite(value):
            line[name] = str(value)
    return _encoder.encode(line) + "\n"


def _read_lines(path: Path, data: bytes) -> Iterator[Line]:
    """The complete lines in the data of a file."""
    end = 0
    texts = data.splitlines(keepends=True)
    for number, text in enumerate(texts, 1):
        end += len(text)
        try:
            line = json.loads(text)
            int(line["iteration"])
        except (ValueError, TypeError, KeyError):
            logger.warning("%s: line %d is incomplete and left out", path, number)
        else:
            yield end, text, line
