"""Saves checkpoints while training."""

from hooktrain.checkpoint import PeriodicCheckpointer as PlainPeriodicCheckpointer
from hooktrain.engine.rank_differences import warn_of_differences
from hooktrain.engine.train_loop import HookBase, TrainerBase


class PeriodicCheckpointer(PlainPeriodicCheckpointer, HookBase):
    """:class:`hooktrain.checkpoint.PeriodicCheckpointer` as a hook, with the same arguments.

    Register it last, so that the checkpoint holds what the other hooks did in the iteration. The
    state of one that comes later is saved as it was an iteration before; a warning says so. Of
    files only the main process writes. What is saved in the background is complete when ``train()``
    returns.

    Gradients are not saved. So inside a window of accumulation a save is put off until the window
    ends, for a period at most.
    """

    @property
    def needs_every_rank(self) -> bool:  # type: ignore[override]
        """Every rank writes its part of a sharded checkpoint."""
        return self.checkpointer.sharded

    def before_train(self) -> None:
        """Learn where the run begins and ends; refuse states that could not be saved."""
        self.max_iter = self.trainer.max_iter
        self._is_put_off = self._compared = False
        self.checkpointer.begin_run()
        hooks = self.trainer._hooks
        late = [type(h).__name__ for h in hooks[hooks.index(self) + 1 :] if h.state_dict()]
        if late:
            text = "%s come after %s, which saves their state as it was an iteration before"
            self.checkpointer.logger.warning(text, late, type(self).__name__)
        if not any(isinstance(c, TrainerBase) for c in self.checkpointer.checkpointables.values()):
            text = "Checkpoints have no trainer to resume: give Checkpointer(..., trainer=trainer)"
            self.checkpointer.logger.warning(text)
        if self.trainer.start_iter == 0:
            self.checkpointer.begin_anew()

    def after_step(self) -> None:
        """Save where a period ends, and at the last iteration."""
        if type(self).step is not PlainPeriodicCheckpointer.step:  # it decides by itself
            self.step(self.trainer.iter)
            return
        is_due = self.is_due(self.period)
        is_wanted = is_due or self._is_put_off
        # Put off for a whole period, or with no iteration left to wait for.
        is_late = (is_due and self._is_put_off) or self.trainer.iter + 1 == self.max_iter
        self._is_put_off = is_wanted and not is_late and not self.trainer.can_save
        if is_wanted and not self._is_put_off:
            self.trainer.prepare_save(self.on_every_rank)
            if self.on_every_rank and not self._compared:
                warn_of_differences(self.trainer)
            self._compared = True
            self.save_at(self.trainer.iter)

    def after_train(self) -> None:
        """Save the final checkpoint of a run that was stopped early; wait for what is written."""
        trainer = self.trainer
        if not trainer.succeeded:
            self.checkpointer.give_up()
            return
        if trainer.max_iter != self.max_iter and trainer.iter > trainer.start_iter:
            self.max_iter = trainer.max_iter
            trainer.prepare_save(self.on_every_rank)
            self.save_at(trainer.max_iter - 1)
        self.checkpointer.wait()
