"""Metrics, images and histograms for TensorBoard."""

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hooktrain.events.storage import EventStorage, get_event_storage
from hooktrain.events.writer import Metrics, ScalarWriter
from hooktrain.utils.file_io import AnyPath

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorboardXWriter(ScalarWriter):
    """Writes metrics, images and histograms to an event file, on the main process only.

    Images and histograms are then removed from the storage. The first ``write()`` that has
    something to write creates the file. When a run resumes, TensorBoard hides the values of earlier
    files from that iteration on. After a kill, values between the last checkpoint and the last
    write may appear twice.

    Args:
        log_dir: the folder for event files.
        window_size: the number of iterations to smooth over, at least 1.
        **kwargs: further arguments of ``torch.utils.tensorboard.SummaryWriter``.

    Raises:
        ImportError: if the package ``tensorboard`` is not installed.
    """

    may_fail = True

    def __init__(self, log_dir: AnyPath, window_size: int = 20, **kwargs: Any) -> None:
        # Only the main process needs torch's SummaryWriter, which takes a second to import.
        importlib.import_module("tensorboard")
        super().__init__("tensorboard", window_size)
        self._log_dir = os.path.abspath(log_dir)
        self._arguments = kwargs
        self._open: SummaryWriter | None = None

    @property
    def summary_writer(self) -> "SummaryWriter":
        """Torch's writer, which has more methods, such as ``add_graph`` and ``add_text``."""
        from torch.utils.tensorboard import SummaryWriter

        # The folder may have been deleted.
        os.makedirs(self._log_dir, exist_ok=True)
        if self._open is None:
            self._open = SummaryWriter(self._log_dir, **self._arguments)
            # A file that is opened after a close() belongs to the same run.
            self._arguments.pop("purge_step", None)
        return self._open

    def write(self) -> None:
        """Append the new metrics, images and histograms to the event file.

        Raises:
            OSError: if the disk is full or fails. Then the next ``write()`` opens another file.
        """
        super().write()
        storage = get_event_storage()
        storage.clear_images()
        storage.clear_histograms()

    def write_scalars(self, storage: EventStorage, scalars: Metrics) -> None:
        """Append the metrics, and the images and histograms of the storage."""
        if not (scalars or storage._vis_data or storage._histograms):
            return
        from tensorboard.compat.proto.summary_pb2 import Summary

        writer: Any = self.summary_writer
        try:
            for iteration, metrics in scalars.items():
                # One event for all of them, since each event wakes the thread of torch's writer.
                values = [
                    Summary.Value(tag=n, simple_value=v) for n, v in metrics.items()
                ]
                writer.file_writer.add_summary(Summary(value=values), iteration)
            for name, image, iteration in storage._vis_data:
                if image.is_floating_point():
                    image = image.float()  # numpy has no bfloat16
                writer.add_image(name, image, iteration)
            for histogram in storage._histograms:
                writer.add_histogram_raw(**histogram)
            writer.flush()
        except OSError:
            self._open = None  # the thread of torch's writer has ended
            raise

    def rewind(self, iteration: int) -> None:
        """Let TensorBoard hide the values of earlier files from ``iteration`` on."""
        self.close()
        super().rewind(iteration)
        self._arguments["purge_step"] = iteration

    def run_files(self) -> Iterator[Path]:
        """The event files in the folder."""
        return Path(self._log_dir).glob("events.out.tfevents.*")

    def close(self) -> None:
        """Close the event file. The next ``write`` opens another one."""
        if self._open is not None:
            self._open.close()
            self._open = None
