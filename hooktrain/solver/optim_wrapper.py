"""How a loss becomes an update: accumulation, clipping, and the optimizer's step."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hooktrain.events import get_event_storage, has_event_storage
from hooktrain.solver.optim_state import (
    State,
    check_optimizer_state,
    load_optimizer_state,
    optimizer_state_dict,
    parameter_names,
)
from hooktrain.solver.param_groups import ParamGroup
from hooktrain.utils.names import did_you_mean, refuse_overrides
from hooktrain.utils.tensors import full_tensor

logger = logging.getLogger(__name__)

Options = Mapping[str, Any]
Context = AbstractContextManager[Any]

# One object serves everywhere: nullcontext holds no state.
NOTHING = nullcontext()


class OptimWrapper:
    """Wraps a torch optimizer with gradient accumulation and clipping.

    A subclass changes how the loss is scaled and the step taken, never the loop around
    it. The order in a step is fixed: unscale, the trainer's ``after_backward`` hooks,
    clip, update.

    Args:
        optimizer: the optimizer. One that needs a closure (LBFGS) needs a ``run_step``
            of yours.
        accumulative_counts: how many backward passes make one update, at least 1.
        clip_grad: None for no clipping, or a dict: ``{"max_norm": 1.0, "norm_type": 2}``
            clips the norm of all gradients together
            (:func:`torch.nn.utils.clip_grad_norm_`) and logs the norm before clipping
            as ``grad_norm``; ``{"type": "value", "clip_value": 0.5}`` clips each element
            (:func:`torch.nn.utils.clip_grad_value_`).

    Attributes:
        after_backward: called in each step when the true gradients are there and before
            they are clipped; None does nothing. A trainer whose model owns its step
            sets it.
        inner_count: how many backward passes were made so far.
        name: put before the names of metrics; :class:`OptimWrapperDict` sets it.
        skipped_updates: how many updates were skipped so far, since gradients were not
            finite.

    Raises:
        TypeError: if ``optimizer`` is no optimizer, for an unknown key of ``clip_grad``,
            and when a subclass is defined that overrides what only MMEngine calls.
        ValueError: for a count below 1 or impossible clipping.
    """

    def __init_subclass__(cls) -> None:
        refuse_overrides(cls, {"_clip_grad": "override clip_gradients()"})

    def __init__(
        self,
        optimizer: Optimizer,
        accumulative_counts: int = 1,
        clip_grad: Options | None = None,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch optimizer: {optimizer!r}")
        if accumulative_counts < 1:
            raise ValueError(
                f"accumulative_counts must be at least 1: {accumulative_counts!r}"
            )
        self.optimizer = optimizer
        self.accumulative_counts = accumulative_counts
        self.after_backward: Callable[[], None] | None = None
        self.inner_count = 0
        self.name = ""
        self.skipped_updates = 0
        self._clipping = None if clip_grad is None else _clipping(**clip_grad)
        self._first_count = 0  # inner_count where accumulations began to be counted
        self._max_counts = -1  # inner_count at the end of the run, if it is known
        self._model: nn.Module | None = None

    @property
    def param_groups(self) -> list[ParamGroup]:
        """The parameter groups of the optimizer."""
        return self.optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        """The settings of the optimizer for groups that have none of their own."""
        return self.optimizer.defaults

    def get_lr(self) -> dict[str, list[float]]:
        """``{"lr": [one rate a group]}``."""
        return {"lr": [float(group["lr"]) for group in self.param_groups]}

    def name_parameters(self, model: nn.Module) -> None:
        """Let saved states have the parameters' names in a model; trainers call it."""
        self._model = model

    def _parameter_names(self) -> dict[Tensor, str]:
        return {} if self._model is None else parameter_names(self._model)

    # Accumulation

    def initialize_count_status(
        self,
        model: nn.Module,
        init_counts: int,
        max_counts: int,
    ) -> None:
        """Begin a new accumulation, and say where the run ends.

        The last accumulation of the run may then be shorter: it still updates by a mean.

        Args:
            model: not used; MMEngine has it.
            init_counts: the backward passes made so far.
            max_counts: the passes made when the run ends.
        """
        self.inner_count = init_counts
        self.start_accumulation()
        self._max_counts = max_counts

    def start_accumulation(self) -> None:
        """Begin a new accumulation with the next pass, whatever was accumulated.

        This one and those that follow have ``accumulative_counts`` passes each.
        """
        self._first_count = self.inner_count
        self._max_counts = -1

    def should_update(self) -> bool:
        """Whether the last backward pass completed an accumulation."""
        return self._is_complete_after(self.inner_count)

    def should_sync(self) -> bool:
        """Whether the next backward pass completes one, so that ranks communicate."""
        return self._is_complete_after(self.inner_count + 1)

    def _is_complete_after(self, count: int) -> bool:
        passes = count - self._first_count
        return passes % self.accumulative_counts == 0 or count == self._max_counts

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Divide the loss so that the accumulated gradients are those of the mean."""
        if self.accumulative_counts == 1:
            return loss
        done = (self.inner_count - self._first_count) % self.accumulative_counts
        left = self._max_counts - self.inner_count
        if left > 0:
            return loss / min(self.accumulative_counts, done + left)
        return loss / self.accumulative_counts

    # A step

    def optim_context(self, model: nn.Module) -> Context:
        """For the forward pass: its precision, and whether ranks exchange gradients.

        They do where the backward pass completes an accumulation. Call :meth:`backward`
        or :meth:`update_params` after the context, before the next forward pass.
        """
        is_last = self.should_sync()
        if is_last and self.accumulative_counts == 1:
            return NOTHING
        parallel: Any = model
        if hasattr(model, "set_requires_gradient_sync"):  # of fully_shard
            parallel.set_requires_gradient_sync(is_last)
        elif not is_last and hasattr(model, "no_sync"):  # of DistributedDataParallel
            context: Context = parallel.no_sync()
            return context
        return NOTHING

    def update_params(
        self,
        loss: Tensor,
        step_kwargs: Any = None,
        zero_kwargs: Any = None,
    ) -> bool:
        """Take in the loss of one batch; update where an accumulation is complete.

        Args:
            loss: one tensor; of several losses, their sum.
            step_kwargs: a dict of keywords for :meth:`step`.
            zero_kwargs: a dict of keywords for :meth:`zero_grad`.

        Returns:
            Whether the parameters were updated: False while gradients are accumulated,
            and where a scaler skips the update since they overflowed.
        """
        self.backward(self.scale_loss(loss))
        if not self.should_update():
            return False
        updated = self.step(**(step_kwargs or {}))
        self.zero_grad(**(zero_kwargs or {}))
        return updated

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Add the gradients of a loss, with keywords of :meth:`torch.Tensor.backward`."""
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]
        self.inner_count += 1

    def step(self, **kwargs: Any) -> bool:
        """Clip the gradients and update the parameters, if nothing forbids it.

        Args:
            kwargs: of the optimizer's ``step``.

        Returns:
            Whether the parameters were updated.
        """
        self.unscale_gradients()
        if self.after_backward is not None:
            self.after_backward()
        self.clip_gradients()
        return self._apply(**kwargs)

    def unscale_gradients(self) -> None:
        """Undo what a scaler did to the gradients, so that hooks see the true ones."""

    def _apply(self, **kwargs: Any) -> bool:
        self.optimizer.step(**kwargs)
        return True

    def clip_gradients(self) -> None:
        """Clip the gradients, if asked for and there are any, and log their norm."""
        if self._clipping is None:
            return
        kind, limit, norm_type = self._clipping
        parameters = [p for group in self.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not gradients:
            return
        if kind == "value":
            nn.utils.clip_grad_value_(parameters, limit)
            return
        # As torch's clip_grad_norm_, but ranks that hold shards exchange one number.
        norm = full_tensor(nn.utils.get_total_norm(gradients, norm_type))
        nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        self._put_scalar("grad_norm", norm)

    def zero_grad(self, **kwargs: Any) -> None:
        """Forget the gradients, with keywords of the optimizer's ``zero_grad``."""
        if kwargs or type(self.optimizer).zero_grad is not Optimizer.zero_grad:
            self.optimizer.zero_grad(**kwargs)
            return
        # The same without torch's preparations for its profiler and compiler, which take
        # longer (7 us a step) than all the rest for a small model.
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def count_skipped_update(self) -> None:
        """Note that an update was skipped, and log how many were."""
        self.skipped_updates += 1
        self._put_scalar("skipped_updates", self.skipped_updates, smooth=False)

    def _put_scalar(self, name: str, value: Any, smooth: bool = True) -> None:
        if has_event_storage():
            name = f"{self.name}.{name}" if self.name else name
            get_event_storage().put_scalar(name, value, smooth)

    # State

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state by the names of its parameters, with the counters.

        Accumulated gradients are not in it: a run that resumes there begins anew.
        """
        if not self.should_update():
            logger.warning("Saved without the gradients that are being accumulated")
        state = optimizer_state_dict(self.optimizer, self._parameter_names())
        state["inner_count"] = self.inner_count
        state["skipped_updates"] = self.skipped_updates
        return state

    def check_state_dict(self, state_dict: State) -> None:
        """Refuse a state that :meth:`load_state_dict` would refuse; change nothing.

        Raises:
            ValueError: if it is of another kind of optimizer, or of other parameters.
        """
        check_optimizer_state(self.optimizer, state_dict, self._parameter_names())

    def load_state_dict(self, state_dict: State) -> None:
        """Load what ``state_dict`` returned, or the state of a torch optimizer.

        Parameters are matched by name; see
        :func:`~hooktrain.solver.optim_state.load_optimizer_state`.
        """
        load_optimizer_state(self.optimizer, state_dict, self._parameter_names())
        self.inner_count = state_dict.get("inner_count", 0)
        self.skipped_updates = state_dict.get("skipped_updates", 0)
        self.start_accumulation()


def _clipping(
    type: str = "norm",
    max_norm: float = 0.0,
    norm_type: float = 2.0,
    clip_value: float = 0.0,
) -> tuple[str, float, float]:
    """The kind of clipping, its limit, and the type of the norm, from ``clip_grad``."""
    limits = {"norm": max_norm, "value": clip_value}
    if type not in limits or limits[type] <= 0:
        raise ValueError(
            "clip_grad needs max_norm > 0, or type='value' and clip_value > 0, but got "
            f"{type=}, {max_norm=}, {clip_value=}"
        )
    return type, limits[type], float(norm_type)


class AmpOptimWrapper(OptimWrapper):
    """An :class:`OptimWrapper` in lower precision, on any type of device.

    The forward pass runs under :class:`torch.autocast`. float16 needs its gradients
    scaled, by :class:`torch.amp.GradScaler`; bfloat16 has the range of float32 and needs
    no scaler.

    Args:
        optimizer: the optimizer.
        dtype: ``torch.float16``, ``torch.bfloat16`` or their names. None takes torch's
            default for the device: float16 on CUDA, bfloat16 on the CPU.
        loss_scale: for float16. ``"dynamic"`` lets a scaler find the scale; a dict has
            that scaler's arguments (``init_scale``, ``growth_interval``, ...); a number
            is a fixed scale; a scaler is used as it is.
        device_type: such as ``"cuda"`` or ``"cpu"``. None takes the parameters' device.
        accumulative_counts: see :class:`OptimWrapper`.
        clip_grad: see :class:`OptimWrapper`; gradients are unscaled before.

    Attributes:
        grad_scaler: the scaler; a disabled one if the data type needs none.

    Raises:
        ValueError: for another dtype or loss scale.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        dtype: torch.dtype | str | None = None,
        *,
        loss_scale: str | float | Options | torch.amp.GradScaler = "dynamic",
        device_type: str | None = None,
        accumulative_counts: int = 1,
        clip_grad: Options | None = None,
    ) -> None:
        super().__init__(optimizer, accumulative_counts, clip_grad)
        self.device_type = device_type or _device_type(optimizer)
        dtype = dtype or torch.get_autocast_dtype(self.device_type)
        self.dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if self.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"dtype must be float16 or bfloat16, but got {dtype!r}")
        self.grad_scaler = _build_scaler(
            loss_scale, self.device_type, enabled=self.dtype == torch.float16
        )
        self._fixed_scale: float | None = None
        if isinstance(loss_scale, int | float):
            self._fixed_scale = float(loss_scale)
        self._unscaled = False

    def optim_context(self, model: nn.Module) -> Context:
        """That of :class:`OptimWrapper`, and autocast to the lower precision."""
        exchange = super().optim_context(model)
        precision = torch.autocast(self.device_type, self.dtype)
        # Nearly all steps need autocast alone, which costs less without a generator.
        return precision if exchange is NOTHING else _both(exchange, precision)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Add the gradients of the scaled loss."""
        super().backward(self.grad_scaler.scale(loss), **kwargs)

    def start_accumulation(self) -> None:
        """Also make a scaler ready again that an error left after unscaling."""
        super().start_accumulation()
        if self._unscaled and self.grad_scaler.is_enabled():
            # Host-device synchronisation, after a step that failed only. Given a scale,
            # update() forgets what it knew of the gradients, and changes nothing else.
            self.grad_scaler.update(self.grad_scaler.get_scale())
        self._unscaled = False

    def unscale_gradients(self) -> None:
        """Divide the gradients by the scale, once in a step."""
        if not self._unscaled:
            self.grad_scaler.unscale_(self.optimizer)
            self._unscaled = True

    def _apply(self, **kwargs: Any) -> bool:
        scaler = self.grad_scaler
        self._unscaled = False
        if not scaler.is_enabled():
            return super()._apply(**kwargs)
        # Host-device synchronisation: reads the overflow flag.
        scaler.step(self.optimizer, **kwargs)
        # And again. Fused optimizers skip the update inside their kernel, so only the
        # scaler knows of it.
        found_inf = scaler._found_inf_per_device(self.optimizer).values()
        overflowed = any(flag.item() for flag in found_inf)
        scaler.update(self._fixed_scale)
        if overflowed:
            self.count_skipped_update()
        return not overflowed

    def state_dict(self) -> dict[str, Any]:
        """That of :class:`OptimWrapper`, and the scaler's."""
        return {**super().state_dict(), "grad_scaler": self.grad_scaler.state_dict()}

    def load_state_dict(self, state_dict: State) -> None:
        """Load what ``state_dict`` returned; without a scaler's, ours stays as it is."""
        super().load_state_dict(state_dict)
        # The second is MMEngine's name.
        scaler = state_dict.get("grad_scaler") or state_dict.get("loss_scaler")
        if scaler:
            self.grad_scaler.load_state_dict(scaler)


@contextmanager
def _both(outer: Context, inner: Context) -> Iterator[None]:
    with outer, inner:
        yield


def _device_type(optimizer: Optimizer) -> str:
    """The type of the device that the first parameter is computed on."""
    groups = optimizer.param_groups
    parameter = next(p for group in groups for p in group["params"])
    # Shards may be offloaded to the CPU, where nothing is computed.
    mesh = getattr(parameter, "device_mesh", None)
    return str(parameter.device.type if mesh is None else mesh.device_type)


def _build_scaler(
    loss_scale: Any,
    device_type: str,
    enabled: bool,
) -> torch.amp.GradScaler:
    """The scaler; one that is not enabled passes everything through."""
    if isinstance(loss_scale, torch.amp.GradScaler):
        return loss_scale
    options: dict[str, Any] = {}
    if isinstance(loss_scale, Mapping):
        options.update(loss_scale)
    elif isinstance(loss_scale, int | float) and loss_scale > 0:
        options["init_scale"] = float(loss_scale)
    elif loss_scale != "dynamic":
        raise ValueError(
            "loss_scale must be 'dynamic', a positive number, a dict of GradScaler's "
            f"arguments or a GradScaler, but got {loss_scale!r}"
        )
    return torch.amp.GradScaler(device_type, enabled=enabled, **options)


class OptimWrapperDict(dict[str, OptimWrapper]):
    """Optimizer wrappers by name, each with its own precision and accumulation.

    The model's ``train_step`` takes the one it needs::

        optim_wrapper["generator"].update_params(loss)

    Metrics of a member carry its name: ``generator.grad_norm``.

    Args:
        wrappers: one :class:`OptimWrapper` a keyword.

    Raises:
        TypeError: if a value is no wrapper.
    """

    def __init__(self, **wrappers: OptimWrapper) -> None:
        for name, wrapper in wrappers.items():
            if not isinstance(wrapper, OptimWrapper):
                raise TypeError(f"{name!r} must be an OptimWrapper: {wrapper!r}")
            wrapper.name = name
        super().__init__(wrappers)

    def __missing__(self, name: str) -> OptimWrapper:
        hint = did_you_mean(name, self)
        raise KeyError(f"there is no optimizer named {name!r}{hint}")

    @property
    def param_groups(self) -> dict[str, list[ParamGroup]]:
        """The parameter groups of each."""
        return {name: wrapper.param_groups for name, wrapper in self.items()}

    def get_lr(self) -> dict[str, list[float]]:
        """``{"<name>.lr": [one rate a group]}``."""
        return {f"{name}.lr": wrapper.get_lr()["lr"] for name, wrapper in self.items()}

    def name_parameters(self, model: nn.Module) -> None:
        """See :meth:`OptimWrapper.name_parameters`."""
        for wrapper in self.values():
            wrapper.name_parameters(model)

    def initialize_count_status(
        self,
        model: nn.Module,
        init_counts: int,
        max_counts: int,
    ) -> None:
        """Begin a new accumulation in each.

        How often a step calls each of them is not known, so the counts are not used.
        """
        for wrapper in self.values():
            wrapper.initialize_count_status(model, wrapper.inner_count, -1)

    def zero_grad(self, **kwargs: Any) -> None:
        """Forget the gradients of all; see :meth:`OptimWrapper.zero_grad`."""
        for wrapper in self.values():
            wrapper.zero_grad(**kwargs)

    def state_dict(self) -> dict[str, Any]:
        """The state of each, by name."""
        return {name: wrapper.state_dict() for name, wrapper in self.items()}

    def check_state_dict(self, state_dict: State) -> None:
        """Refuse a state that :meth:`load_state_dict` would refuse; change nothing.

        Raises:
            ValueError: if the state has other names, or that of a member is refused.
        """
        if set(state_dict) != set(self):
            raise ValueError(
                f"the state has the optimizers {[*state_dict]}, not {[*self]}"
            )
        for name, wrapper in self.items():
            wrapper.check_state_dict(state_dict[name])

    def load_state_dict(self, state_dict: State) -> None:
        """Load what ``state_dict`` returned; see :meth:`check_state_dict`."""
        self.check_state_dict(state_dict)
        for name, wrapper in self.items():
            wrapper.load_state_dict(state_dict[name])


def wrappers_by_name(
    optim_wrapper: OptimWrapper | OptimWrapperDict,
) -> Mapping[str, OptimWrapper]:
    """Several wrappers by their names; a single one by the name ``""``."""
    if isinstance(optim_wrapper, OptimWrapper):
        return {"": optim_wrapper}
    return optim_wrapper
