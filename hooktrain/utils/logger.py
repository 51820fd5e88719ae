"""Logging to the terminal and to a file, a progress bar, and helpers that log less often."""

import logging
import math
import os
import shutil
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Literal

from tabulate import tabulate
from termcolor import colored

from hooktrain.utils.file_io import on_disk

LEVELS = {"quiet": logging.WARNING, "normal": logging.INFO, "debug": logging.DEBUG}
_COLUMNS = 100  # the longest line of metrics; a terminal may be narrower
_SECONDS_BETWEEN_BARS = 0.1
_KeyPart = Literal["caller", "message"]


class _Handler(logging.Handler):
    """One that we have attached. Says once that it cannot write, and the program goes on."""

    _failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        error = sys.exc_info()[1]
        if not isinstance(
            error, OSError
        ):  # such as a message that does not fit its arguments
            super().handleError(record)
        elif not self._failed:
            self._failed = True
            where = getattr(self, "baseFilename", "stdout")
            # The other handlers take this line; here it is lost like those before it.
            logging.getLogger(record.name).error("Cannot write to %s: %s", where, error)


class _StdoutHandler(_Handler, logging.StreamHandler):  # type: ignore[type-arg]  # not in 3.10
    """Writes to what ``sys.stdout`` is now, not to what it was when logging was set up."""

    bar = ""  # what stands in the last line, for all loggers
    drawn_at = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stdout is not None:  # the process was started without one
            self.stream = sys.stdout
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        return _StdoutHandler.erase() + super().format(record)

    @staticmethod
    def erase() -> str:
        """What makes the last line empty; notebooks know no better way."""
        bar, _StdoutHandler.bar = _StdoutHandler.bar, ""
        return bar and f"\r{' ' * len(bar)}\r"

    def draw(self, bar: str) -> None:
        """Put a bar into the last line, or nothing."""
        with self.lock, suppress(OSError):  # type: ignore[union-attr]
            sys.stdout.write(self.erase() + bar)
            sys.stdout.flush()
        _StdoutHandler.bar, _StdoutHandler.drawn_at = bar, time.monotonic()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """After a closed pipe, as of ``| head``, what is printed goes nowhere and fails nowhere."""
        if isinstance(sys.exc_info()[1], OSError):
            with suppress(OSError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self.stream.fileno())
        super().handleError(record)


class _FileHandler(_Handler, logging.FileHandler):
    """A log file."""


class _TerminalFormatter(logging.Formatter):
    """The time in green, the level in red from WARNING on; colours where the terminal has them."""

    def __init__(self, rename: tuple[str, str] | None, color: bool) -> None:
        super().__init__(
            "%(asctime)s", datefmt="%H:%M:%S"
        )  # what makes the base set asctime
        self._rename = rename  # None shows no names
        self._plain = not color

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        columns = min(_COLUMNS, shutil.get_terminal_size((_COLUMNS, 24)).columns)
        header, message = record.asctime, _fold(record.message, columns - 9)
        if self._rename is not None:
            name, abbreviated = self._rename
            inside = f"{record.name}.".startswith(f"{name}.")
            header += " " + (
                abbreviated + record.name[len(name) :] if inside else record.name
            )
        header = colored(header, "green", no_color=self._plain or None)
        if record.levelno < logging.WARNING:
            return f"{header} {message}"
        attrs = ["bold"] if record.levelno < logging.ERROR else ["bold", "underline"]
        level = colored(
            record.levelname, "red", attrs=attrs, no_color=self._plain or None
        )
        return f"{header} {level} {message}"


def _fold(message: str, columns: int) -> str:
    """Break a line that is too long between its fields, which two blanks part."""
    if len(message) <= columns or "\n" in message:
        return message
    lines = [""]
    for field in message.split("  "):
        if lines[-1] and len(lines[-1]) + len(field) + 2 > columns:
            lines.append("")
        lines[-1] += f"  {field}" if lines[-1] else field
    return f"\n{' ' * 9}".join(lines)


def setup_logger(
    output: str | os.PathLike[str] | None = None,
    distributed_rank: int = 0,
    *,
    color: bool = True,
    name: str = "hooktrain",
    abbrev_name: str | None = None,
    enable_propagation: bool = False,
    configure_stdout: bool = True,
    level: str = "normal",
) -> logging.Logger:
    """Make a logger write to the terminal, and everything from DEBUG on to a file.

    Lines on the terminal have the time; those in the file have date, name and level too. On a
    terminal that a person watches, and in a notebook, a progress bar stands below the lines.

    Calling it again replaces what the last call for this name set up, and closes its file. Handlers
    that others have added stay.

    Args:
        output: a file if it ends in .txt or .log, else a folder that gets a log.txt; both are
            created if need be, and appended to if there already. None writes no file.
        distributed_rank: ranks above 0 write to another file, with ``.rank{N}`` added to its name,
            and not to the terminal.
        color: colours on the terminal, where it has them (NO_COLOR and FORCE_COLOR decide).
        name: of the logger; "" is the root of all loggers.
        abbrev_name: replaces ``name`` where the terminal shows it; None is "ht" for "hooktrain",
            and the name itself for others.
        enable_propagation: also pass records on to the loggers above.
        configure_stdout: False writes nothing to the terminal.
        level: what the terminal shows: ``"quiet"`` is warnings and errors, ``"normal"`` is from
            INFO on, and ``"debug"`` is everything, each line with the name of its logger.

    Returns:
        The logger.

    Raises:
        ValueError: for another ``level``, or an address such as ``s3://...``.
    """
    if level not in LEVELS:
        raise ValueError(f"level must be one of {list(LEVELS)}, but got {level!r}")
    close_logger(name)
    logger = logging.getLogger(name)
    logger.setLevel(logging.DEBUG)
    logger.propagate = enable_propagation
    if configure_stdout and distributed_rank == 0:
        stdout = _StdoutHandler(sys.stdout)
        stdout.setLevel(LEVELS[level])
        if abbrev_name is None:
            abbrev_name = "ht" if name == "hooktrain" else name
        rename = (name, abbrev_name) if level == "debug" else None
        stdout.setFormatter(_TerminalFormatter(rename, color))
        logger.addHandler(stdout)
    if output is not None:
        path = Path(on_disk(output))
        if path.suffix not in (".txt", ".log"):
            path = path / "log.txt"
        if distributed_rank > 0:
            path = path.with_name(f"{path.name}.rank{distributed_rank}")
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _FileHandler(path, encoding="utf-8")
        line = "[%(asctime)s] %(name)s %(levelname)s: %(message)s"
        file.setFormatter(logging.Formatter(line, "%Y-%m-%d %H:%M:%S"))
        logger.addHandler(file)
    return logger


def close_logger(name: str = "hooktrain") -> None:
    """Undo ``setup_logger``: remove its handlers, close its file, go back to logging's defaults."""
    logger = logging.getLogger(name)
    for handler in list(logger.handlers):
        if isinstance(handler, _Handler):
            logger.removeHandler(handler)
            handler.close()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


def show_progress(
    what: str, done: int, total: int, seconds_left: float | None = None
) -> bool:
    """Draw a progress bar below the lines on the terminal, if a person watches one.

    The next line takes its place. It is drawn ten times a second at most, by the main thread.

    Args:
        what: what takes so long.
        done: how much of it is done; all of it removes the bar.
        total: all there is to do; less than 1 if that is unknown.
        seconds_left: the time that is left, if it is known.

    Returns:
        Whether somebody watches, so that lines about the same are not needed.
    """
    handlers = logging.getLogger("hooktrain").handlers
    ours = [
        h for h in handlers if isinstance(h, _StdoutHandler) and h.level <= logging.INFO
    ]
    in_background = threading.current_thread() is not threading.main_thread()
    if not ours or sys.stdout is None or in_background:
        return False
    # A notebook's stream is no terminal, and does what we need of one.
    if not sys.stdout.isatty() and not type(sys.stdout).__module__.startswith(
        "ipykernel"
    ):
        return False
    if 0 < total <= done:
        ours[0].draw("")
    elif (
        not ours[0].bar or time.monotonic() - ours[0].drawn_at >= _SECONDS_BETWEEN_BARS
    ):
        share = (
            f"{done / total:4.0%} [{'#' * (30 * done // total):-<30}] "
            if total > 0
            else ""
        )
        bar = f"{what} {share}{done}{f'/{total}' if total > 0 else ''}"
        bar += "" if seconds_left is None else f"  eta: {pretty_seconds(seconds_left)}"
        ours[0].draw(bar[: shutil.get_terminal_size().columns - 1])
    return True


def pretty_seconds(seconds: float) -> str:
    """Hours, minutes and seconds, such as 27:00:05."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


_calls: defaultdict[object, Iterator[int]] = defaultdict(count)
_last_logged_at: dict[object, float] = {}


def log_first_n(
    lvl: int,
    msg: str,
    n: int = 1,
    *,
    name: str | None = None,
    key: _KeyPart | tuple[_KeyPart, ...] = "caller",
) -> None:
    """Log only the first n times.

    Args:
        lvl: the level, such as ``logging.INFO``.
        msg: the message.
        n: how many times.
        name: of the logger; None is the caller's module.
        key: what is counted: calls from one line ("caller"), equal messages ("message"), or equal
            messages from one line (``("caller", "message")``).
    """
    site, logger = _caller(name)
    counted = "first", lvl, "caller" in key and site, "message" in key and msg
    if next(_calls[counted]) < n:
        logger.log(lvl, msg, stacklevel=2)


def log_every_n(lvl: int, msg: str, n: int = 1, *, name: str | None = None) -> None:
    """Log the first of every n calls from one line of code.

    Args:
        lvl: the level, such as ``logging.INFO``.
        msg: the message.
        n: the period in calls, at least 1.
        name: of the logger; None is the caller's module.
    """
    site, logger = _caller(name)
    if next(_calls["every", lvl, site]) % n == 0:
        logger.log(lvl, msg, stacklevel=2)


def log_every_n_seconds(
    lvl: int, msg: str, n: float = 1, *, name: str | None = None
) -> None:
    """Log from one line of code unless that was done less than n seconds ago.

    Args:
        lvl: the level, such as ``logging.INFO``.
        msg: the message.
        n: seconds.
        name: of the logger; None is the caller's module.
    """
    site, logger = _caller(name)
    now = time.monotonic()
    if now - _last_logged_at.get((lvl, site), -math.inf) >= n:
        _last_logged_at[lvl, site] = now
        logger.log(lvl, msg, stacklevel=2)


def create_small_table(small_dict: Mapping[str, Any]) -> str:
    """Format a dictionary as a Markdown table of one row, keys on top; for a few short entries."""
    return tabulate(
        [small_dict], "keys", "pipe", ".3f", numalign="center", stralign="center"
    )


def _caller(name: str | None) -> tuple[tuple[str, int], logging.Logger]:
    """The line that called a helper, and the logger of that name or of the line's module.

    A script counts as the package.
    """
    frame = sys._getframe(2)
    module = str(frame.f_globals.get("__name__", "__main__")) if name is None else name
    logger = logging.getLogger("hooktrain" if module == "__main__" else module)
    return (frame.f_code.co_filename, frame.f_lineno), logger
