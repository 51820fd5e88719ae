"""Saves checkpoints while training."""

import logging
from typing import Any

from hooktrain.checkpoint import PeriodicCheckpointer as PlainPeriodicCheckpointer
from hooktrain.engine.hooks.averaging import is_trained
from hooktrain.engine.train_loop import HookBase, TrainerBase
from hooktrain.utils.periods import Period

logger = logging.getLogger(__name__)


class PeriodicCheckpointer(PlainPeriodicCheckpointer, HookBase):
    """:class:`hooktrain.checkpoint.PeriodicCheckpointer` as a hook, with the same arguments.

    Register it last, so that the checkpoint holds what the other hooks did in the iteration.
    What is saved in the background is complete when ``train()`` returns.

    Gradients are not saved: where a model's own step accumulates over several iterations, a
    save is put off to the end of the accumulation, for a period at most.
    """

    @property
    def needs_every_rank(self) -> bool:  # type: ignore[override]
        """Each writes its shards."""
        return self.checkpointer.sharded

    def before_train(self) -> None:
        """Learn where the run ends; warn of what would not be saved."""
        self.max_iter = self.trainer.max_iter
        self._is_put_off = False
        self.checkpointer.begin_run(is_new=self.trainer.start_iter == 0)
        saved = self.checkpointer.checkpointables.values()
        if not any(isinstance(each, TrainerBase) for each in saved):
            logger.warning(
                "Checkpoints have no trainer: give Checkpointer(..., trainer=trainer)"
            )
        if not is_trained(self.checkpointer.model, self.trainer):
            logger.warning("Checkpoints have another model than the trainer's")
        hooks = self.trainer._hooks
        later = hooks[hooks.index(self) + 1 :]
        late = [type(hook).__name__ for hook in later if hook.state_dict()]
        if late:
            logger.warning(
                "%s come after %s, which saves their state of an iteration before",
                late,
                type(self).__name__,
            )

    def after_step(self) -> None:
        """Call :meth:`step`."""
        self.step(self.trainer.iter)

    def step(self, iteration: int, **extra: Any) -> None:
        """Save if ``iteration`` ends a period or the run; also without a trainer."""
        if self.trainer is None:
            super().step(iteration, **extra)
            return
        trainer = self.trainer
        is_due = trainer.is_last or Period(self.period).is_due(trainer)
        if not (is_due or self._is_put_off):
            return
        is_late = is_due and self._is_put_off
        self._is_put_off = not (trainer.can_save or is_late or trainer.is_last)
        if not self._is_put_off:
            self._save(iteration, **extra)

    def after_train(self) -> None:
        """Save the final checkpoint of a run that was stopped early; wait for the disk."""
        trainer = self.trainer
        if not trainer.succeeded:
            self.checkpointer.give_up()
            return
        if trainer.max_iter != self.max_iter and trainer.iter > trainer.start_iter:
            self.max_iter = trainer.max_iter
            self._save(trainer.max_iter - 1)
        self.checkpointer.wait()

    def _save(self, iteration: int, **extra: Any) -> None:
        if self.on_every_rank:
            self.trainer.prepare_save()
        self.save_at(iteration, **extra)
