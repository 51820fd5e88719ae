"""Windows of gradient accumulation: several backward passes that make one update."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hooktrain.utils import comm
from hooktrain.utils.dtensor import is_sharded, shard_like

__all__ = ["Window", "load_gradients", "mean_gradients"]


class Window:
    """Counts backward passes, and knows which of them complete an update.

    A window has ``full_length`` passes, or fewer at the end of a run of known length.

    Args:
        full_length: passes to one update, at least 1.

    Attributes:
        count: the passes made so far, in all windows.

    Raises:
        ValueError: for another length.
    """

    def __init__(self, full_length: int) -> None:
        if not isinstance(full_length, int) or full_length < 1:
            raise ValueError(
                f"accumulative_counts must be an integer of at least 1, but got {full_length!r}"
            )
        self.full_length = full_length
        self.count = 0
        self._start = self._end = 0  # of the last window that was opened, as counts
        self._max_count = -1

    def initialize(self, count: int, max_count: int) -> None:
        """Go to ``count`` passes of a run of ``max_count``; the same count keeps a window open.

        Raises:
            ValueError: unless ``0 <= count <= max_count``.
        """
        if not 0 <= count <= max_count:
            raise ValueError(
                f"it must be 0 <= init_counts <= max_counts, but got {count!r} and {max_count!r}"
            )
        self._max_count = max_count
        if count != self.count:
            self.count = count
            self.close()

    def length(self) -> int:
        """The passes of the window that the next pass belongs to."""
        if self.count < self._end:
            return self._end - self._start
        left = self._max_count - self.count
        return min(self.full_length, left) if left > 0 else self.full_length

    def open(self) -> None:
        """Open the next window, unless one is open."""
        if self.count >= self._end:
            self._start, self._end = self.count, self.count + self.length()

    def close(self) -> None:
        """Forget an open window: the next pass begins another."""
        self._start = self._end = self.count

    def ended(self) -> bool:
        """Whether no window is open."""
        return self.count >= self._end

    def ends_next(self) -> bool:
        """Whether the next pass completes a window."""
        return self.length() == 1 or self.count + 1 == self._end

    def state_dict(self) -> dict[str, Any]:
        """The passes so far, and those of the open window."""
        state: dict[str, Any] = {"inner_count": self.count}
        if not self.ended():
            state["window"] = {"start": self._start, "end": self._end, "of": self.full_length}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` gave; a window of another full length is not open."""
        self.count = int(state_dict.get("inner_count", 0))
        self.close()
        saved = state_dict.get("window")
        if saved is not None and saved["of"] == self.full_length:
            self._start, self._end = int(saved["start"]), int(saved["end"])


def mean_gradients(
    optimizer: torch.optim.Optimizer, ranks: int | None = None
) -> list[Tensor | None]:
    """The gradients of all parameters in their order; with several ranks, their means.

    Inside of a window each rank has gradients of its own batches only. The mean makes the same
    update at the end of the window, whatever the number of ranks then is. The gradients
    themselves stay as they are. With several ranks it is a collective.

    Args:
        optimizer: whose parameters to look at.
        ranks: None is all of them; 1 does not communicate.

    Returns:
        The gradients, None where a parameter has none. Sharded ones are means already; the list
        is empty if a sharded model has kept back what it has not exchanged.
    """
    parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    grads = [p.grad for p in parameters]
    if any(is_sharded(p) for p in parameters):
        return grads if any(g is not None for g in grads) else []
    ranks = comm.get_world_size() if ranks is None else ranks
    if ranks == 1:
        return grads
    used = torch.tensor([float(g is not None) for g in grads], device=parameters[0].device)
    dist.all_reduce(used)
    means: list[Tensor | None] = []
    # Host-device synchronisation, at a checkpoint inside of a window only.
    for parameter, grad, users in zip(parameters, grads, used.tolist(), strict=True):
        mean = torch.zeros_like(parameter) if grad is None else grad.clone()
        if users:
            dist.all_reduce(mean)
        means.append(mean.detach() / ranks if users else None)
    return means


def load_gradients(optimizer: torch.optim.Optimizer, gradients: Sequence[Tensor | None]) -> bool:
    """Set the gradients that ``mean_gradients`` gave; False, if they are of other parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if len(parameters) != len(gradients) or any(
        g is not None and g.shape != p.shape for p, g in zip(parameters, gradients, strict=True)
    ):
        return False
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            parameter.grad = None
        else:
            own = shard_like(gradient, parameter)
            parameter.grad = own.to(parameter.device, parameter.dtype, copy=True)
    return True
