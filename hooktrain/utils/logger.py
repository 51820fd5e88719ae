"""Logging to the terminal and to a file."""

import logging
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path

from termcolor import colored

from hooktrain.utils import comm
from hooktrain.utils.file_io import AnyPath, on_disk

LEVELS = {"quiet": logging.WARNING, "normal": logging.INFO, "debug": logging.DEBUG}


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]  # not in 3.10
    """Reports the first record that it cannot write, and drops all later records."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        name = getattr(self.stream, "name", "the log")
        nowhere = open(os.devnull, "w")  # noqa: SIM115
        if (
            self.stream is sys.stdout
        ):  # closed, for example, by "| head": print() would fail too
            sys.stdout = nowhere
        self.stream = nowhere
        logging.getLogger(record.name).error("Cannot write to %s: %s", name, error)


class _FileHandler(_Handler, logging.FileHandler):
    pass


class _TerminalHandler(_Handler):
    """Writes to the current ``sys.stdout``, not to the one at its construction."""

    def __init__(self, color: bool) -> None:
        super().__init__(sys.stdout)
        # With None, termcolor checks the terminal.
        clock = colored("%(asctime)s", "green", no_color=None if color else True)
        self.formatter = logging.Formatter(f"{clock} %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """Prefix the line with the level, for WARNING and above."""
        line = super().format(record)
        # Characters that the terminal cannot show, such as an umlaut in the locale C, are escaped.
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        line = line.encode(encoding, "backslashreplace").decode(encoding)
        if record.levelno < logging.WARNING:
            return line
        return f"{record.levelname} {line}"

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stdout is not None:  # None in a process that was started without stdout
            self.stream = sys.stdout
            super().emit(record)


def setup_logger(
    output: AnyPath | None = None,
    distributed_rank: int | None = None,
    *,
    color: bool = True,
    name: str = "hooktrain",
    configure_stdout: bool = True,
    level: str = "normal",
) -> logging.Logger:
    """Log to the terminal, and all records of level DEBUG and above to a file.

    Lines on the terminal begin with the time; lines in the file also have the date, the name of
    the logger and the level. Another call for the same name replaces the handlers of the previous
    call. Other handlers are kept.

    Args:
        output: a file, if the name ends in .txt or .log; otherwise a folder, in which the file is
            log.txt. An existing file is appended to. None writes no file.
        distributed_rank: the rank of this process; None takes that of the process group, or
            torchrun's if there is no group yet. Ranks above 0 do not write to the terminal, and add
            ``.rank{N}`` to the name of the file. Ranks from 128 on write nothing.
        color: whether to use colours, if the terminal supports them and the variables NO_COLOR and
            FORCE_COLOR do not decide otherwise.
        name: the name of the logger; "" is the root logger.
        configure_stdout: whether to write to the terminal.
        level: the records to show on the terminal: ``"quiet"`` is warnings and errors, ``"normal"``
            is INFO and above, and ``"debug"`` is everything.

    Returns:
        The logger.

    Raises:
        KeyError: for an unknown ``level``.
        ValueError: for an address such as ``s3://...``.
    """
    if distributed_rank is None:
        distributed_rank = comm.get_rank() or int(os.environ.get("RANK", "0"))
    close_logger(name)
    logger = logging.getLogger(name)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    if configure_stdout and distributed_rank == 0:
        terminal = _TerminalHandler(color)
        terminal.setLevel(LEVELS[level])
        logger.addHandler(terminal)
    if output is not None:
        file = _FileHandler(
            _log_file(output, distributed_rank),
            encoding="utf-8",
            errors="backslashreplace",
        )
        line = "[%(asctime)s] %(name)s %(levelname)s: %(message)s"
        file.setFormatter(logging.Formatter(line, "%Y-%m-%d %H:%M:%S"))
        logger.addHandler(file)
    return logger


def _log_file(output: AnyPath, rank: int) -> Path:
    path = Path(on_disk(output))
    if path.suffix not in (".txt", ".log"):
        path /= "log.txt"
    # More files would burden the file system.
    if rank >= 128:
        return Path(os.devnull)
    if rank > 0:
        path = path.with_name(f"{path.name}.rank{rank}")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def close_logger(name: str = "hooktrain") -> None:
    """Undo :func:`setup_logger`: remove its handlers and close its file."""
    logger = logging.getLogger(name)
    for handler in list(logger.handlers):
        if isinstance(handler, _Handler):
            logger.removeHandler(handler)
            handler.close()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


@cache
def log_once(log: Callable[..., None], message: str, *values: object) -> None:
    """Log a message with these values once a run: ``log_once(logger.warning, "%r", name)``.

    ``trainer.train()`` clears this memory: a process may train several models, as in a sweep or a
    cross-validation, and the log of each run must report its own problems.

    Args:
        log: a method of a logger.
        message: the message.
        values: the values to insert into the message.
    """
    log(message, *values)


def pretty_seconds(seconds: float) -> str:
    """Days, hours, minutes and seconds, such as ``1 day, 3:00:05``."""
    return str(timedelta(0, int(seconds)))
