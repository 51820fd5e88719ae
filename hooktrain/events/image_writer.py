"""Images as files."""

import os
import re
from pathlib import Path

from hooktrain.events.storage import get_event_storage, write_png
from hooktrain.events.writer import EventWriter
from hooktrain.utils import comm
from hooktrain.utils.file_io import set_aside


class ImageWriter(EventWriter):
    """Writes images as ``<folder>/<name>_<iteration>.png``, the main process only.

    What is no letter, digit, dot or dash in a name becomes ``_``. A resumed run replaces the images
    that it makes again; a new run renames the folder of another to the first free ``<folder>.1``,
    ``<folder>.2``, ...

    Args:
        folder: for the files; it is made if there is none.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)

    def write(self) -> None:
        """Write the queued images.

        Raises:
            OSError: if the disk is full or fails; the images stay in the queue.
        """
        storage = get_event_storage()
        for name, image, iteration in (
            storage.images() if comm.is_main_process() else ()
        ):
            self._folder.mkdir(parents=True, exist_ok=True)
            name = re.sub(r"[^\w.-]", "_", name)
            write_png(self._folder / f"{name}_{iteration:07d}.png", image)
        storage.clear_images()

    def rewind(self, iteration: int) -> None:
        """If ``iteration`` is 0, begin a new folder."""
        if iteration == 0 and comm.is_main_process() and self._folder.exists():
            set_aside(self._folder)
