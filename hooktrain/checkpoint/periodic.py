"""Saves checkpoints every so often, and deletes old ones."""

import logging
import os
from dataclasses import dataclass
from functools import partial
from typing import Any

from hooktrain.checkpoint.checkpointer import Checkpointer
from hooktrain.checkpoint.files import CorruptCheckpointError
from hooktrain.checkpoint.loading import verify_checkpoint
from hooktrain.checkpoint.resume import files_to_delete
from hooktrain.utils.file_io import delete

logger = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class PeriodicCheckpointer:
    """Calls ``checkpointer.save`` at the iterations where it is due. For loops of your own.

    The last iteration is saved as ``{file_prefix}_final.pth``, others as
    ``{file_prefix}_0000099.pth``; folders of shards are named so, without ``.pth``. Old ones are
    deleted when a newer one is there and was verified: in the background, if it is saved there.

    Attributes:
        checkpointer: what saves.
        period: iterations between two saves; iteration ``period - 1`` is the first saved.
        max_iter: the number of iterations of the run; may be set until the first :meth:`step`.
        max_to_keep: how many numbered ones to keep, None for all of them.
        file_prefix: of the file names.

    Args:
        checkpointer: what saves.
        period: at least 1. That of a hook may also be a text such as ``"1 epoch"``.
        max_iter: None if the end is not known, so that no final file is written.
        max_to_keep: at least 1, or None. The count is that of files and folders in ``save_dir``,
            also after a resume; the final one and others without a number are neither counted nor
            deleted.
        file_prefix: of the file names.

    Raises:
        ValueError: if ``period`` or ``max_to_keep`` is less than 1 or no whole number, or for an
            impossible ``file_prefix``.
    """

    checkpointer: Checkpointer
    period: int | str
    max_iter: int | None = None
    max_to_keep: int | None = None
    file_prefix: str = "model"

    def __post_init__(self) -> None:
        for key in ("period", "max_to_keep"):
            number = getattr(self, key)
            if isinstance(number, int | float) and (number < 1 or number % 1):
                raise ValueError(
                    f"{key} must be a whole number of at least 1, got {number!r}"
                )
        self.checkpointer.check_name(self.file_prefix)

    def step(self, iteration: int, **extra: Any) -> None:
        """Save if ``iteration`` (from 0) ends a period or the run. On all ranks, or one.

        If the disk is full, that is logged as an error, the older files stay, and the next period
        tries again; only the last save of the run raises. When that one returns, it is on the disk,
        also if the checkpointer saves in the background.

        Args:
            iteration: the one just finished; saved as ``"iteration"``.
            extra: more entries of the file, of tensors and plain types.

        Raises:
            OSError: if the disk is full at the last save, or fails otherwise at any.
        """
        if not self.checkpointer._has_begun:
            self.checkpointer.begin_run(is_new=iteration == 0)
        is_due = (iteration + 1) % int(self.period) == 0
        if is_due or self._is_last(iteration):
            self.save_at(iteration, **extra)

    def _is_last(self, iteration: int) -> bool:
        return self.max_iter is not None and iteration >= self.max_iter - 1

    def save_at(self, iteration: int, **extra: Any) -> None:
        """Save as :meth:`step` does, whether it is due or not."""
        if self._is_last(iteration):
            final = f"{self.file_prefix}_final"
            self.checkpointer.save(final, iteration=iteration, **extra)
            self.checkpointer.wait()
            return
        self.checkpointer.save(
            f"{self.file_prefix}_{iteration:07d}",
            on_saved=partial(self._delete_old, iteration),
            on_full=self._go_on,
            iteration=iteration,
            **extra,
        )

    def save(self, name: str, **extra: Any) -> None:
        """The same as ``checkpointer.save``: at any time, under any name."""
        self.checkpointer.save(name, **extra)

    def _go_on(self, error: OSError) -> None:
        # The error names the path.
        logger.error(
            "NOT SAVED: %s. Training goes on; the next period tries again", error
        )

    def _delete_old(self, iteration: int, newest: str) -> None:
        """Delete what is too old, if the newest checkpoint is good. In any thread."""
        if self.max_to_keep is None:
            return
        folder = os.path.dirname(newest)
        count = int(self.max_to_keep)
        old = files_to_delete(folder, self.file_prefix, count, iteration)
        if not old:
            return
        try:
            # Of a folder the last file only, STATE: each rank has read its shards again.
            verify_checkpoint(newest, slice(-1, None))
        except (OSError, CorruptCheckpointError) as error:
            logger.error(
                "Keeping all older checkpoints, since the newest is broken: %s", error
            )
            return
        for name in old:
            try:
                delete(os.path.join(folder, name))
            except OSError as error:
                logger.warning("Cannot delete the old checkpoint: %s", error)
