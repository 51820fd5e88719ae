"""Work in a background thread, whose errors are raised in the caller."""

import logging
from collections.abc import Callable
from threading import Thread

logger = logging.getLogger(__name__)


class BackgroundWorker:
    """Runs one job at a time in a thread, while the caller continues.

    An error of a job is logged at once and raised by the next :meth:`submit` or :meth:`wait`. The
    thread ends with its job, so there is nothing to close.

    Example:
        >>> worker = BackgroundWorker("checkpoint")
        >>> worker.submit(lambda: None)
        >>> worker.wait()
        True

    Args:
        name: the name of the jobs in messages, and of the thread.
        level: the log level of the message when a job fails.
    """

    def __init__(self, name: str, level: int = logging.ERROR) -> None:
        self.name = name
        self._level = level
        self._thread: Thread | None = None
        self._error: BaseException | None = None

    def submit(self, job: Callable[[], object], *, daemon: bool = False) -> None:
        """Wait for the previous job, then start this one.

        Args:
            job: the function to call.
            daemon: whether the interpreter may exit without waiting for the job. (It always waits
                for the threads of an executor.)

        Raises:
            BaseException: the error of the previous job; this one is then not started.
        """
        self.wait()
        self._thread = Thread(
            target=self._run, args=(job,), name=self.name, daemon=daemon
        )
        self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until no job is running.

        Args:
            seconds: the maximum time to wait; None waits without a limit.

        Returns:
            Whether the job has ended.

        Raises:
            BaseException: the error of the job; it is raised only once.
        """
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                return False
        error = self._error
        self._error = None
        if error is not None:
            raise error
        return True

    def _run(self, job: Callable[[], object]) -> None:
        try:
            job()
        except (
            BaseException
        ) as error:  # submit() or wait() raises it in the caller's thread
            logger.log(
                self._level, "The background job %r failed: %r", self.name, error
            )
            self._error = error
