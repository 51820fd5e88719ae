"""Logging to the terminal and to a file, and a progress bar."""

import logging
import os
import shutil
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

from termcolor import colored

from hooktrain.utils import comm
from hooktrain.utils.file_io import on_disk

LEVELS = {"quiet": logging.WARNING, "normal": logging.INFO, "debug": logging.DEBUG}


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]  # not in 3.10
    """Reports once that it cannot write, and drops all later records."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        name = getattr(self.stream, "name", "the log")
        nowhere = open(os.devnull, "w")  # noqa: SIM115
        if self.stream is sys.stdout:  # as after "| head", for those who print
            sys.stdout = nowhere
        else:
            with suppress(OSError):  # or else Python reports it once more
                self.stream.close()
        self.stream = nowhere
        logging.getLogger(record.name).error("Cannot write to %s: %s", name, error)


class _FileHandler(_Handler, logging.FileHandler):
    pass


class _TerminalHandler(_Handler):
    """Writes to the present ``sys.stdout``, not to the one at construction."""

    def __init__(self, color: bool) -> None:
        super().__init__(sys.stdout)
        self._no_color = None if color else True  # None leaves it to the terminal
        clock = colored("%(asctime)s", "green", no_color=self._no_color)
        self.formatter = logging.Formatter(f"{clock} %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """Put the level at the beginning of a line, from WARNING on."""
        line = super().format(record)
        if record.levelno < logging.WARNING:
            return line
        level = colored(
            record.levelname, "red", attrs=["bold"], no_color=self._no_color
        )
        return f"{level} {line}"

    def emit(self, record: logging.LogRecord) -> None:
        # A process may have been started without it.
        if sys.stdout is not None:
            self.stream = sys.stdout
            if _bar.text and not _cell():
                _draw("")
            super().emit(record)


def setup_logger(
    output: str | os.PathLike[str] | None = None,
    distributed_rank: int | None = None,
    *,
    color: bool = True,
    name: str = "hooktrain",
    configure_stdout: bool = True,
    level: str = "normal",
) -> logging.Logger:
    """Make a logger write to the terminal, and all records from DEBUG on to a file.

    Lines on the terminal have the time. Those in the file have the date, the name of the logger and
    the level too. Another call for the same name replaces what the last one has set up. Handlers
    that others have added stay.

    Args:
        output: a file, if the name ends in .txt or .log; otherwise a folder, in which the file is
            log.txt. A file that exists is appended to. None writes no file.
        distributed_rank: the rank of this process; None takes that of the process group, or before
            that is made torchrun's. Ranks above 0 do not write to the terminal, and add
            ``.rank{N}`` to the name of the file. Ranks from 128 on write nothing.
        color: whether to use colours on the terminal, if it has them. The variables NO_COLOR and
            FORCE_COLOR decide on that too.
        name: the name of the logger; "" is the root of all loggers.
        configure_stdout: whether to write to the terminal.
        level: what the terminal shows: ``"quiet"`` shows warnings and errors, ``"normal"`` all
            from INFO on, and ``"debug"`` everything.

    Returns:
        The logger.

    Raises:
        ValueError: for another ``level``, or an address such as ``s3://...``.
    """
    if level not in LEVELS:
        raise ValueError(f"level must be one of {list(LEVELS)}, but got {level!r}")
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
        file = _FileHandler(_log_file(output, distributed_rank), encoding="utf-8")
        line = "[%(asctime)s] %(name)s %(levelname)s: %(message)s"
        file.setFormatter(logging.Formatter(line, "%Y-%m-%d %H:%M:%S"))
        logger.addHandler(file)
    return logger


def _log_file(output: str | os.PathLike[str], rank: int) -> Path:
    path = Path(on_disk(output))
    if path.suffix not in (".txt", ".log"):
        path = path / "log.txt"
    # So many files are a burden to a file system, and nobody reads them.
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


def show_progress(
    what: str, done: int, total: int, seconds_left: float | None = None
) -> bool:
    """Draw a progress bar, if a person watches the terminal or the cell of a notebook.

    On a terminal the bar stands below the lines of the log, and the next line replaces it.

    Args:
        what: what the bar is about.
        done: how much is done. When all is done, the bar is removed.
        total: how much there is to do; a number below 1 if that is unknown.
        seconds_left: the time that is left; None if it is unknown.

    Returns:
        Whether a person watches, so that no lines about the progress are needed.
    """
    if not _is_watched():
        return False
    since = time.monotonic() - _bar.drawn_at
    if done == total:
        _draw("")
    elif not _bar.text or since >= 0.1:
        text = f"{what} {done}"
        if total > 0:
            hashes = "#" * (30 * done // total)
            text = f"{what} [{hashes:-<30}] {done}/{total}"
        if seconds_left is not None:
            text += f"  eta: {pretty_seconds(seconds_left)}"
        width = shutil.get_terminal_size().columns - 1
        _draw(text[:width])
    return True


# The text of the bar, the cell of a notebook that it is in, and when it was drawn.
_bar = SimpleNamespace(text="", cell="", drawn_at=0.0)


def _draw(text: str) -> None:
    """Replace the text of the bar; an empty text removes the bar."""
    if _cell():
        _show(text)
    elif text or _bar.text:
        with suppress(OSError):  # the terminal may have been closed
            sys.stdout.write(f"\r\x1b[K{text}")
            sys.stdout.flush()
    _bar.text = text
    _bar.drawn_at = time.monotonic()


def _cell() -> str:
    """An identifier of the notebook's cell that is running, or ""."""
    message = getattr(sys.stdout, "parent_header", {})
    name: str = message.get("msg_id", "")
    return name


def _show(text: str) -> None:
    """Show the bar in the running cell, in the place where it was drawn first."""
    from IPython.display import display

    cell = _cell()
    data = {"text/plain": text}
    is_there = cell == _bar.cell
    display(data, raw=True, display_id=cell, update=is_there)
    _bar.cell = cell


def _is_watched() -> bool:
    """Whether a person watches the output, at a level that shows progress."""
    for handler in logging.getLogger("hooktrain").handlers:
        if isinstance(handler, _TerminalHandler) and handler.level <= logging.INFO:
            is_terminal = sys.stdout is not None and sys.stdout.isatty()
            return is_terminal or bool(_cell())
    return False


def pretty_seconds(seconds: float) -> str:
    """Days, hours, minutes and seconds, such as ``1 day, 3:00:05``."""
    return str(timedelta(seconds=int(seconds)))
