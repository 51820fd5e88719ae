"""Saves checkpoints while training."""

from hooktrain.checkpoint import Checkpointer
from hooktrain.checkpoint import PeriodicCheckpointer as PlainPeriodicCheckpointer
from hooktrain.engine.train_loop import HookBase

__all__ = ["PeriodicCheckpointer", "check_on_every_rank"]


def check_on_every_rank(hook: HookBase, checkpointer: Checkpointer) -> None:
    """Refuse a hook that saves sharded checkpoints on some of the ranks only.

    Raises:
        RuntimeError: since it would wait for ever for the others.
    """
    if checkpointer.sharded and not hook.on_every_rank:
        raise RuntimeError(
            "every rank writes its part of a sharded checkpoint: register "
            f"{type(hook).__name__} on every rank, not only on some"
        )


class PeriodicCheckpointer(PlainPeriodicCheckpointer, HookBase):
    """:class:`hooktrain.checkpoint.PeriodicCheckpointer` as a hook, with the same arguments.

    Register it last, so that the checkpoint holds what the other hooks did in the iteration; and
    on every rank, so that it also holds every rank's random state. Of files only the main process
    writes. What a checkpointer saves in the background is looked after every ``sync_period``
    iterations, and is complete when ``train()`` returns.
    """

    def before_train(self) -> None:
        """Learn where the run begins and ends; see also :func:`check_on_every_rank`."""
        self.max_iter = self.trainer.max_iter
        check_on_every_rank(self, self.checkpointer)
        if self.trainer.start_iter == 0:
            self.checkpointer.begin_anew()

    def after_step(self) -> None:
        """Save where a period ends, and at the last iteration."""
        if self.is_due(self.period):
            self._save(self.trainer.iter)
        elif self.is_due(self.trainer.sync_period):
            self.checkpointer.poll()

    def after_train(self) -> None:
        """Save the final checkpoint of a run that was stopped early; end all that is under way."""
        trainer = self.trainer
        stopped = trainer.succeeded and trainer.max_iter != self.max_iter
        if stopped and trainer.iter > trainer.start_iter:
            self.max_iter = trainer.max_iter
            self._save(trainer.max_iter - 1)
        if trainer.succeeded:
            self.checkpointer.wait()
        else:
            self.checkpointer.give_up()

    def _save(self, iteration: int) -> None:
        if self.on_every_rank:
            self.trainer.prepare_checkpoint()
        self.step(iteration)
