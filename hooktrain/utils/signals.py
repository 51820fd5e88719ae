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
    """Install a handler of signals, in the main thread, the only one that can handle them.

    SIGHUP, which a closed terminal sends, stays ignored where nohup has turned it off.

    Returns:
        The handlers that were there before, for :func:`restore_handlers`; none in another thread,
        where a warning says what that costs.
    """
    if threading.current_thread() is not threading.main_thread():
        logger.warning(
            "Signals are not handled outside of the main thread: SIGTERM ends the run at once, "
            "and a resumed run goes on after its last periodic checkpoint"
        )
        return {}
    before = {number: signal.getsignal(number) for number in numbers}
    if before.get(signal.SIGHUP) == signal.SIG_IGN:
        del before[signal.SIGHUP]
    for number in before:
        signal.signal(number, handler)
    return before


def restore_handlers(before: dict[int, Any]) -> None:
    """Put back the handlers that :func:`replace_handlers` has returned."""
    for number, handler in before.items():
        # None: it was not installed from Python.
        signal.signal(number, handler or signal.SIG_DFL)


def is_of_scheduler(handler: Any) -> bool:
    """Whether a scheduler's library has installed a handler, as submitit does to requeue a job."""
    return str(getattr(handler, "__module__", None)).startswith("submitit.")
