"""Saves checkpoints periodically."""

import logging
import os
from functools import partial
from typing import Any

from hooktrain.checkpoint import Checkpointer
from hooktrain.checkpoint.resume import delete_after_verifying, files_to_delete
from hooktrain.engine.hook_base import HookBase
from hooktrain.engine.train_loop import TrainerBase
from hooktrain.solver.checks import model_mismatch
from hooktrain.utils.comm import on_all_ranks_patiently
from hooktrain.utils.file_io import publish
from hooktrain.utils.names import check_count
from hooktrain.utils.periods import Period, PeriodLike

logger = logging.getLogger(__name__)


def check_saver(checkpointer: Any, file_prefix: str) -> None:
    """Refuse anything but a Checkpointer, such as a path, and an impossible file name."""
    if not isinstance(checkpointer, Checkpointer):
        raise TypeError(
            f"checkpointer must be a Checkpointer, but got {checkpointer!r}"
        )
    checkpointer.check_name(file_prefix)


class PeriodicCheckpointer(HookBase):
    """Saves at the end of each period, and at the end of the run.

    The last iteration is saved as ``{file_prefix}_final.pth``, others as
    ``{file_prefix}_0000099.pth``; folders of shards have these names without ``.pth``. Old
    checkpoints are deleted once a newer one is saved and verified, in the background if it is
    saved there.

    A full disk is logged as an error; the older files are kept, and the next period tries again.
    Only the last save of the run raises the error. When the last save returns, the checkpoint is on
    the disk, even if the checkpointer saves in the background.

    Gradients are not saved: if a model's own step accumulates over several iterations, make the
    period a multiple of their number.

    Args:
        checkpointer: the Checkpointer to save with.
        period: in iterations, or like ``"1 epoch"`` or ``"10 minutes"``; 0 saves only the final
            checkpoint.
        max_to_keep: how many numbered checkpoints to keep, at least 1; None keeps all. All files
            and folders in ``save_dir`` count, including those from before a resume. The final
            checkpoint and others without a number are neither counted nor deleted.
        file_prefix: the prefix of the file names.

    Raises:
        ValueError: if ``period`` is negative, ``max_to_keep`` is less than 1, or one of them is not
            a whole number; or if ``file_prefix`` is not a possible file name.
    """

    phase = "save"

    def __init__(
        self,
        checkpointer: Checkpointer,
        period: PeriodLike,
        *,
        max_to_keep: int | None = None,
        file_prefix: str = "model",
    ) -> None:
        if max_to_keep is not None:
            check_count("max_to_keep", max_to_keep)
        check_saver(checkpointer, file_prefix)
        self.checkpointer = checkpointer
        self.period = Period(period)
        self._is_untried = True  # until a state after an update was checked
        self.max_to_keep = max_to_keep
        self.file_prefix = file_prefix
        self.needs_every_rank = checkpointer.sharded  # each rank writes its shards

    def before_train(self) -> None:
        """Lock the folder; warn about state that would not be saved."""
        trainer = self.trainer  # a weak proxy
        self.checkpointer.run_files = lambda: [
            path for hook in trainer.hooks for path in hook.run_files()
        ]
        self._begin(is_new=trainer.start_iter == 0)
        saved = self.checkpointer.checkpointables.values()
        if not any(isinstance(each, TrainerBase) for each in saved):
            logger.warning(
                "Checkpoints will lack the trainer's state: pass trainer=trainer to Checkpointer"
            )
        model = self.checkpointer.model
        trained = getattr(trainer, "model", model)
        problem = model_mismatch("Checkpointer", model.parameters(), trained)
        if problem:
            logger.warning(problem)

    def _begin(self, *, is_new: bool) -> None:
        self.checkpointer.begin_run(is_new=is_new)
        # No resume was refused, so the configuration of default_setup is now the run's.
        publish(self.checkpointer.save_dir, "config.json")

    def after_step(self) -> None:
        """Call :meth:`step`; after the first update, check that all states can be saved."""
        if self._is_untried and self.trainer.can_save:
            self._is_untried = False
            # The optimizer has a state by now. Host-device synchronisation.
            self.checkpointer.check_states()
        self.step(self.trainer.iter)

    def step(self, iteration: int, **extra: Any) -> None:
        """Save if the iteration ends a period or the run.

        Args:
            iteration: the iteration just finished, from 0; saved as ``"iteration"``.
            extra: further entries of the file, of tensors and plain types.

        Raises:
            OSError: if the disk is full at the last save, or fails in another way at any save.
            RuntimeError: if the hook is not registered with a trainer.
        """
        if self.trainer is None:
            raise RuntimeError(
                "PeriodicCheckpointer is not registered with a trainer: in your own loop, call "
                "checkpointer.save(name, iteration=iteration)"
            )
        if self.period.is_due_or_last(self.trainer):
            with self.trainer.clock.pause("save"):
                self._save(iteration, self.trainer.is_last, **extra)

    def after_train(self) -> None:
        """Save the final checkpoint of a run that was stopped early; wait until all is on disk."""
        trainer = self.trainer
        if not trainer.succeeded:
            self.checkpointer.give_up()
            return
        is_cut = trainer.stop_reason is not None and not trainer.is_last
        if is_cut and trainer.done > 0:  # it may have been stopped before a resume
            self._save(trainer.done - 1, is_last=True)
        if self.on_every_rank:
            on_all_ranks_patiently(self.checkpointer.finish)
        else:
            self.checkpointer.finish()

    def run_files(self) -> list[str]:
        """The configuration of the run."""
        return [os.path.join(self.checkpointer.save_dir, "config.json")]

    def _save(self, iteration: int, is_last: bool, **extra: Any) -> None:
        if self.on_every_rank:
            self.trainer.prepare_save()
        if is_last:
            self.checkpointer.save(
                f"{self.file_prefix}_final", iteration=iteration, **extra
            )
            self.checkpointer.wait()
            return
        self.save_numbered(iteration, on_full=self._log_disk_full, **extra)

    def save_numbered(self, iteration: int, **options: Any) -> None:
        """Save ``{file_prefix}_{iteration}``, due or not, and delete checkpoints that are too old.

        Args:
            iteration: the iteration just finished, from 0.
            options: further arguments of ``checkpointer.save``.
        """
        self.checkpointer.save(
            f"{self.file_prefix}_{iteration:07d}",
            on_saved=partial(self._delete_old, iteration),
            iteration=iteration,
            **options,
        )

    def _delete_old(self, iteration: int, path: str) -> None:
        if self.max_to_keep is not None:
            old = files_to_delete(
                self.checkpointer.save_dir,
                self.file_prefix,
                int(self.max_to_keep),
                iteration,
            )
            delete_after_verifying(path, old)

    def _log_disk_full(self, error: OSError) -> None:
        # The error names the path.
        logger.error(
            "NOT SAVED: %s. Training continues; the next period tries again", error
        )
