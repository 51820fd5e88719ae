"""Helpers of detectron2 and fvcore: rate-limited logging, tables and timers."""

import logging
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from tabulate import tabulate

from hooktrain import events
from hooktrain.utils import logger as core
from hooktrain.utils.file_io import AnyPath

_calls: defaultdict[object, Iterator[int]] = defaultdict(count)
_last_logged_at: dict[object, float] = {}


def setup_logger(
    output: AnyPath | None = None,
    distributed_rank: int | None = None,
    *,
    color: bool = True,
    name: str = "hooktrain",
    abbrev_name: str | None = None,
    enable_propagation: bool = False,
    configure_stdout: bool = True,
) -> logging.Logger:
    """Call :func:`hooktrain.utils.logger.setup_logger` with two more arguments of detectron2's.

    Args:
        output: see that function.
        distributed_rank: see that function.
        color: see that function.
        name: see that function.
        abbrev_name: ignored, since the file shows full names and the terminal none.
        enable_propagation: whether parent loggers get the records too.
        configure_stdout: see that function.

    Returns:
        The logger.
    """
    logger = core.setup_logger(
        output,
        distributed_rank,
        color=color,
        name=name,
        configure_stdout=configure_stdout,
    )
    logger.propagate = enable_propagation
    return logger


def log_first_n(
    lvl: int,
    msg: str,
    n: int = 1,
    *,
    name: str | None = None,
    key: str | tuple[str, ...] = "caller",
) -> None:
    """Log only the first n times.

    Args:
        lvl: the level, such as ``logging.INFO``.
        msg: the message.
        n: the number of times.
        name: the name of the logger; None is the caller's module.
        key: how calls are counted: by line of code ("caller"), by message ("message"), or by both
            (``("caller", "message")``).
    """
    site, logger = _caller(name)
    counted = (lvl, "caller" in key and site, "message" in key and msg)
    if next(_calls[counted]) < n:
        logger.log(lvl, msg, stacklevel=2)


def log_every_n_seconds(
    lvl: int, msg: str, n: float = 1, *, name: str | None = None
) -> None:
    """Log from one line of code at most every n seconds.

    Args:
        lvl: the level, such as ``logging.INFO``.
        msg: the message.
        n: the number of seconds.
        name: the name of the logger; None is the caller's module.
    """
    site, logger = _caller(name)
    now = time.monotonic()
    if now - _last_logged_at.get((lvl, site), -math.inf) >= n:
        _last_logged_at[lvl, site] = now
        logger.log(lvl, msg, stacklevel=2)


def create_small_table(small_dict: Mapping[str, Any]) -> str:
    """Format a small dict as a Markdown table of one row, with the keys as its header."""
    return tabulate(
        [small_dict], "keys", "pipe", ".3f", numalign="center", stralign="center"
    )


def _caller(name: str | None) -> tuple[tuple[str, int], logging.Logger]:
    """The line that called a helper, and the logger of that name or of the line's module.

    A script's logger is the package's.
    """
    frame = sys._getframe(2)
    if name is None:
        name = frame.f_globals.get("__name__", "__main__")
    if name == "__main__":
        name = "hooktrain"
    logger = logging.getLogger(name)
    return (frame.f_code.co_filename, frame.f_lineno), logger


class CommonMetricPrinter(events.CommonMetricPrinter):
    """A :class:`hooktrain.events.CommonMetricPrinter` with the names that subclasses read."""

    @property
    def _max_iter(self) -> int | None:
        return self.max_iter

    @_max_iter.setter
    def _max_iter(self, max_iter: int | None) -> None:
        self.max_iter = max_iter

    def _get_eta(self, storage: events.EventStorage) -> str:
        shown = self._eta(storage, self.max_iter or 0)
        return "".join(shown).removeprefix("eta: ")


class TensorboardXWriter(events.TensorboardXWriter):
    """A :class:`hooktrain.events.TensorboardXWriter` with the name that subclasses read."""

    @property
    def _writer(self) -> Any:
        return self.summary_writer
