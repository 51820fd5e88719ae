"""Skips updates that would ruin the model."""

import logging
import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch

from hooktrain.engine.hook_base import HookBase
from hooktrain.engine.losses import WHERE_IT_BEGINS
from hooktrain.solver import OptimWrapper
from hooktrain.solver.optim_wrapper_dict import wrappers_by_name
from hooktrain.utils import comm
from hooktrain.utils.names import check_count
from hooktrain.utils.tensors import compute_device, is_sharded, non_finite

logger = logging.getLogger(__name__)

_WINDOW = 100  # a spike is measured against the median of so many losses
_FEWEST = 20  # with fewer losses there are no spikes


class SkipNonFinite(HookBase):
    """Skips an update whose gradients are infinite or NaN, up to ``max_skips`` times in a row.

    Without this hook a loss that is not finite ends the run with a FloatingPointError. With it
    the parameters and the optimizer's state do not change, schedules go on, and the loss is logged
    unchanged. The optimizer's wrapper counts ``skipped_updates``. All ranks skip the same update:
    they exchange gradients, or one number if the model is sharded.

    With ``max_ratio`` it also skips the update if the loss spikes: the mean over the ranks of
    ``total_loss`` exceeds ``max_ratio`` times the median of the last 100 finite ones, which include
    spikes. With fewer than 20 there are no spikes, nor if the median is not positive. A loss that
    stays high ends the run by ``max_skips``. Running statistics, as of batch norm, include the
    batch nevertheless. This needs the losses before the update, and so the step of
    :class:`hooktrain.engine.SimpleTrainer`.

    Two things still end the run, since skipping an update does not repair them: a loss that is not
    finite although its gradients are, and at the next checkpoint, which is not saved, a buffer that
    is no longer finite, such as a batch norm's. If several passes are accumulated, the gradients
    alone decide.

    The skips by which a float16 scaler finds its scale count here too.

    Each iteration costs the maximum of the gradients and a host-device synchronisation; with
    ``max_ratio`` another one for the loss, and the ranks exchange a number.

    Args:
        max_skips: the number of skips in a row, at least 0. One more raises a FloatingPointError.
        max_ratio: the ratio of a spike, above 1, such as 3; None only checks gradients.

    Raises:
        ValueError: for impossible arguments; in a run, if ``max_ratio`` finds no losses.

    Attributes:
        recent: with ``max_ratio`` the last losses; checkpoints have them.
    """

    phase = "update"

    def __init__(self, max_skips: int = 20, max_ratio: float | None = None) -> None:
        check_count("max_skips", max_skips, 0)
        if max_ratio is not None and not max_ratio > 1:
            raise ValueError(f"max_ratio must be above 1: {max_ratio!r}")
        self._max_skips = max_skips
        self._max_ratio = max_ratio
        self.recent: deque[float] = deque(maxlen=_WINDOW)

    def before_train(self) -> None:
        """Begin to count."""
        if self.trainer.start_iter == 0:
            self.recent.clear()  # the losses of another run
        self._in_a_row = 0

    def before_step(self) -> None:
        """Tolerate the losses of passes that only accumulate; their update is checked later."""
        self._skipping = False
        wrappers = wrappers_by_name(self.trainer.optim_wrapper).values()
        if not all(wrapper.should_sync() for wrapper in wrappers):
            self.trainer.tolerate_losses()

    def after_backward(self) -> None:
        """Drop the gradients of a bad update, so that the optimizer changes no parameter."""
        is_spike = self._max_ratio is not None and self._is_spike(self._max_ratio)
        for wrapper in wrappers_by_name(self.trainer.updating).values():
            self._look_at(wrapper, is_spike)

    def _is_spike(self, max_ratio: float) -> bool:
        """Whether the loss of this iteration is a spike. A collective."""
        trainer = self.trainer
        if not trainer.losses:
            raise ValueError(
                f"SkipNonFinite(max_ratio={max_ratio!r}) needs the losses before the update, "
                "and so the run_step of SimpleTrainer"
            )
        total = trainer.losses.get("total_loss", sum(trainer.losses.values()))
        own = torch.tensor(total.item())  # host-device synchronisation
        loss = comm.all_reduce(own).item() / comm.get_world_size()
        is_known = len(self.recent) >= _FEWEST
        # A ratio to a median that is not positive means nothing.
        is_spike = is_known and 0 < max_ratio * median(self.recent) < loss
        if math.isfinite(loss):
            self.recent.append(loss)
        return is_spike

    def _look_at(self, wrapper: OptimWrapper, is_spike: bool) -> None:
        gradients = {str(i): p.grad for i, p in enumerate(wrapper.parameters)}
        is_bad = bool(non_finite(gradients))  # host-device synchronisation
        if any(map(is_sharded, gradients.values())):
            is_bad = comm.any_rank(is_bad, compute_device(self.trainer.model))
        if not (is_bad or is_spike):
            return
        wrapper.zero_grad(set_to_none=True)
        scaler = getattr(wrapper, "grad_scaler", None)
        # A scaler counts the infinite gradients by itself.
        if not (is_bad and scaler is not None and scaler.is_enabled()):
            wrapper.count_skipped_update()
        self._skipping = True
        self.trainer.tolerate_losses()
        if comm.is_main_process():
            why = "gradients are not finite" if is_bad else "the loss is a spike"
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

    def state_dict(self) -> dict[str, Any]:
        """The last losses, if there are any."""
        return {"recent": [*self.recent]} if self.recent else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned."""
        self.recent.extend(state_dict["recent"])
