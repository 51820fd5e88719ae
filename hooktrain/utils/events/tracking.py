"""What the writers to TensorBoard, Weights & Biases and MLflow have in common."""

import importlib.util
import sys
from collections.abc import Mapping
from typing import Any

from hooktrain.utils import comm
from hooktrain.utils.events.storage import EventStorage, get_event_storage
from hooktrain.utils.events.writer import EventWriter, UnwrittenScalars


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

    def send(self, storage: EventStorage, scalars: list[tuple[str, float, int]]) -> None:
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
        flat[f"{prefix}{key}"] = value if is_plain else getattr(value, "__qualname__", str(value))
    return flat
