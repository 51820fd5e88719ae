"""Skips updates that would ruin the model."""

import logging

from hooktrain.engine.hook_base import HookBase
from hooktrain.engine.losses import WHERE_IT_BEGINS
from hooktrain.solver import OptimWrapper
from hooktrain.solver.optim_wrapper_dict import by_name
from hooktrain.utils import comm
from hooktrain.utils.names import check_count
from hooktrain.utils.tensors import compute_device, is_sharded, non_finite

logger = logging.getLogger(__name__)


class SkipNonFinite(HookBase):
    """Skips an update whose gradients are infinite or NaN, up to ``max_skips`` times in a row.

    Without this hook a loss that is not finite ends the run with a FloatingPointError. With it,
    parameters and optimizer state stay unchanged, schedules continue, and the loss is logged as it
    is. The optimizer's wrapper counts ``skipped_updates``. All ranks skip the same updates, since
    they exchange gradients, or one number if the model is sharded.

    A subclass that skips further updates, such as those of loss spikes, calls
    :meth:`skip_update`; docs/guide/debugging.md has an example.

    Two errors still end the run, since skipping an update does not repair them: a loss that is not
    finite although its gradients are, and a buffer, such as a batch norm's, that is not finite at
    the next checkpoint, which is then not saved. If several passes are accumulated, only the
    gradients are checked, not each loss.

    The updates that a float16 scaler skips to find its scale count too.

    Each iteration costs a maximum over the gradients and a host-device synchronisation.

    Args:
        max_skips: how many skips in a row to allow, at least 0. One more raises a
            FloatingPointError.

    Raises:
        ValueError: if ``max_skips`` is negative or not a whole number.
    """

    phase = "update"

    def __init__(self, max_skips: int = 20) -> None:
        check_count("max_skips", max_skips, 0)
        self._max_skips = max_skips

    def before_train(self) -> None:
        """Start counting from 0."""
        self._in_a_row = 0

    def before_step(self) -> None:
        """Tolerate the losses of passes that only accumulate; their update is checked later."""
        self._skipping = False
        wrappers = by_name(self.trainer.optim_wrapper).values()
        if not all(wrapper.should_sync() for wrapper in wrappers):
            self.trainer.tolerate_losses()

    def after_backward(self) -> None:
        """Drop the gradients of a bad update, so that the optimizer changes no parameter."""
        for wrapper in by_name(self.trainer.updating).values():
            if self._is_bad(wrapper):
                # A scaler counts these updates itself.
                scaler = getattr(wrapper, "grad_scaler", None)
                if scaler is None or not scaler.is_enabled():
                    wrapper.count_skipped_update()
                self.skip_update(wrapper, "gradients are not finite")

    def _is_bad(self, wrapper: OptimWrapper) -> bool:
        gradients = [p.grad for p in wrapper.parameters]
        # Host-device synchronisation.
        is_bad = bool(non_finite({"gradients": gradients}))
        if any(map(is_sharded, gradients)):
            is_bad = comm.any_rank(is_bad, compute_device(self.trainer.model))
        return is_bad

    def skip_update(self, wrapper: OptimWrapper, why: str) -> None:
        """Skip the next update, and log why. Call it on all ranks.

        Args:
            wrapper: the wrapper of the optimizer whose gradients are dropped.
            why: the reason, for the log.
        """
        wrapper.zero_grad(set_to_none=True)
        self._skipping = True
        self.trainer.tolerate_losses()
        if comm.is_main_process():
            logger.warning(
                "Skipped the update of iteration %d: %s", self.trainer.iter, why
            )

    def after_step(self) -> None:
        """Raise an error after too many skips in a row."""
        self._in_a_row = self._in_a_row + 1 if self._skipping else 0
        if self._in_a_row > self._max_skips:
            raise FloatingPointError(
                f"{self._in_a_row} iterations in a row made no update, up to iteration "
                f"{self.trainer.iter}; max_skips is {self._max_skips}\n"
                f"{WHERE_IT_BEGINS}"
            )
