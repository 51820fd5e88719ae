"""Whole states written in the background, from memory that is kept for it."""

from collections.abc import Callable
from functools import partial
from typing import Any

from hooktrain.checkpoint.staging import StagingBuffers
from hooktrain.checkpoint.storage import check_storable
from hooktrain.utils.background import BackgroundWorker

__all__ = ["BackgroundSaver"]

State = dict[str, Any]


class BackgroundSaver:
    """Copies a state, and lets a thread write the copy while training goes on.

    One save is under way at a time. What fails in the background is logged at once and raised by
    the next call. At its exit, the interpreter waits for the save that is under way.

    Example:
        >>> saver = BackgroundSaver()
        >>> saver.save({"model": {}}, lambda state: None)  # save_file(state, "model.pth")
        >>> saver.wait()
    """

    def __init__(self) -> None:
        self._worker = BackgroundWorker("checkpoint")
        self._buffers = StagingBuffers()

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way."""
        return self._worker.is_busy

    def save(self, state: State, write: Callable[[State], object]) -> None:
        """Wait for the save before, copy ``state``, and begin to write.

        Args:
            state: tensors and plain types, nested; it may change as soon as this returns.
            write: writes the copy it gets, such as ``lambda copied: save_file(copied, path)``. It
                runs in a thread: no collective calls.

        Raises:
            TypeError: if something in ``state`` could not be loaded back; nothing is begun.
            Exception: what failed in the save before; this one is not begun then. Call
                :meth:`wait` first to tell the two apart.
        """
        self.wait()
        check_storable(state)
        self._worker.submit(partial(write, self._buffers.stage(state)))

    def wait(self) -> None:
        """Wait until nothing is under way.

        Raises:
            Exception: what failed, once.
        """
        self._worker.wait()
