"""How a loss becomes an update: accumulation, clipping, and the optimizer's step."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from hooktrain.utils.events import get_event_storage, has_event_storage

__all__ = ["OptimWrapper"]

logger = logging.getLogger(__name__)

# One object serves everywhere: nullcontext holds no state.
NOTHING = contextlib.nullcontext()


class OptimWrapper:
    """Wraps a torch optimizer with gradient accumulation and clipping.

    A subclass changes how the loss is scaled and the step taken, never the loop around it.
    The order in a step is fixed: unscale, clip, update. Hooks in ``after_backward`` run before
    it, when all gradients are there.

    Args:
        optimizer: the optimizer.
        accumulative_counts: how many backward passes make one update, at least 1.
        clip_grad: None for no clipping, or a dict: ``{"max_norm": 1.0, "norm_type": 2}`` clips the
            norm of all gradients together (:func:`torch.nn.utils.clip_grad_norm_`) and logs the
            norm before clipping as ``grad_norm``; ``{"type": "value", "clip_value": 0.5}`` clips
            each element (:func:`torch.nn.utils.clip_grad_value_`).

    Attributes:
        skipped_updates: how many updates were skipped so far since gradients were not finite.

    Raises:
        TypeError: if ``optimizer`` is not an optimizer, or ``clip_grad`` not a dict.
        ValueError: for another count or clipping type, or clipping without its threshold.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        accumulative_counts: int = 1,
        clip_grad: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(accumulative_counts, int) or accumulative_counts < 1:
            raise ValueError(
                f"accumulative_counts must be an integer of at least 1, "
                f"but got {accumulative_counts!r}"
            )
        self.optimizer = optimizer
        self.accumulative_counts = accumulative_counts
        self.skipped_updates = 0
        self._clip = None if clip_grad is None else _build_clipping(clip_grad)
        self._inner_count = 0

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer."""
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch optimizer, but got {optimizer!r}")
        self._optimizer = optimizer
        self._custom_zero_grad = type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad

    @property
    def inner_count(self) -> int:
        """How many backward passes were made so far."""
        return self._inner_count

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups."""
        return self.optimizer.param_groups

    def update_params(self, loss: Tensor) -> bool:
        """Take in the loss of one batch; update where a window of accumulation ends.

        Returns:
            Whether the parameters were updated.
        """
        self.backward(self.scale_loss(loss))
        if not self.window_ended():
            return False
        updated = self.step()
        self.zero_grad()
        return updated

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Divide the loss so that the accumulated gradients are those of the mean."""
        return loss if self.accumulative_counts == 1 else loss / self.accumulative_counts

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss."""
        loss.backward()  # type: ignore[no-untyped-call]
        self._inner_count += 1

    def start_window(self) -> None:
        """Begin a new window of accumulation, whatever an error has left of the one before."""
        self._inner_count -= self._inner_count % self.accumulative_counts

    def window_ended(self) -> bool:
        """Whether the last backward pass completed a window of accumulation."""
        return self._inner_count % self.accumulative_counts == 0

    def should_sync(self) -> bool:
        """Whether the next backward pass completes a window, so that ranks must communicate."""
        return (self._inner_count + 1) % self.accumulative_counts == 0

    def unscale_gradients(self) -> None:
        """Undo what a scaler did to the gradients, so that hooks see the true ones."""

    def step(self) -> bool:
        """Clip the gradients and update the parameters.

        Returns:
            Whether the update was made. A scaler skips it when gradients overflowed.
        """
        if self._clip is not None:
            self.clip_gradients()
        self._optimizer.step()
        return True

    def clip_gradients(self) -> None:
        """Clip the gradients, if asked for, and log their norm."""
        if self._clip is None:
            return
        grads = [p for g in self._optimizer.param_groups for p in g["params"] if p.grad is not None]
        norm = self._clip(grads)
        if norm is not None and has_event_storage():
            get_event_storage().put_scalar("grad_norm", norm)

    def zero_grad(self) -> None:
        """Forget the gradients, as ``optimizer.zero_grad(set_to_none=True)`` does."""
        if self._custom_zero_grad:
            self._optimizer.zero_grad()
            return
        # The same without torch's preparations for its profiler and compiler, which take longer
        # (7 us a step) than all the rest for a small model.
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def sync_context(self, model: nn.Module) -> AbstractContextManager[Any]:
        """For forward and backward together: ranks communicate only where a window ends."""
        if self.accumulative_counts == 1 or self.should_sync() or not hasattr(model, "no_sync"):
            return NOTHING
        context: AbstractContextManager[Any] = model.no_sync()  # type: ignore[operator]
        return context

    def precision_context(self) -> AbstractContextManager[Any]:
        """For the forward pass: the numbers to compute in. Full precision here."""
        return NOTHING

    @contextlib.contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """Both contexts in one, for models that own their training step."""
        with self.sync_context(model), self.precision_context():
            yield

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, with the wrapper's counters beside it."""
        return {
            **self.optimizer.state_dict(),
            "inner_count": self._inner_count,
            "accumulative_counts": self.accumulative_counts,
            "skipped_updates": self.skipped_updates,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` gave; a torch optimizer's own state also loads.

        The settings of the parameter groups (learning rate, weight decay, ...) come from the
        state too. Where that overrules what the optimizer was built with, a table says so.
        """
        _log_overruled(self.optimizer.param_groups, state_dict["param_groups"])
        self.optimizer.load_state_dict({k: state_dict[k] for k in ("state", "param_groups")})
        self._inner_count = int(state_dict.get("inner_count", 0))
        if state_dict.get("accumulative_counts") != self.accumulative_counts:
            self.start_window()  # the position is one in windows of another length
        self.skipped_updates = int(state_dict.get("skipped_updates", 0))

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(accumulative_counts={self.accumulative_counts}, "
            f"optimizer={self.optimizer!r})"
        )


def _build_clipping(config: Mapping[str, Any]) -> Callable[[list[Tensor]], Tensor | None]:
    """A function that clips gradients in place, and gives their norm if it knows it."""
    if not isinstance(config, Mapping):
        raise TypeError(f"clip_grad must be a dict or None, but got {config!r}")
    options = dict(config)
    kind = options.pop("type", "norm")
    if kind not in ("norm", "value"):
        raise ValueError(f"clip_grad['type'] must be 'norm' or 'value', but got {kind!r}")
    allowed = {"norm": ("max_norm", "norm_type"), "value": ("clip_value",)}[kind]
    limit = options.get(allowed[0])
    if unknown := [key for key in options if key not in allowed]:
        raise ValueError(f"clip_grad has unknown keys {unknown}; {kind!r} clipping has {allowed}")
    if not isinstance(limit, int | float) or not limit > 0:
        raise ValueError(f"clip_grad[{allowed[0]!r}] must be a positive number, but got {limit!r}")
    if kind == "value":
        return lambda parameters: nn.utils.clip_grad_value_(parameters, float(limit))
    norm_type = float(options.get("norm_type", 2.0))
    return lambda parameters: nn.utils.clip_grad_norm_(parameters, float(limit), norm_type)


def _log_overruled(built: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    """Log a table of the settings that the checkpoint changes."""
    rows = []
    for i, (ours, theirs) in enumerate(zip(built, saved, strict=False)):
        # A schedule moves lr all the time; initial_lr is what the configuration said.
        moving = {"params", "param_names", *(["lr"] if "initial_lr" in theirs else [])}
        base = {"initial_lr": ours.get("initial_lr", ours["lr"])} if "lr" in ours else {}
        for key, value in {**ours, **base}.items():
            if key not in moving and key in theirs and theirs[key] != value:
                rows.append([i, key, value, theirs[key]])
    if rows:
        table = tabulate(rows, ["group", "setting", "configured", "checkpoint (used)"], "pipe")
        logger.warning("The checkpoint overrules settings of the optimizer:\n%s", table)
