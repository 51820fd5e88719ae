"""How a loss becomes an update: accumulation, clipping, and the optimizer's step."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from hooktrain.solver.clipping import build_clipping
from hooktrain.solver.match_state import match_optimizer_state
from hooktrain.solver.overruled import overrule_settings
from hooktrain.solver.sharded import gradients_kept_back, shard_optimizer_state
from hooktrain.solver.window import Window, load_gradients, mean_gradients
from hooktrain.utils.events import get_event_storage, has_event_storage

__all__ = ["OptimWrapper"]

logger = logging.getLogger(__name__)

# One object serves everywhere: nullcontext holds no state.
NOTHING = contextlib.nullcontext()


class OptimWrapper:
    """Wraps a torch optimizer with gradient accumulation and clipping.

    A subclass changes how the loss is scaled and the step taken, never the loop around it.
    The order in a step is fixed: unscale, the trainer's ``after_backward`` hooks, clip, update.

    Args:
        optimizer: the optimizer.
        accumulative_counts: how many backward passes make one update, at least 1.
        clip_grad: None for no clipping, or a dict: ``{"max_norm": 1.0, "norm_type": 2}`` clips the
            norm of all gradients together (:func:`torch.nn.utils.clip_grad_norm_`) and logs the
            norm before clipping as ``grad_norm``; ``{"type": "value", "clip_value": 0.5}`` clips
            each element (:func:`torch.nn.utils.clip_grad_value_`).

    Attributes:
        accumulative_counts: see above; it is not to be changed.
        after_backward: called in each step when the true gradients are there and before they are
            clipped; None does nothing. A trainer whose model owns its step sets it.
        base_param_settings: with several parameter groups, one more without parameters that has
            the optimizer's own settings, so that schedulers drive an unscaled ``base_lr`` too;
            otherwise None.
        name: put before the names of metrics; :class:`OptimWrapperDict` sets it.
        skipped_updates: how many updates were skipped so far since gradients were not finite.

    Raises:
        TypeError: if ``optimizer`` is not an optimizer, or one that needs a closure; or if
            ``clip_grad`` is not a dict.
        ValueError: for another count or clipping type, or clipping without its threshold.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        accumulative_counts: int = 1,
        clip_grad: Mapping[str, Any] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.skipped_updates = 0
        self.name = ""
        self.after_backward: Callable[[], None] | None = None
        self.base_param_settings: dict[str, Any] | None = None
        if len(optimizer.param_groups) > 1:
            self.base_param_settings = {"params": [], **optimizer.defaults}
        self._clip = None if clip_grad is None else build_clipping(clip_grad)
        self._window = Window(accumulative_counts)
        self.accumulative_counts = accumulative_counts
        self._saved_gradients: list[Tensor | None] | None = None

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer."""
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch optimizer, but got {optimizer!r}")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError(
                "LBFGS computes the loss several times in a step, by a closure; write a run_step "
                "of your own that calls optimizer.step(closure)"
            )
        self._optimizer = optimizer
        self._custom_zero_grad = type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad

    @property
    def inner_count(self) -> int:
        """How many backward passes were made so far."""
        return self._window.count

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups, and ``base_param_settings`` where there are any."""
        groups = self._optimizer.param_groups
        return groups if self.base_param_settings is None else [*groups, self.base_param_settings]

    def get_lr(self) -> dict[str, list[float]]:
        """``{"lr": [one rate a group]}``, after ``{"base_lr": [rate]}`` where there is one."""
        rates = {"lr": [float(group["lr"]) for group in self._optimizer.param_groups]}
        if self.base_param_settings is None:
            return rates
        return {"base_lr": [float(self.base_param_settings["lr"])], **rates}

    def get_momentum(self) -> dict[str, list[float]]:
        """``{"momentum": [one a group]}``: the momentum, else the first beta, else 0."""
        groups = self._optimizer.param_groups
        return {"momentum": [float(g.get("momentum", g.get("betas", [0.0])[0])) for g in groups]}

    def initialize_count_status(self, model: nn.Module, init_counts: int, max_counts: int) -> None:
        """Say where a run stands and where it ends, so that its last window may be shorter.

        Args:
            model: warned about if accumulation changes what it computes (batch norm).
            init_counts: the backward passes made so far. Where that is :attr:`inner_count`, an
                open window stays open; otherwise one begins here.
            max_counts: the passes made when the run ends.

        Raises:
            ValueError: unless ``0 <= init_counts <= max_counts``.
        """
        self._window.initialize(init_counts, max_counts)
        if self.accumulative_counts > 1 and any(
            isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()
        ):
            logger.warning(
                "Batch norm takes its statistics from one batch, not from the %d that are "
                "accumulated: the result is not that of a batch of the whole size",
                self.accumulative_counts,
            )

    def update_params(self, loss: Tensor) -> bool:
        """Take in the loss of one batch; update where a window of accumulation ends.

        Returns:
            Whether the parameters were updated: False inside of a window, and where a scaler
            skips the update since gradients overflowed.

        Raises:
            TypeError: if ``loss`` is not a tensor.
        """
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"update_params takes one loss, a tensor with a single element, but got {loss!r}; "
                f"of several losses give their sum, as model.parse_losses(losses)[0] does"
            )
        self.backward(self.scale_loss(loss))
        if not self.should_update():
            return False
        updated = self.step()
        self.zero_grad()
        return updated

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Divide the loss so that the accumulated gradients are those of the mean."""
        return loss if self.accumulative_counts == 1 else loss / self._window.length()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss."""
        if self.accumulative_counts > 1:
            self._window.open()
        loss.backward()  # type: ignore[no-untyped-call]
        self._window.count += 1

    def start_window(self) -> None:
        """Begin a new window of accumulation, whatever an error has left of the one before."""
        if self.accumulative_counts > 1:
            self._window.close()

    def should_update(self) -> bool:
        """Whether the last backward pass completed a window of accumulation."""
        return self._window.ended()

    def should_sync(self) -> bool:
        """Whether the next backward pass completes a window, so that ranks must communicate."""
        return self._window.ends_next()

    def unscale_gradients(self) -> None:
        """Undo what a scaler did to the gradients, so that hooks see the true ones."""

    def step(self) -> bool:
        """Clip the gradients and update the parameters. Return whether they were updated."""
        self._prepare_gradients()
        self._optimizer.step()
        return True

    def _prepare_gradients(self) -> None:
        """What a step does to the true gradients before it uses them."""
        if self.after_backward is not None:
            self.after_backward()
        self.clip_gradients()

    def clip_gradients(self) -> None:
        """Clip the gradients, if asked for and there are any, and log their norm."""
        if self._clip is None:
            return
        grads = [p for g in self._optimizer.param_groups for p in g["params"] if p.grad is not None]
        norm = self._clip(grads) if grads else None
        if norm is not None:
            self._put_scalar("grad_norm", norm)

    def count_skipped_update(self) -> None:
        """Note that an update was skipped, and log how many were."""
        self.skipped_updates += 1
        self._put_scalar("skipped_updates", self.skipped_updates, smooth=False)

    def _put_scalar(self, name: str, value: Any, smooth: bool = True) -> None:
        if has_event_storage():
            name = f"{self.name}.{name}" if self.name else name
            get_event_storage().put_scalar(name, value, smooth)

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
        if self.accumulative_counts == 1 or self.should_sync():
            return NOTHING
        if hasattr(model, "set_requires_gradient_sync"):  # sharded
            return gradients_kept_back(model)
        no_sync = getattr(model, "no_sync", contextlib.nullcontext)  # of DDP
        return no_sync()

    def precision_context(self) -> AbstractContextManager[Any]:
        """For the forward pass: the numbers to compute in. Full precision here."""
        return NOTHING

    @contextlib.contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """Both contexts in one, for models that own their training step."""
        with self.sync_context(model), self.precision_context():
            yield

    def prepare_state(self) -> None:
        """Before :meth:`state_dict` with several ranks: bring an open window's gradients together.

        A collective, if a window is open.
        """
        if not self.should_update():
            self._saved_gradients = mean_gradients(self._optimizer)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, with the wrapper's counters beside it.

        Inside of a window of accumulation the gradients are part of it (not copied). Only those
        that a sharded model keeps back are not: a run that resumes from there opens a new window.
        """
        state = {
            **self._optimizer.state_dict(),
            **self._window.state_dict(),
            "skipped_updates": self.skipped_updates,
        }
        if self.base_param_settings is not None:
            state["base_param_settings"] = {**self.base_param_settings}
        if not self.should_update():
            state["gradients"] = self._saved_gradients or mean_gradients(self._optimizer, ranks=1)
        self._saved_gradients = None
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` gave; a torch optimizer's own state also loads.

        If the parameters are not those of the state, they are matched by name; see
        :func:`~hooktrain.solver.match_optimizer_state`. The settings of the parameter groups
        (learning rate, weight decay, ...) come from the state too. Where that overrules what the
        optimizer was built with, a table says so.
        """
        fitted, match = match_optimizer_state(self._optimizer, state_dict)
        groups = overrule_settings(self._optimizer.param_groups, fitted["param_groups"])
        fitted = shard_optimizer_state(self._optimizer, {**fitted, "param_groups": groups})
        self._optimizer.load_state_dict(fitted)
        if self.base_param_settings is not None:
            self.base_param_settings.update(state_dict.get("base_param_settings", {}))
        self._window.load_state_dict(state_dict)
        if not self.should_update():
            saved = state_dict.get("gradients", [])
            gradients = match.reorder(saved) if saved and not match.new else []
            if not load_gradients(self._optimizer, gradients):
                logger.warning("The gradients of an open window do not fit: a new window begins")
                self.start_window()
        self.skipped_updates = int(state_dict.get("skipped_updates", 0))

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(accumulative_counts={self.accumulative_counts}, "
            f"optimizer={self._optimizer!r})"
        )
