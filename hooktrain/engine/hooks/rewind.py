"""Goes back to a good checkpoint when the loss blows up."""

import logging
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from hooktrain.checkpoint import Checkpointer
from hooktrain.checkpoint.resume import newest_before, write_pointer
from hooktrain.engine.train_loop import HookBase
from hooktrain.utils import comm

logger = logging.getLogger(__name__)


class Rewind(HookBase):
    """Goes back where a loss is not finite or far too high, and leaves out the batches since then.

    The model, the optimizer and the hooks return to the last checkpoint before the bad loss. The
    data go on behind the batch with which it was noticed, as in the training of PaLM
    (https://arxiv.org/abs/2204.02311, section 5.1). What was left out is logged, and kept in the
    state of this hook, so in each later checkpoint. A resumed run does the same as one that was
    not interrupted.

    :class:`~hooktrain.engine.DefaultTrainer` needs only this hook among its ``hooks``. In a script
    of your own, register it before the hook that saves, and go on after an error::

        while True:
            try:
                trainer.train(max_iter=1000)
                break
            except FloatingPointError as error:
                rewind.go_back(error, checkpointer)

    Args:
        factor: a loss above the median of the last ``window`` losses times ``factor`` is a spike.
            Losses are looked at every ``trainer.sync_period`` iterations. None looks for none, and
            goes back only where the run would end by a ``FloatingPointError``.
        window: how many losses; before there are so many, none is a spike.
        max_rewinds: after so many in a run the error ends it.
        metric: the name of the loss.

    Attributes:
        rewinds: for each time the first and the last iteration that were left out, and the reason.
    """

    needs_every_rank = True

    def __init__(
        self,
        factor: float | None = None,
        window: int = 100,
        max_rewinds: int = 10,
        metric: str = "total_loss",
    ) -> None:
        self._factor = factor
        self._window = window
        self._max_rewinds = max_rewinds
        self._metric = metric
        self._spike: int | None = None
        self.rewinds: list[tuple[int, int, str]] = []

    def after_step(self) -> None:
        """Look for a spike at the end of a period: all ranks know the same losses then."""
        if self._factor is None or not self.is_due(self.trainer.sync_period):
            return
        # Host-device synchronisation: reads the losses of the period.
        losses = self.trainer.storage.history(self._metric)
        new = losses.since(self.trainer.iter + 1 - self.trainer.sync_period)
        values = [value for value, _ in losses.tail(self._window + len(new))]
        for end, (value, iteration) in enumerate(new, len(values) - len(new)):
            usual = values[max(0, end - self._window) : end]
            if len(usual) == self._window and value > self._factor * median(usual):
                self._spike = iteration
                raise FloatingPointError(
                    f"{self._metric} is {value:g} at iteration {iteration}, more than "
                    f"{self._factor:g} times the {median(usual):g} that is usual"
                )

    def go_back(self, error: FloatingPointError, checkpointer: Checkpointer) -> None:
        """Load the last checkpoint before the bad loss; the next ``train()`` goes on from there.

        Args:
            error: what has ended the run. It is raised again if there is no such checkpoint, or
                after ``max_rewinds``.
            checkpointer: saves the trainer under the name ``trainer``. Only checkpoints whose
                names have an iteration count.
        """
        trainer, failed = self.trainer, self.trainer.iter
        # No checkpoint has what is not finite, but one may have been saved since the spike.
        bad, self._spike = failed + 1 if self._spike is None else self._spike, None
        checkpointer.wait()
        path = comm.broadcast(newest_before(checkpointer.save_dir, bad))
        if path is None or len(self.rewinds) == self._max_rewinds:
            raise error
        rewinds = self.rewinds
        others = [name for name in checkpointer.checkpointables if name != "trainer"]
        parts = [f"trainer.{part}" for part in trainer.state_parts if part != "data"]
        checkpointer.load(path, [*others, *parts])
        if comm.is_main_process():
            write_pointer(checkpointer.save_dir, Path(path).name)
        self.rewinds = [*rewinds, (trainer.iter + 1, failed, str(error))]
        text = "Going back behind iteration %d, without the batches of iterations %d to %d: %s"
        logger.warning(text, trainer.iter, trainer.iter + 1, failed, error)

    def state_dict(self) -> dict[str, Any]:
        """What was left out."""
        return {"rewinds": self.rewinds}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned."""
        self.rewinds = state_dict["rewinds"]
