"""Saves checkpoints while training."""

from hooktrain.checkpoint import PeriodicCheckpointer as PlainPeriodicCheckpointer
from hooktrain.engine.hook_base import HookBase

__all__ = ["PeriodicCheckpointer"]


class PeriodicCheckpointer(PlainPeriodicCheckpointer, HookBase):
    """:class:`hooktrain.checkpoint.PeriodicCheckpointer` as a hook, with the same arguments.

    Register it last, so that the checkpoint holds what the other hooks did in the iteration; and
    on every rank, so that it also holds every rank's random state. Only the main process writes.
    """

    def before_train(self) -> None:
        """Learn where the run ends."""
        self.max_iter = self.trainer.max_iter

    def after_step(self) -> None:
        """Save where a period ends, and at the last iteration."""
        done = self.trainer.iter + 1
        if done % self.period == 0 or done == self.max_iter:
            self._save(self.trainer.iter)

    def after_train(self) -> None:
        """Save the final checkpoint of a run that was stopped early."""
        trainer = self.trainer
        stopped_early = trainer.iter == trainer.max_iter != self.max_iter
        if stopped_early and trainer.iter > trainer.start_iter:
            self.max_iter = trainer.max_iter
            self._save(trainer.max_iter - 1)

    def _save(self, iteration: int) -> None:
        if self.trainer.on_every_rank(self):
            self.trainer.prepare_checkpoint()
        self.step(iteration)
