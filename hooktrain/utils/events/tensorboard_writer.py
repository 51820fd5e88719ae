"""Metrics, images and histograms for TensorBoard."""

import importlib.util
import os
from typing import TYPE_CHECKING, Any

from hooktrain.utils import comm
from hooktrain.utils.events.storage import EventStorage, get_event_storage
from hooktrain.utils.events.writer import EventWriter, UnwrittenScalars

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorboardXWriter(EventWriter):
    """Writes everything in the storage to an event file, the main process only.

    Metrics whose hint says so are smoothed: the value is the median of the last iterations. Images
    and histograms are taken out of the storage. The file is made by the first ``write()`` that has
    something to write, also after ``close()``.

    When a run resumes, TensorBoard hides what earlier files have from that iteration on. A metric
    that was last put before it may be written a second time, with the same value.

    Args:
        log_dir: the folder for event files.
        window_size: the number of iterations to smooth over, at least 1.
        **kwargs: further arguments of ``torch.utils.tensorboard.SummaryWriter``.

    Raises:
        ImportError: if the package ``tensorboard`` is not installed.
    """

    def __init__(
        self, log_dir: str | os.PathLike[str], window_size: int = 20, **kwargs: Any
    ) -> None:
        # Importing it takes a second, and only the main process needs it.
        if importlib.util.find_spec("tensorboard") is None:
            raise ImportError("TensorboardXWriter needs: pip install 'hooktrain[tensorboard]'")
        self._unwritten = UnwrittenScalars(window_size)
        self._arguments = {"log_dir": log_dir, **kwargs}
        self._writer: SummaryWriter | None = None

    def write(self) -> None:
        """Write what is new."""
        storage = get_event_storage()
        if comm.is_main_process():
            self._write(storage)
        # Nobody takes those of the other ranks.
        storage.clear_images()
        storage.clear_histograms()

    def _write(self, storage: EventStorage) -> None:
        scalars = self._unwritten.find(storage)
        images, histograms = storage.images(), storage.histograms()
        if not scalars and not images and not histograms:
            return
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(**self._arguments)
            # A file that follows a close() belongs to the same run.
            self._arguments.pop("purge_step", None)
        for name, value, iteration in scalars:
            self._writer.add_scalar(name, value, iteration)
            self._unwritten.mark_written([name], iteration)
        for name, image, iteration in images:
            self._writer.add_image(name, image, iteration)
        for histogram in histograms:
            self._writer.add_histogram_raw(**histogram)
        self._writer.flush()

    def rewind(self, iteration: int) -> None:
        """Let TensorBoard hide what earlier files have at and after ``iteration``."""
        self.close()
        self._unwritten.rewind(iteration)
        self._arguments["purge_step"] = iteration

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
