"""Logging to the terminal and to a file, and helpers that log less often than they are called."""

import logging
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Literal

from tabulate import tabulate
from termcolor import colored

_DATE_FORMAT = "%m/%d %H:%M:%S"
_KeyPart = Literal["caller", "message"]


class _Handler(logging.Handler):
    """One that we have attached. Says once that it cannot write, and the program goes on."""

    _failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):  # such as a message that does not fit its arguments
            super().handleError(record)
        elif not self._failed:
            self._failed = True
            where = getattr(self, "baseFilename", "stdout")
            # The other handlers take this line; here it is lost like those before it.
            logging.getLogger(record.name).error("Cannot write to %s: %s", where, error)


class _StdoutHandler(_Handler, logging.StreamHandler):  # type: ignore[type-arg]  # not in 3.10
    """Writes to what ``sys.stdout`` is now, not to what it was when logging was set up."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stdout is not None:  # the process was started without one
            self.stream = sys.stdout
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """After a closed pipe, as of ``| head``, what is printed goes nowhere and fails nowhere."""
        if isinstance(sys.exc_info()[1], OSError):
            with suppress(OSError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self.stream.fileno())
        super().handleError(record)


class _FileHandler(_Handler, logging.FileHandler):
    """A log file."""


class _ColorFormatter(logging.Formatter):
    """Green time and name, red level from WARNING on; colours where the terminal has them."""

    def __init__(self, name: str, abbrev_name: str) -> None:
        super().__init__("%(asctime)s", datefmt=_DATE_FORMAT)  # what makes the base set asctime
        self._name = name
        self._abbrev_name = abbrev_name

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        name = record.name
        if name == self._name or name.startswith(self._name + "."):
            name = self._abbrev_name + name[len(self._name) :]
        header = colored(f"[{record.asctime} {name}]:", "green")
        if record.levelno < logging.WARNING:
            return f"{header} {record.message}"
        attributes = ["blink"] if record.levelno < logging.ERROR else ["blink", "underline"]
        return f"{header} {colored(record.levelname, 'red', attrs=attributes)} {record.message}"


def setup_logger(
    output: str | os.PathLike[str] | None = None,
    distributed_rank: int = 0,
    *,
    color: bool = True,
    name: str = "hooktrain",
    abbrev_name: str | None = None,
    enable_propagation: bool = False,
    configure_stdout: bool = True,
) -> logging.Logger:
    """Make a logger show everything from DEBUG on, on the terminal and in a file.

    Calling it again replaces what the last call for this name set up, and closes its file. Handlers
    that others have added stay.

    Args:
        output: a file if it ends in .txt or .log, else a folder that gets a log.txt; both are
            created if need be, and appended to if there already. None writes no file.
        distributed_rank: ranks above 0 write to another file, with ``.rank{N}`` added to its name,
            and not to the terminal.
        color: colours on the terminal, where it has them (NO_COLOR and FORCE_COLOR decide).
        name: of the logger; "" is the root of all loggers.
        abbrev_name: replaces ``name`` in coloured lines; None is "ht" for "hooktrain", and the
            name itself for others.
        enable_propagation: also pass records on to the loggers above.
        configure_stdout: False writes nothing to the terminal.

    Returns:
        The logger.
    """
    close_logger(name)
    logger = logging.getLogger(name)
    logger.setLevel(logging.DEBUG)
    logger.propagate = enable_propagation
    plain = logging.Formatter("[%(asctime)s] %(name)s %(levelname)s: %(message)s", _DATE_FORMAT)
    if configure_stdout and distributed_rank == 0:
        stdout = _StdoutHandler(sys.stdout)
        if abbrev_name is None:
            abbrev_name = "ht" if name == "hooktrain" else name
        stdout.setFormatter(_ColorFormatter(name, abbrev_name) if color else plain)
        logger.addHandler(stdout)
    if output is not None:
        path = Path(output)
        if path.suffix not in (".txt", ".log"):
            path = path / "log.txt"
        if distributed_rank > 0:
            path = path.with_name(f"{path.name}.rank{distributed_rank}")
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _FileHandler(path, encoding="utf-8")
        file.setFormatter(plain)
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


def log_every_n_seconds(lvl: int, msg: str, n: float = 1, *, name: str | None = None) -> None:
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
    return tabulate([small_dict], "keys", "pipe", ".3f", numalign="center", stralign="center")


def _caller(name: str | None) -> tuple[tuple[str, int], logging.Logger]:
    """The line that called a helper, and the logger of that name or of the line's module.

    A script counts as the package.
    """
    frame = sys._getframe(2)
    module = str(frame.f_globals.get("__name__", "__main__")) if name is None else name
    logger = logging.getLogger("hooktrain" if module == "__main__" else module)
    return (frame.f_code.co_filename, frame.f_lineno), logger
