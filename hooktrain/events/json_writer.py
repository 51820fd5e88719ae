"""Metrics as lines of JSON, for programs."""

import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

from hooktrain.events.storage import get_event_storage
from hooktrain.events.writer import EventWriter, UnwrittenScalars
from hooktrain.utils import comm
from hooktrain.utils.file_io import atomic_write, set_aside

logger = logging.getLogger(__name__)

_ENCODER = json.JSONEncoder(sort_keys=True, allow_nan=False)

# JSON has no such numbers. This is how they are written; float() reads it.
_SPELLED = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


class JSONWriter(EventWriter):
    """Appends metrics to a file, one JSON object a line, the main process only.

    A line has ``iteration`` and the metrics that were put at it. Metrics whose hint says so are
    smoothed: each ``write()`` has one value, the median of the last iterations. Of others it has
    all since the last ``write()``, but of those that are put at each iteration only the last. Keys
    are sorted, and the lines of one ``write()`` are in increasing order of iteration. A metric that
    is put late, for an iteration long written, gets another line. JSON knows no NaN and infinities;
    they are written as the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``.
    :func:`load_json_metrics` reads it all back.

    What ``write()`` has written survives the process, however that ends; ``close()`` brings it to
    the disk, which takes too long to do each time. The file is made by the first ``write()`` that
    has something to write.

    Args:
        json_file: the file; its folder is made if there is none.
        window_size: the number of iterations to smooth over, at least 1.

    Raises:
        IsADirectoryError: if ``json_file`` is a folder.
    """

    def __init__(
        self, json_file: str | os.PathLike[str], window_size: int = 20
    ) -> None:
        self._path = Path(json_file)
        if self._path.is_dir():  # a new run would move it aside, with all that is in it
            raise IsADirectoryError(
                f"json_file must be a file, not the folder {json_file!r}"
            )
        self._unwritten = UnwrittenScalars(window_size)
        self._file: FileIO | None = None

    def write(self) -> None:
        """Append what is new.

        Raises:
            ValueError: for a metric that is named ``iteration``.
            OSError: if the disk is full or fails; what was new still is.
        """
        storage = get_event_storage()
        scalars = self._unwritten.find(storage) if comm.is_main_process() else ()
        if not scalars:
            return
        storage.written[self._path.name] = self._append(self._encode(scalars).encode())
        self._unwritten.mark_written()

    # The format, which a subclass may change: the first line, lines of metrics, and one line back.
    _header = ""
    _decode: Callable[[str], Any] = staticmethod(json.loads)

    def _encode(self, scalars: Iterable[tuple[str, float, int]]) -> str:
        lines: dict[int, dict[str, Any]] = {}
        for name, value, iteration in scalars:
            if name == "iteration":
                raise ValueError(
                    "no metric may be named 'iteration': each line has that already"
                )
            line = lines.setdefault(iteration, {"iteration": iteration})
            line[name] = value if math.isfinite(value) else _SPELLED[str(value)]
        return "".join(_ENCODER.encode(line) + "\n" for line in lines.values())

    def _append(self, text: bytes) -> int:
        """Write, all or nothing; return the size of the file."""
        if self._file is not None and not os.fstat(self._file.fileno()).st_nlink:
            self.close()  # somebody has deleted it: make another
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Without a buffer: one would try again later to write what a full disk has refused.
            self._file = FileIO(self._path, "a+")
            if self._file.tell():
                self._file.seek(-1, os.SEEK_END)
                if self._file.read() != b"\n":
                    text = (
                        b"\n" + text
                    )  # the last line is incomplete; do not spoil ours
        end = self._file.seek(0, os.SEEK_END)
        text = text if end else self._header.encode() + text
        try:
            while text:
                text = text[self._file.write(text) :]
        except OSError:
            self._file.truncate(end)
            raise
        return self._file.tell()

    def rewind(self, iteration: int) -> None:
        """Make the file end before ``iteration``, so that the run continues it without overlap.

        If ``iteration`` is 0, a new run begins: a file that is there already is renamed to the
        first free ``<name>.1``, ``<name>.2``, ... Otherwise the lines from ``iteration`` on are
        removed, and those that are incomplete, as a run leaves them that is killed. What is missing
        of earlier ones is said loudly, and what was not smoothed is written again.
        """
        if not comm.is_main_process():
            return
        self.close()
        self._unwritten.rewind(())
        size = self._path.stat().st_size if self._path.exists() else 0
        if size < (before := get_event_storage().written.get(self._path.name, 0)):
            message = "METRICS ARE LOST: %s has %d bytes, but had %d at the checkpoint"
            logger.error(message, self._path, size, before)
        if not size:
            return
        if iteration == 0:
            set_aside(self._path)
            return
        lines = self._read_lines(self._path)
        kept = [(text, line) for text, line in lines if line["iteration"] < iteration]
        with atomic_write(self._path) as file:
            file.write(self._header.encode())
            file.writelines(f"{text}\n".encode() for text, _ in kept)
        self._unwritten.rewind(
            (name, line["iteration"]) for _, line in kept for name in line
        )

    @classmethod
    def _read_lines(cls, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
        """The valid lines, each as the text in the file and as a dict."""
        broken = []
        with open(path, encoding="utf-8", errors="replace") as file:
            for number, text in enumerate(file, 1):
                if text == cls._header:
                    continue
                try:
                    line = cls._decode(text)
                except ValueError:
                    line = None
                if isinstance(line, dict) and isinstance(line.get("iteration"), int):
                    yield text.rstrip("\n"), line
                else:
                    broken.append(number)
        if broken:
            message = "%s: left out %d lines that are no complete metrics, the first one is line %d"
            logger.warning(message, path, len(broken), broken[0])

    def close(self) -> None:
        """Bring the file to the disk."""
        file, self._file = self._file, None
        if file is not None:
            with file:
                os.fsync(file.fileno())


def load_json_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read a file of :class:`JSONWriter`: a dict a line, in the order of the file.

    NaN and infinities are floats again. Lines that are no complete JSON object with an
    ``iteration`` are left out: where a run was killed while it wrote, or is writing now, the last
    line may be incomplete. A warning tells how many.

    Raises:
        FileNotFoundError: if there is no such file.
    """
    return [
        {k: float(v) if v in _SPELLED.values() else v for k, v in line.items()}
        for _, line in JSONWriter._read_lines(Path(path))
    ]
