"""Everything for TensorBoard."""

import importlib.util
import os
import sys
from collections.abc import Mapping
from operator import attrgetter
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from hooktrain.events.storage import EventStorage, get_event_storage, to_pixels
from hooktrain.events.writer import EventWriter, UnwrittenScalars
from hooktrain.utils import comm


class TrackingWriter(EventWriter):
    """Brings all that is in the storage to a tool that can only append, the main process only.

    Which values of a metric are written is the same as in :class:`JSONWriter`. Images and
    histograms are taken out of the storage. Nothing begins before the first ``write()`` that has
    something to write, and the configuration goes with that.

    What was put between the last ``write()`` before a checkpoint and the end of a killed run may be
    written a second time by the run that resumes, with the same iteration.

    A subclass names its package, which is also its extra, and defines :meth:`send` and :meth:`end`.

    Args:
        window_size: the number of iterations to smooth over, at least 1.
        **kwargs: what the run or file of the tool begins with.

    Raises:
        ImportError: if the package is not installed.
    """

    package: str

    def __init__(self, window_size: int = 20, **kwargs: Any) -> None:
        # Importing it takes a second, and only the main process needs it.
        if importlib.util.find_spec(self.package) is None:
            extra = f"pip install 'hooktrain[{self.package}]'"
            raise ImportError(f"{type(self).__name__} needs: {extra}")
        self._unwritten = UnwrittenScalars(window_size)
        self.arguments = kwargs
        self.config: dict[str, Any] = {}
        self.run: Any = None

    def add_config(self, config: Mapping[str, Any]) -> None:
        """Take the configuration of the run; what is added later replaces values."""
        self.config |= flatten(config)

    def write(self) -> None:
        """Write what is new."""
        storage = get_event_storage()
        if comm.is_main_process():
            scalars = self._unwritten.find(storage)
            if scalars or storage.images() or storage.histograms():
                self.send(storage, scalars)
                self._unwritten.mark_written()
                self.config = {}
                storage.written[self.package] = storage.iter + 1
        # Nobody takes those of the other ranks.
        storage.clear_images()
        storage.clear_histograms()

    def send(
        self, storage: EventStorage, scalars: list[tuple[str, float, int]]
    ) -> None:
        """Begin ``self.run`` if it is None. Write metrics, images, histograms, ``self.config``."""
        raise NotImplementedError(f"{type(self).__qualname__} must define send")

    def rewind(self, iteration: int) -> None:
        """Go on after what was written before the checkpoint."""
        self.close()
        storage = get_event_storage()
        self._unwritten.skip(storage, storage.written.get(self.package, 0))

    def close(self) -> None:
        """End the run or file, as failed while an error goes through; ``write`` begins another."""
        run, self.run = self.run, None
        if run is not None:
            self.end(run, failed=sys.exc_info()[0] is not None)

    def end(self, run: Any, failed: bool) -> None:
        """Close what ``self.run`` was."""


def flatten(config: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Dicts in dicts, or in lists, as one: ``{"a": {"b": 1}}`` becomes ``{"a.b": 1}``.

    The values are numbers, texts and None; classes and functions become their names.
    """
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            value = dict(enumerate(value))
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
            continue
        is_plain = value is None or isinstance(value, int | float | str)
        flat[f"{prefix}{key}"] = (
            value if is_plain else getattr(value, "__qualname__", str(value))
        )
    return flat


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

        os.makedirs(
            self.arguments["log_dir"], exist_ok=True
        )  # also if somebody has deleted it
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

    def send(
        self, storage: EventStorage, scalars: list[tuple[str, float, int]]
    ) -> None:
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
