"""How a loss becomes an update: accumulation, clipping, and the optimizer's step."""

import copy
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hooktrain.events import get_event_storage, has_event_storage
from hooktrain.solver.optim_state import (
    fit_state,
    load_optimizer_state,
    optimizer_state_dict,
    parameter_names,
    warn_about_changed_settings,
)
from hooktrain.solver.param_groups import ParamGroup, settings_of
from hooktrain.utils import comm
from hooktrain.utils.logger import log_once
from hooktrain.utils.names import State, add_note, call, check_count
from hooktrain.utils.tensors import full_tensor

logger = logging.getLogger(__name__)

Options = Mapping[str, Any]

_CLIPPINGS = (
    "(clip_grad, such as {'max_norm': 1.0} or {'type': 'value', 'clip_value': 0.5})"
)

_CLOSURES = (
    "an optimizer that needs a closure, such as LBFGS or SAM, must be called in your own run_step: "
    "see docs/guide/step.md"
)

NOTHING = nullcontext()  # stateless, so one object serves everywhere

_ZERO_GRAD = Optimizer.zero_grad


class OptimWrapper:
    """A torch optimizer with gradient accumulation and clipping.

    :meth:`step` defines the order of an update: unscale the gradients, call ``after_backward``,
    clip the gradients, update the parameters.

    Args:
        optimizer: the optimizer. One that needs a closure, such as LBFGS, must be called in your
            own ``run_step``.
        accumulative_counts: the number of backward passes per update, at least 1. A float is
            refused, since it may have been meant for ``clip_grad``.
        clip_grad: None, or a dict: ``{"max_norm": 1.0, "norm_type": 2}`` clips the total norm of
            the gradients, and logs it as ``grad_norm``; ``{"type": "value", "clip_value": 0.5}``
            clips each element.

    Attributes:
        after_backward: a function that each :meth:`step` calls after unscaling the gradients and
            before clipping them, or None. Trainers set it to call their hooks.
        inner_count: the number of backward passes so far.
        prefix: prepended to the names of metrics, such as ``"generator."``.
        skipped_updates: the number of updates skipped because gradients were not finite.

    Raises:
        TypeError: if ``optimizer`` is not an optimizer, if ``accumulative_counts`` is a float, or
            if ``clip_grad`` is not a dict or has an unknown key.
        ValueError: for a count below 1, or for impossible clipping.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        accumulative_counts: int = 1,
        clip_grad: Options | None = None,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch optimizer: {optimizer!r}")
        check_count("accumulative_counts", accumulative_counts)
        if isinstance(accumulative_counts, float):
            raise TypeError(
                "accumulative_counts must be an int, such as 64 // 16, and "
                f"clip_grad={{'max_norm': {accumulative_counts!r}}} clips: got a float"
            )
        self.optimizer = optimizer
        self.accumulative_counts = accumulative_counts
        self.after_backward: Callable[[], None] | None = None
        self.inner_count = 0
        self.prefix = ""
        self.skipped_updates = 0
        self._clipping = None
        if clip_grad is not None:
            self._clipping = call(_clipping, (), clip_grad, _CLIPPINGS)
        # inner_count when the accumulation began, and at the end of the run (-1 if unknown).
        self._first_count = 0
        self._max_counts = -1
        self._model = nn.Module()  # without parameters, so it names none
        self._configured: list[ParamGroup] = []

    @property
    def param_groups(self) -> list[ParamGroup]:
        """The parameter groups of the optimizer."""
        return self.optimizer.param_groups

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of all groups."""
        return [p for group in self.param_groups for p in group["params"]]

    def name_parameters(self, model: nn.Module) -> None:
        """From now on, save the states of parameters under their names in this model.

        The current settings of the groups are remembered as the configured ones.
        """
        self._model = model
        self._configured = [copy.deepcopy(settings_of(g)) for g in self.param_groups]

    # Accumulation

    def initialize_count_status(
        self, model: nn.Module, init_counts: int, max_counts: int
    ) -> None:
        """Begin a new accumulation. The last one of the run may be shorter.

        Args:
            model: unused; an argument of MMEngine's method.
            init_counts: the number of backward passes so far.
            max_counts: the number of passes at the end of the run.
        """
        self.inner_count = init_counts
        self.start_accumulation()
        self._max_counts = max_counts

    def start_accumulation(self) -> None:
        """Begin a new accumulation with the next pass."""
        self._first_count = self.inner_count
        self._max_counts = -1

    def should_update(self) -> bool:
        """Whether the last backward pass completed an accumulation."""
        return self._is_complete_after(self.inner_count)

    def should_sync(self) -> bool:
        """Whether the next pass completes an accumulation, so that ranks exchange gradients."""
        return self._is_complete_after(self.inner_count + 1)

    def _is_complete_after(self, count: int) -> bool:
        passes = count - self._first_count
        return passes % self.accumulative_counts == 0 or count == self._max_counts

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Divide a loss by the number of passes that are accumulated, which gives their mean."""
        size = self.accumulative_counts
        if size == 1:
            return loss
        left = self._max_counts - self.inner_count
        if left > 0:
            done = (self.inner_count - self._first_count) % size
            size = min(size, done + left)
        return loss / size

    # A step

    def optim_context(self, model: Any) -> AbstractContextManager[Any]:
        """The context of a forward pass: its precision, and whether ranks exchange gradients."""
        is_last = self.should_sync()
        if is_last and self.accumulative_counts == 1:
            return NOTHING
        if hasattr(model, "set_requires_all_reduce"):  # of fully_shard
            # Each pass reduces the gradient to shards. Only the sum over replicas can wait.
            model.set_requires_all_reduce(is_last)
        elif not is_last and hasattr(model, "no_sync"):  # of DistributedDataParallel
            return model.no_sync()  # type: ignore[no-any-return]
        return NOTHING

    def update_params(
        self, loss: Tensor, step_kwargs: Any = None, zero_kwargs: Any = None
    ) -> None:
        """Add the gradients of a loss, and update if that completes an accumulation.

        Args:
            loss: the loss, or the sum of several.
            step_kwargs: a dict of arguments for :meth:`step`.
            zero_kwargs: a dict of arguments for :meth:`zero_grad`.
        """
        self.backward(self.scale_loss(loss))
        if self.should_update():
            self.step(**(step_kwargs or {}))
            self.zero_grad(**(zero_kwargs or {}))

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Add the gradients of a loss; see :meth:`torch.Tensor.backward`."""
        loss.backward(**kwargs)
        self.inner_count += 1

    def step(self, **kwargs: Any) -> None:
        """Unscale the gradients, call ``after_backward``, clip, and update the parameters.

        Args:
            kwargs: the arguments of the optimizer's ``step``.
        """
        self.unscale_gradients()
        if self.after_backward is not None:
            self.after_backward()
        self.clip_gradients()
        try:
            self._apply(kwargs)
        except (TypeError, AssertionError) as error:
            add_note(error, _CLOSURES)
            raise

    def unscale_gradients(self) -> None:
        """Divide the gradients by the factor by which a scaler has multiplied the loss."""

    def _apply(self, kwargs: Options) -> None:
        self.optimizer.step(**kwargs)

    def clip_gradients(self) -> None:
        """Clip the gradients, if ``clip_grad`` was given, and log their norm."""
        if self._clipping is None:
            return
        parameters = [p for p in self.parameters if p.grad is not None]
        if not parameters:
            return
        kind, limit, norm_type = self._clipping
        if kind == "value":
            nn.utils.clip_grad_value_(parameters, limit)
            return
        norm = nn.utils.clip_grad_norm_(parameters, limit, norm_type)
        self._put_scalar("grad_norm", full_tensor(norm))

    def zero_grad(self, **kwargs: Any) -> None:
        """Free the gradients; see :meth:`torch.optim.Optimizer.zero_grad`.

        Without arguments this sets them to None itself, since everything else in torch's own method
        takes as long as the hooks of a step. An optimizer's override is always called.
        """
        method = getattr(self.optimizer.zero_grad, "__func__", None)
        if kwargs or method is not _ZERO_GRAD:
            self.optimizer.zero_grad(**kwargs)
            return
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def count_skipped_update(self, skipped: Any = 1) -> None:
        """Count and log a skipped update.

        Args:
            skipped: 1 if the update was skipped, else 0; it may be a tensor on a device.
        """
        self.skipped_updates = self.skipped_updates + skipped
        self._put_scalar("skipped_updates", self.skipped_updates, smooth=False)

    def _put_scalar(self, name: str, value: Any, smooth: bool = True) -> None:
        if has_event_storage():
            get_event_storage().put_scalar(self.prefix + name, value, smooth)

    # State

    def state_dict(self) -> State:
        """The optimizer's state by the names of parameters, and the counters. No gradients."""
        if not self.should_update():
            logger.warning(
                "Saved inside a gradient accumulation, whose gradients are not saved, so a resumed "
                "run will differ: make the period of saves a multiple of the accumulation"
            )
        state = optimizer_state_dict(self.optimizer, parameter_names(self._model))
        state["configured"] = self._configured
        state["inner_count"] = self.inner_count
        # Host-device synchronisation, in a save, if a scaler counts on a device.
        state["skipped_updates"] = int(self.skipped_updates)
        return state

    def check_state_dict(self, state_dict: State) -> None:
        """Raise the ValueError that :meth:`load_state_dict` would raise, and load nothing."""
        fit_state(self.optimizer, state_dict, parameter_names(self._model))

    def load_state_dict(self, state_dict: State) -> None:
        """See :func:`hooktrain.solver.optim_state.load_optimizer_state`."""
        load_optimizer_state(self.optimizer, state_dict, parameter_names(self._model))
        configured = state_dict.get("configured", ())
        warn_about_changed_settings(self.optimizer, self._configured, configured)
        self.inner_count = state_dict.get("inner_count", 0)
        self.skipped_updates = state_dict.get("skipped_updates", 0)
        self.start_accumulation()


def weights_over_mean(weights: Iterable[Any]) -> list[float]:
    """The weights of this rank's passes, divided by the mean weight of all passes. A collective.

    The plain mean of losses multiplied by them, over passes and ranks, is the weighted mean. If all
    weights are 0, so are the results, and a warning says so, once per run.

    Args:
        weights: numbers, or tensors with one element; the same number of them on each rank.

    Raises:
        ValueError: for a weight that is negative or not finite.
    """
    own = [_weight(weight) for weight in weights]
    total = comm.all_reduce(torch.tensor(sum(own), dtype=torch.float64)).item()
    if total == 0:
        log_once(
            logger.warning,
            "The trainer's weight(data) is 0 for all batches of an iteration, so nothing is "
            "learned from them",
        )
    mean = total / (len(own) * comm.get_world_size()) or 1.0
    return [weight / mean for weight in own]


def _weight(weight: Any) -> float:
    with suppress(TypeError, ValueError, RuntimeError):  # the last is a tensor's
        number = float(weight)
        if 0 <= number < math.inf:
            return number
    raise ValueError(
        "the trainer's weight(data) must return a finite number of at least 0, or a tensor with "
        f"one element, not {weight!r:.300}"
    )


def _clipping(
    type: str = "norm",
    max_norm: float = 0.0,
    norm_type: float = 2.0,
    clip_value: float = 0.0,
) -> tuple[str, float, float]:
    """The kind of clipping, its limit, and the type of the norm."""
    limit = {"norm": max_norm, "value": clip_value}.get(type, 0.0)
    if limit <= 0:
        raise ValueError(
            "clip_grad needs max_norm > 0, or type='value' and clip_value > 0, but got "
            f"{type=}, {max_norm=}, {clip_value=}"
        )
    return type, limit, float(norm_type)
