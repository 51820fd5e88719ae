"""Metrics, images and histograms for TensorBoard."""

import importlib.util
import os
from functools import cached_property
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from hooktrain.utils import comm
from hooktrain.utils.events.storage import EventStorage, get_event_storage
from hooktrain.utils.events.writer import EventWriter, UnwrittenScalars

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorboardXWriter(EventWriter):
    """Writes everything in the storage to an event file, the main process only.

    Which values of a metric are written is the same as in :class:`JSONWriter`. Images and
    histograms are taken out of the storage. The file is made by the first ``write()`` that has
    something to write, also after ``close()``.

    When a run resumes, TensorBoard hides what earlier files have from that iteration on. What was
    put after the last ``write()`` before the checkpoint may be written a second time, with the same
    value.

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
        os.makedirs(self._arguments["log_dir"], exist_ok=True)  # also if somebody has deleted it
        try:
            for name, value, iteration in scalars:
                self._writer.add_scalar(name, value, iteration)
            for name, image, iteration in images:
                self._writer.add_image(name, image, iteration)
            for histogram in histograms:
                self._writer.add_histogram_raw(**histogram)
            self._writer.flush()
        except OSError:
            vars(self).pop("_writer", None)  # its thread has ended: the next write opens another
            raise
        self._unwritten.mark_written()
        storage.written["tensorboard"] = storage.iter + 1

    # Also what projects of detectron2 call by themselves, at any time.
    @cached_property
    def _writer(self) -> "SummaryWriter":
        from torch.utils.tensorboard import SummaryWriter

        os.makedirs(self._arguments["log_dir"], exist_ok=True)
        # On a full disk this fails in one line, and the thread of a SummaryWriter in many.
        with TemporaryFile(dir=self._arguments["log_dir"]) as probe:
            probe.write(bytes(4096))
        writer = SummaryWriter(**self._arguments)
        # A file that follows a close() belongs to the same run.
        self._arguments.pop("purge_step", None)
        return writer

    def rewind(self, iteration: int) -> None:
        """Let TensorBoard hide what earlier files have at and after ``iteration``."""
        self.close()
        storage = get_event_storage()
        self._unwritten.skip(storage, storage.written.get("tensorboard", 0))
        self._arguments["purge_step"] = iteration

    def close(self) -> None:
        """Close the event file."""
        if writer := vars(self).pop("_writer", None):
            writer.close()
