"""Save every so often, keep the newest few, and outlive a full disk."""

import logging
import os
from typing import Any

from hooktrain.checkpoint.checkpointer import Checkpointer
from hooktrain.checkpoint.discovery import read_pointer
from hooktrain.checkpoint.retention import files_to_delete
from hooktrain.checkpoint.storage import CorruptCheckpointError, verify_file
from hooktrain.utils.file_io import is_disk_full

__all__ = ["PeriodicCheckpointer"]

logger = logging.getLogger(__name__)


class PeriodicCheckpointer:
    """Calls ``checkpointer.save`` at the iterations where it is due. For loops of your own.

    The last iteration is saved as ``{file_prefix}_final.pth``, others as
    ``{file_prefix}_0000099.pth``.

    Attributes:
        checkpointer: what saves.
        period: iterations between two saves; iteration ``period - 1`` is the first saved.
        max_iter: the number of iterations of the run; may be set until the first :meth:`step`.
        max_to_keep: how many numbered files to keep, None for all of them.
        file_prefix: of the file names.

    Args:
        checkpointer: what saves.
        period: at least 1.
        max_iter: None if the end is not known, so that no final file is written.
        max_to_keep: at least 1, or None. The count is that of the files in the folder, also after
            a resume; the final file and others without a number are neither counted nor deleted.
        file_prefix: of the file names.

    Raises:
        ValueError: if ``period`` or ``max_to_keep`` is less than 1.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        period: int,
        max_iter: int | None = None,
        max_to_keep: int | None = None,
        file_prefix: str = "model",
    ) -> None:
        if period < 1:
            raise ValueError(f"period must be at least 1 iteration, got {period!r}")
        if max_to_keep is not None and max_to_keep < 1:
            raise ValueError(f"max_to_keep must be at least 1 or None, got {max_to_keep!r}")
        self.checkpointer = checkpointer
        self.period = period
        self.max_iter = max_iter
        self.max_to_keep = max_to_keep
        self.file_prefix = file_prefix

    def step(self, iteration: int, **extra: Any) -> None:
        """Save if ``iteration`` (from 0) ends a period or the run. On all ranks, or one.

        If the disk is full, that is logged as an error, the older files stay, and the next period
        tries again; only the last save of the run raises.

        Args:
            iteration: the one just finished; saved as ``"iteration"``.
            extra: more entries of the file, of tensors and plain types.

        Raises:
            OSError: if the disk is full at the last save, or fails otherwise at any.
        """
        if self.max_iter is not None and iteration >= self.max_iter - 1:
            self.save(f"{self.file_prefix}_final", iteration=iteration, **extra)
        elif (iteration + 1) % self.period == 0:
            self._save_numbered(iteration, extra)

    def save(self, name: str, **extra: Any) -> None:
        """The same as ``checkpointer.save``: at any time, under any name."""
        self.checkpointer.save(name, **extra)

    def _save_numbered(self, iteration: int, extra: dict[str, Any]) -> None:
        name = f"{self.file_prefix}_{iteration:07d}"
        folder = self.checkpointer.save_dir
        try:
            self.save(name, iteration=iteration, **extra)
        except OSError as error:
            if not is_disk_full(error):
                raise
            # The error names the path and the free space.
            message = "NOT SAVED: %s. Training goes on; the next attempt is in %d iterations"
            logger.error(message, error, self.period)
            return
        if self.max_to_keep is not None and folder and self.checkpointer.save_to_disk:
            self._delete_old(f"{name}.pth", iteration, self.max_to_keep)

    def _delete_old(self, newest: str, iteration: int, max_to_keep: int) -> None:
        folder = self.checkpointer.save_dir
        old = files_to_delete(
            os.listdir(folder),
            self.file_prefix,
            max_to_keep,
            newest=iteration,
            protected={read_pointer(folder)},
        )
        try:
            if old:
                verify_file(os.path.join(folder, newest))
        except CorruptCheckpointError as error:
            logger.error("Keeping all older checkpoints, since the newest is broken: %s", error)
            return
        for name in old:
            try:
                os.remove(os.path.join(folder, name))
            except OSError as error:
                logger.warning("Cannot delete the old checkpoint: %s", error)
