"""Goes on without the updates that would ruin the model."""

import logging
from collections.abc import Mapping
from typing import Any

from hooktrain.engine.train_loop import HookBase
from hooktrain.solver.optim_wrapper_dict import wrappers_by_name
from hooktrain.utils import comm
from hooktrain.utils.dtensor import is_sharded
from hooktrain.utils.finite import non_finite

logger = logging.getLogger(__name__)


class SkipNonFinite(HookBase):
    """Skips an update whose gradients are infinite or NaN, up to so many times in a row.

    Without it such a loss ends the run by a FloatingPointError. With it parameters and optimizer
    stay as they were, schedules go on, and the loss is logged as it was. The optimizer's wrapper
    counts ``skipped_updates``. Where ranks exchange gradients, all of them have the same ones and
    skip the same update; of a sharded model they exchange one number.

    A loss that is not finite though its gradients are, and a buffer such as a batch norm's that
    has taken in what is not finite, still end the run: skipping an update does not repair them. Of
    several passes that are accumulated, the gradients alone decide.

    A scaler of float16 skips updates while it looks for its scale, which counts here too.

    It costs a host-device synchronisation and the largest gradient in each iteration.

    Args:
        max_skips: how many in a row.
        on_limit: after one more, ``"raise"`` raises a FloatingPointError and ``"stop"`` ends the
            run in order.

    Raises:
        ValueError: for another ``on_limit``.
    """

    def __init__(self, max_skips: int = 20, on_limit: str = "raise") -> None:
        if on_limit not in ("raise", "stop"):
            raise ValueError(f"on_limit must be 'raise' or 'stop', but got {on_limit!r}")
        self._max_skips = max_skips
        self._on_limit = on_limit
        self._in_a_row = 0

    def before_train(self) -> None:
        """Note which buffers can be checked: some, such as masks, are meant to be infinite."""
        self._meant_so = non_finite(dict(self.trainer.model.named_buffers()))

    def before_step(self) -> None:
        """Nothing is skipped in this iteration yet; whether it will be, may be known later only."""
        self._skipping = False
        wrappers = wrappers_by_name(self.trainer.optim_wrapper).values()
        if not all(wrapper.should_sync() for wrapper in wrappers):
            self.trainer.tolerate_losses()

    def after_backward(self) -> None:
        """Drop the gradients, if some are not finite: the optimizer passes them over then."""
        wrapper = self.trainer.updating
        parameters = [p for group in wrapper.optimizer.param_groups for p in group["params"]]
        gradients = {str(i): p.grad for i, p in enumerate(parameters) if p.grad is not None}
        has_bad = bool(non_finite(gradients))  # host-device synchronisation
        if any(map(is_sharded, gradients.values())):
            has_bad = comm.any_rank(has_bad)
        if not has_bad:
            return
        buffers = dict(self.trainer.model.named_buffers())
        broken = sorted(non_finite(buffers) - self._meant_so)
        if comm.any_rank(bool(broken)):
            whose = broken or "those of another rank"
            raise FloatingPointError(f"buffers of the model are not finite any more: {whose}")
        for parameter in parameters:
            parameter.grad = None
        scaler = getattr(wrapper, "grad_scaler", None)
        if scaler is None or not scaler.is_enabled():  # a scaler counts what it skips
            wrapper.count_skipped_update()
        self._skipping = True
        self.trainer.tolerate_losses()
        if comm.is_main_process():
            logger.warning("Iteration %d: gradients are not finite: no update", self.trainer.iter)

    def after_step(self) -> None:
        """Raise or stop, if there were too many in a row."""
        self._in_a_row = self._in_a_row + 1 if self._skipping else 0
        if self._in_a_row <= self._max_skips:
            return
        message = f"gradients were not finite in {self._in_a_row} iterations in a row, up to "
        message += f"iteration {self.trainer.iter}; max_skips is {self._max_skips}"
        if self._on_limit == "raise":
            raise FloatingPointError(message)
        self.trainer.request_stop(message)

    def state_dict(self) -> dict[str, Any]:
        """How many in a row there were."""
        return {"in_a_row": self._in_a_row}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned."""
        self._in_a_row = state_dict["in_a_row"]
