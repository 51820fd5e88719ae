"""Handlers of the signals that end a run."""

import logging
import signal
import threading
from collections.abc import Iterable
from typing import Any

logger = logging.getLogger(__name__)

# Signals that end a run or announce its end. Terminals and schedulers send them to all processes.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def replace_handlers(numbers: Iterable[int], handler: Any) -> dict[int, Any]:
    """Install a signal handler, in the main thread, the only thread that can handle signals.

    SIGHUP, which a closed terminal sends, stays ignored if nohup has disabled it.

    Returns:
        The previous handlers, for :func:`restore_handlers`. In another thread no handler is
        installed, and a warning explains the consequence.
    """
    if threading.current_thread() is not threading.main_thread():
        logger.warning(
            "Signals are not handled outside the main thread: SIGTERM ends the run at once, "
            "and a resumed run continues from the last periodic checkpoint"
        )
        return {}
    before = {number: signal.getsignal(number) for number in numbers}
    if before.get(signal.SIGHUP) == signal.SIG_IGN:
        del before[signal.SIGHUP]
    for number in before:
        signal.signal(number, handler)
    return before


def restore_handlers(before: dict[int, Any]) -> None:
    """Restore the handlers that :func:`replace_handlers` has returned."""
    for number, handler in before.items():
        # None: the handler was not installed from Python.
        signal.signal(number, handler or signal.SIG_DFL)


def is_scheduler_handler(handler: Any) -> bool:
    """Whether a job scheduler's library, such as submitit, has installed the handler."""
    return str(getattr(handler, "__module__", None)).startswith("submitit.")
