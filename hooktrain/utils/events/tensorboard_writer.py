"""Everything for TensorBoard."""

import os
from operator import attrgetter
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from hooktrain.utils.events.media import to_pixels
from hooktrain.utils.events.storage import EventStorage
from hooktrain.utils.events.tracking import TrackingWriter

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorboardXWriter(TrackingWriter):
    """Writes all that is in the storage to an event file, as :class:`TrackingWriter` says.

    The configuration is under TEXT and under HPARAMS. When a run resumes, TensorBoard hides what
    earlier files have from that iteration on.

    Args:
        log_dir: the folder for event files.
        window_size: the number of iterations to smooth over, at least 1.
        **kwargs: further arguments of ``torch.utils.tensorboard.SummaryWriter``.

    Raises:
        ImportError: if the package ``tensorboard`` is not installed.
    """

    package = "tensorboard"

    def __init__(
        self, log_dir: str | os.PathLike[str], window_size: int = 20, **kwargs: Any
    ) -> None:
        super().__init__(window_size, log_dir=log_dir, **kwargs)

    @property
    def summary_writer(self) -> "SummaryWriter":
        """Torch's own writer, at any time and for anything: ``add_graph``, ``add_text``, ..."""
        from torch.utils.tensorboard import SummaryWriter

        os.makedirs(self.arguments["log_dir"], exist_ok=True)  # also if somebody has deleted it
        if self.run is None:
            # On a full disk this fails in one line, and the thread of a SummaryWriter in many.
            with TemporaryFile(dir=self.arguments["log_dir"]) as probe:
                probe.write(bytes(4096))
            self.run = SummaryWriter(**self.arguments)
            # A file that follows a close() belongs to the same run.
            self.arguments.pop("purge_step", None)
        writer: SummaryWriter = self.run
        return writer

    _writer = property(attrgetter("summary_writer"))  # its name in detectron2

    def send(self, storage: EventStorage, scalars: list[tuple[str, float, int]]) -> None:
        """Append to the event file.

        Raises:
            OSError: if the disk is full or fails; the next ``write()`` opens another file.
        """
        from torch.utils.tensorboard.summary import hparams

        try:
            writer = self.summary_writer
            if self.config:
                lines = (f"    {key} = {value}" for key, value in self.config.items())
                writer.add_text("config", "\n".join(lines), storage.iter)
                # Without a list of metrics, the tab shows all that there are.
                _, start, _ = hparams(self.config, {})  # type: ignore[no-untyped-call]
                writer._get_file_writer().add_summary(start)  # type: ignore[no-untyped-call]
            for name, value, iteration in scalars:
                writer.add_scalar(name, value, iteration)
            for name, image, iteration in storage.images():
                writer.add_image(name, to_pixels(image), iteration, dataformats="HWC")
            for histogram in storage.histograms():
                writer.add_histogram_raw(**histogram)
            writer.flush()
        except OSError:
            self.run = None  # its thread has ended
            raise

    def rewind(self, iteration: int) -> None:
        """Let TensorBoard hide what earlier files have at and after ``iteration``."""
        super().rewind(iteration)
        self.arguments["purge_step"] = iteration

    def end(self, run: Any, failed: bool) -> None:
        """Close the event file."""
        run.close()
