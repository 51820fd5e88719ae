"""Work that goes on beside the training loop, and errors that come back from it."""

import logging
import threading
from collections.abc import Callable

__all__ = ["BackgroundWorker"]

logger = logging.getLogger(__name__)


class BackgroundWorker:
    """Runs one job at a time in a thread, so that the caller may go on.

    An error of a job is logged at once, and raised at the next :meth:`submit` or :meth:`wait`, so
    that it is seen also where neither is called any more. The thread lives as long as its job:
    nothing is left behind that would have to be closed. It is no daemon, so the interpreter waits
    at its exit for a job that is under way.

    Example:
        >>> worker = BackgroundWorker("checkpoint")
        >>> worker.submit(lambda: None)
        >>> worker.wait()

    Args:
        name: of the jobs, for the messages and the thread.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a job is under way."""
        return self._thread is not None and self._thread.is_alive()

    def submit(self, job: Callable[[], object]) -> None:
        """Start a job as soon as the one before it has ended; wait for that.

        Raises:
            BaseException: what the job before raised; the new one is not started then.
        """
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(job,), name=self.name)
        self._thread.start()

    def wait(self) -> None:
        """Wait until no job is under way.

        Raises:
            BaseException: what the job raised. It is raised once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, job: Callable[[], object]) -> None:
        try:
            job()
        except BaseException as error:  # a thread has nobody to raise it to
            logger.error(
                "The background job %r failed: %s: %s", self.name, type(error).__name__, error
            )
            self._error = error
