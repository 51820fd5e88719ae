"""How a loss becomes an update: accumulation, clipping, and the optimizer's step."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hooktrain.events import get_event_storage, has_event_storage
from hooktrain.solver.optim_state import (
    load_optimizer_state,
    optimizer_state_dict,
    parameter_names,
)
from hooktrain.utils.names import did_you_mean, refuse_overrides
from hooktrain.utils.tensors import full_tensor

logger = logging.getLogger(__name__)

# One object serves everywhere: nullcontext holds no state.
NOTHING = nullcontext()


class OptimWrapper:
    """Wraps a torch optimizer with gradient accumulation and clipping.

    A subclass changes how the loss is scaled and the step taken, never the loop around it.
    The order in a step is fixed: unscale, the trainer's ``after_backward`` hooks, clip, update.

    Args:
        optimizer: the optimizer. Those that need a closure (LBFGS) need a ``run_step`` of yours.
        accumulative_counts: how many backward passes make one update, at least 1.
        clip_grad: None for no clipping, or a dict: ``{"max_norm": 1.0, "norm_type": 2}`` clips the
            norm of all gradients together (:func:`torch.nn.utils.clip_grad_norm_`) and logs the
            norm before clipping as ``grad_norm``; ``{"type": "value", "clip_value": 0.5}`` clips
            each element (:func:`torch.nn.utils.clip_grad_value_`).

    Attributes:
        accumulative_counts: see above. Do not change it.
        after_backward: called in each step when the true gradients are there and before they are
            clipped; None does nothing. A trainer whose model owns its step sets it.
        base_param_settings: with several parameter groups, one more without parameters that has
            the optimizer's own settings, so that schedulers drive an unscaled ``base_lr`` too;
            otherwise None.
        inner_count: how many backward passes were made so far.
        name: put before the names of metrics; :class:`OptimWrapperDict` sets it.
        resumed: what a strategy has for the trainer, which loads it when the training begins.
        skipped_updates: how many updates were skipped so far since gradients were not finite.

    Raises:
        TypeError: if ``optimizer`` is not an optimizer.
        ValueError: for a count below 1 or impossible clipping.

    A subclass that overrides what only MMEngine calls is a TypeError when it is defined.
    """

    def __init_subclass__(cls) -> None:
        refuse_overrides(cls, {"_clip_grad": "override clip_gradients()"})

    def __init__(
        self,
        optimizer: Optimizer,
        accumulative_counts: int = 1,
        clip_grad: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"optimizer must be a torch optimizer, but got {optimizer!r}"
            )
        if not hasattr(accumulative_counts, "__index__") or accumulative_counts < 1:
            raise ValueError(
                f"accumulative_counts must be an integer > 0: {accumulative_counts!r}"
            )
        self.optimizer = optimizer
        self.accumulative_counts = accumulative_counts
        self.after_backward: Callable[[], None] | None = None
        self.base_param_settings: dict[str, Any] | None = None
        if len(optimizer.param_groups) > 1:
            self.base_param_settings = {"params": [], **optimizer.defaults}
        self.inner_count = 0
        self.name = ""
        self.resumed: Mapping[str, Any] | None = None
        self.skipped_updates = 0
        self._clipping = None if clip_grad is None else _check_clipping(clip_grad)
        self._max_counts = -1
        self._model: nn.Module | None = None
        self._names: Mapping[Tensor, str] = {}
        self._window = range(0)  # the counts of the passes that make the current update

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups, and ``base_param_settings`` where there are any."""
        groups = self.optimizer.param_groups
        return (
            groups
            if self.base_param_settings is None
            else [*groups, self.base_param_settings]
        )

    @property
    def defaults(self) -> dict[str, Any]:
        """The settings of the optimizer for groups that have none of their own."""
        return self.optimizer.defaults

    def get_lr(self) -> dict[str, list[float]]:
        """``{"lr": [one rate a group]}``, after ``{"base_lr": [rate]}`` where there is one."""
        base = self.base_param_settings
        rates = {} if base is None else {"base_lr": [float(base["lr"])]}
        return {
            **rates,
            "lr": [float(group["lr"]) for group in self.optimizer.param_groups],
        }

    def get_momentum(self) -> dict[str, list[float]]:
        """``{"momentum": [one a group]}``: the momentum, else the first beta, else 0."""
        groups = self.optimizer.param_groups
        return {
            "momentum": [
                float(g.get("momentum", g.get("betas", [0.0])[0])) for g in groups
            ]
        }

    def name_parameters(self, model: nn.Module) -> None:
        """Let saved states have the names of the parameters in a model; trainers call it."""
        self._model = model

    def _parameter_names(self) -> Mapping[Tensor, str]:
        """By parameter. Looked up once, and again when the optimizer has got another one."""
        parameters = {
            p for group in self.optimizer.param_groups for p in group["params"]
        }
        if self._model is not None and not parameters <= self._names.keys():
            self._names = parameter_names(self._model)
        return self._names

    def initialize_count_status(
        self, model: nn.Module, init_counts: int, max_counts: int
    ) -> None:
        """Say where a run is and where it ends, so that its last window may be shorter.

        Args:
            model: warned about if accumulation changes what it computes (batch norm).
            init_counts: the backward passes made so far. Where that is ``inner_count``, an open
                window stays open; otherwise one begins here.
            max_counts: the passes made when the run ends.
        """
        self._max_counts = max_counts
        if init_counts != self.inner_count:
            self.inner_count = init_counts
            self.start_window()
        count, norm = self.accumulative_counts, nn.modules.batchnorm._BatchNorm
        if count > 1 and any(isinstance(module, norm) for module in model.modules()):
            logger.warning(
                "Batch norm takes its statistics from one batch, not from all %d", count
            )

    def optim_context(self, model: nn.Module) -> AbstractContextManager[Any]:
        """For the forward pass: its precision, and whether ranks exchange the gradients.

        They do where the backward pass completes a window. Call :meth:`backward` or
        :meth:`update_params` after the context, before the next forward pass.
        """
        last = self.should_sync()
        if last and self.accumulative_counts == 1:
            return NOTHING
        parallel: Any = model
        if hasattr(
            model, "set_requires_gradient_sync"
        ):  # of fully_shard; holds until the next
            parallel.set_requires_gradient_sync(last)
        elif not last and hasattr(model, "no_sync"):  # of DistributedDataParallel
            return cast(AbstractContextManager[Any], parallel.no_sync())
        return NOTHING

    def update_params(
        self, loss: Tensor, step_kwargs: Any = None, zero_kwargs: Any = None
    ) -> bool:
        """Take in the loss of one batch; update where a window of accumulation ends.

        Args:
            loss: one tensor; of several losses, their sum.
            step_kwargs: a dict of keywords for :meth:`step`.
            zero_kwargs: a dict of keywords for :meth:`zero_grad`.

        Returns:
            Whether the parameters were updated: False inside a window, and where a scaler skips
            the update since gradients overflowed.
        """
        self.backward(self.scale_loss(loss))
        if not self.should_update():
            return False
        updated = self.step(**(step_kwargs or {}))
        self.zero_grad(**(zero_kwargs or {}))
        return updated

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Divide the loss so that the accumulated gradients are those of the mean."""
        return (
            loss if self.accumulative_counts == 1 else loss / len(self._next_window())
        )

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Add the gradients of a loss; ``kwargs`` are of :meth:`torch.Tensor.backward`."""
        if self.accumulative_counts > 1:
            self._window = self._next_window()
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]
        self.inner_count += 1

    def _next_window(self) -> range:
        """The window that the next backward pass belongs to."""
        if self.inner_count < self._window.stop:
            return self._window
        left = self._max_counts - self.inner_count
        length = (
            min(self.accumulative_counts, left)
            if left > 0
            else self.accumulative_counts
        )
        return range(self.inner_count, self.inner_count + length)

    def start_window(self, length: int = 0) -> None:
        """Begin a new window of accumulation with the next pass, even if one is open.

        Args:
            length: of how many passes. 0 makes it as long as the others, or as what is left of the
                run; see :meth:`initialize_count_status`.
        """
        self._window = range(self.inner_count, self.inner_count + length)

    def should_update(self) -> bool:
        """Whether the last backward pass completed a window of accumulation."""
        return self.inner_count >= self._window.stop

    def should_sync(self) -> bool:
        """Whether the next backward pass completes a window, so that ranks must communicate."""
        return (
            self.accumulative_counts == 1
            or self._next_window().stop == self.inner_count + 1
        )

    def step(self, **kwargs: Any) -> bool:
        """Clip the gradients and update the parameters. Return whether they were updated.

        Args:
            kwargs: of the optimizer's ``step``.
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
        groups = self.optimizer.param_groups
        parameters = [
            p for group in groups for p in group["params"] if p.grad is not None
        ]
        if kind == "value" and parameters:  # torch refuses to clip nothing by value
            nn.utils.clip_grad_value_(parameters, limit)
        elif parameters:
            # As clip_grad_norm_ of torch; ranks that hold shards exchange one number.
            norm = full_tensor(
                nn.utils.get_total_norm([p.grad for p in parameters], norm_type)
            )
            nn.utils.clip_grads_with_norm_(parameters, limit, norm)
            self._put_scalar("grad_norm", norm)

    def zero_grad(self, **kwargs: Any) -> None:
        """Forget the gradients; ``kwargs`` are of the optimizer's ``zero_grad``."""
        if kwargs or type(self.optimizer).zero_grad is not Optimizer.zero_grad:
            self.optimizer.zero_grad(**kwargs)
            return
        # The same without torch's preparations for its profiler and compiler, which take longer
        # (7 us a step) than all the rest for a small model.
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

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state by the names of its parameters, with the wrapper's counters.

        The gradients of an open window are not in it: a run that resumes there begins a new one.
        """
        if not self.should_update():
            logger.warning(
                "Saved inside a window of accumulation, without its gradients"
            )
        counts = {
            "inner_count": self.inner_count,
            "skipped_updates": self.skipped_updates,
        }
        state = {
            **optimizer_state_dict(self.optimizer, self._parameter_names()),
            **counts,
        }
        if self.base_param_settings is not None:
            state["base_param_settings"] = {**self.base_param_settings}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned, or the state of a torch optimizer.

        Parameters are matched by name; see ``load_optimizer_state`` in ``optim_state.py``.
        """
        load_optimizer_state(self.optimizer, state_dict, self._parameter_names())
        if self.base_param_settings is not None:
            self.base_param_settings.update(state_dict.get("base_param_settings", {}))
        self.inner_count = int(state_dict.get("inner_count", 0))
        self.skipped_updates = int(state_dict.get("skipped_updates", 0))
        self.start_window()


def _check_clipping(config: Mapping[str, Any]) -> tuple[str, float, float]:
    """The kind of clipping, its threshold, and the type of the norm."""
    options = dict(config) if isinstance(config, Mapping) else {"": config}
    kind, norm_type = options.pop("type", "norm"), float(options.pop("norm_type", 2.0))
    limit = options.pop({"norm": "max_norm", "value": "clip_value"}.get(kind, ""), None)
    if options or not isinstance(limit, int | float) or not limit > 0:
        like = (
            "{'max_norm': 1.0, 'norm_type': 2} or {'type': 'value', 'clip_value': 0.5}"
        )
        raise ValueError(
            f"clip_grad must be like {like}, with a limit above 0, not {config!r}"
        )
    return kind, limit, norm_type


class AmpOptimWrapper(OptimWrapper):
    """An :class:`OptimWrapper` that computes in lower precision, on any type of device.

    The forward pass runs under :class:`torch.autocast`. float16 needs its gradients scaled, by
    :class:`torch.amp.GradScaler`; bfloat16 has the range of float32 and needs no scaler.

    Args:
        optimizer: the optimizer.
        dtype: ``torch.float16``, ``torch.bfloat16`` or their names. None takes torch's default for
            the device: float16 on CUDA, bfloat16 on the CPU.
        loss_scale: for float16. ``"dynamic"`` lets a scaler find the scale; a dict has that
            scaler's arguments (``init_scale``, ``growth_interval``, ...); a number is a fixed
            scale; a scaler is used as it is.
        device_type: such as ``"cuda"`` or ``"cpu"``. None takes the parameters' device.
        accumulative_counts: see :class:`OptimWrapper`.
        clip_grad: see :class:`OptimWrapper`; gradients are unscaled before they are clipped.

    Attributes:
        grad_scaler: the scaler; a disabled one if the data type needs none.

    Raises:
        ValueError: for another dtype or loss scale.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        dtype: torch.dtype | str | None = None,
        *,
        loss_scale: str | float | Mapping[str, Any] | torch.amp.GradScaler = "dynamic",
        device_type: str | None = None,
        accumulative_counts: int = 1,
        clip_grad: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(optimizer, accumulative_counts, clip_grad)
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        self.device_type = device_type or _device_type(next(parameters))
        dtype = dtype or torch.get_autocast_dtype(self.device_type)
        self.dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if self.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"dtype must be float16 or bfloat16, but got {dtype!r}")
        self._fixed_scale = (
            float(loss_scale) if isinstance(loss_scale, int | float) else None
        )
        self.grad_scaler = _build_scaler(
            loss_scale, self.device_type, self.dtype == torch.float16
        )
        self._unscaled = False

    def optim_context(self, model: nn.Module) -> AbstractContextManager[Any]:
        """That of :class:`OptimWrapper`, and autocast to the lower precision."""
        exchange = super().optim_context(model)
        precision = torch.autocast(self.device_type, self.dtype)
        # Nearly all steps need autocast alone, which is entered without a generator around it.
        return precision if exchange is NOTHING else _both(exchange, precision)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Add the gradients of the scaled loss."""
        super().backward(self.grad_scaler.scale(loss), **kwargs)

    def start_window(self, length: int = 0) -> None:
        """Begin a new window; a scaler that was left after unscaling is made ready again."""
        super().start_window(length)
        if self._unscaled:
            # Host-device synchronisation, after a step that failed only. Given a scale, update()
            # forgets what it knew of the gradients, and changes nothing else.
            self.grad_scaler.update(self.grad_scaler.get_scale())
            self._unscaled = False

    def unscale_gradients(self) -> None:
        """Divide the gradients by the scale, once in a step."""
        if self.grad_scaler.is_enabled() and not self._unscaled:
            self.grad_scaler.unscale_(self.optimizer)
            self._unscaled = True

    def _apply(self, **kwargs: Any) -> bool:
        scaler = self.grad_scaler
        if not scaler.is_enabled():
            return super()._apply(**kwargs)
        # Host-device synchronisation: reads the overflow flag.
        scaler.step(self.optimizer, **kwargs)
        # Host-device synchronisation. Fused optimizers skip the update inside their kernel, so
        # only the scaler knows of it.
        found_inf = scaler._found_inf_per_device(self.optimizer).values()
        overflowed = any(flag.item() for flag in found_inf)
        scaler.update(self._fixed_scale)
        self._unscaled = False
        if overflowed:
            self.count_skipped_update()
        return not overflowed

    def state_dict(self) -> dict[str, Any]:
        """That of :class:`OptimWrapper`, and the scaler's."""
        return {**super().state_dict(), "grad_scaler": self.grad_scaler.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned; without a scaler in it, the scaler stays as it is."""
        super().load_state_dict(state_dict)
        # The second is MMEngine's name.
        if scaler := state_dict.get("grad_scaler") or state_dict.get("loss_scaler"):
            self.grad_scaler.load_state_dict(scaler)


@contextmanager
def _both(
    outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]
) -> Iterator[None]:
    with outer, inner:
        yield


def _device_type(parameter: Tensor) -> str:
    # Shards may be offloaded to the CPU, where nothing is computed.
    mesh: Any = getattr(parameter, "device_mesh", None)
    return str(parameter.device.type if mesh is None else mesh.device_type)


def _build_scaler(
    loss_scale: Any, device_type: str, enabled: bool
) -> torch.amp.GradScaler:
    options: dict[str, Any] = {
        "enabled": enabled
    }  # disabled, it passes everything through
    if isinstance(loss_scale, torch.amp.GradScaler):
        return loss_scale
    if isinstance(loss_scale, Mapping):
        options.update(loss_scale)
    elif isinstance(loss_scale, int | float) and loss_scale > 0:
        options["init_scale"] = float(loss_scale)
    elif loss_scale != "dynamic":
        known = "'dynamic', a positive number, a dict of GradScaler's arguments or a GradScaler"
        raise ValueError(f"loss_scale must be {known}, but got {loss_scale!r}")
    return torch.amp.GradScaler(device_type, **options)


class OptimWrapperDict(dict[str, OptimWrapper]):
    """Optimizer wrappers by name, each with its own precision, scaler and accumulation.

    The model's ``train_step`` takes the one it needs::

        optim_wrapper["generator"].update_params(loss)

    Metrics of a member carry its name: ``generator.grad_norm``.

    Attributes:
        resumed: see :class:`OptimWrapper`.

    Args:
        wrappers: one :class:`OptimWrapper` a keyword.

    Raises:
        TypeError: if a value is not a wrapper.
        ValueError: if there is none, or two have the same optimizer.
    """

    resumed: Mapping[str, Any] | None = None

    def __init__(self, **wrappers: OptimWrapper) -> None:
        if not wrappers:
            raise ValueError("OptimWrapperDict needs at least one wrapper, by name")
        for name, wrapper in wrappers.items():
            if not isinstance(wrapper, OptimWrapper):
                raise TypeError(
                    f"{name!r} must be an OptimWrapper, but got {wrapper!r}"
                )
            wrapper.name = name
        if len({id(w.optimizer) for w in wrappers.values()}) < len(wrappers):
            raise ValueError(
                f"two of {list(wrappers)} share an optimizer; each needs its own"
            )
        super().__init__(wrappers)

    def __missing__(self, name: str) -> OptimWrapper:
        raise KeyError(
            f"there is no optimizer named {name!r}{did_you_mean(name, self)}"
        )

    @property
    def param_groups(self) -> dict[str, list[dict[str, Any]]]:
        """The parameter groups of each."""
        return {name: wrapper.param_groups for name, wrapper in self.items()}

    def get_lr(self) -> dict[str, list[float]]:
        """``{"<name>.lr": [one rate a group]}``, and ``"<name>.base_lr"`` where there is one."""
        return {
            f"{n}.{key}": lr for n, w in self.items() for key, lr in w.get_lr().items()
        }

    def get_momentum(self) -> dict[str, list[float]]:
        """``{"<name>.momentum": [one a group]}``."""
        return {
            f"{n}.{key}": m
            for n, w in self.items()
            for key, m in w.get_momentum().items()
        }

    def name_parameters(self, model: nn.Module) -> None:
        """Let saved states have the names of the parameters in a model; trainers call it."""
        for wrapper in self.values():
            wrapper.name_parameters(model)

    def zero_grad(self, **kwargs: Any) -> None:
        """Forget the gradients of all; see :meth:`OptimWrapper.zero_grad`."""
        for wrapper in self.values():
            wrapper.zero_grad(**kwargs)

    def start_window(self) -> None:
        """Begin a new window of accumulation in each."""
        for wrapper in self.values():
            wrapper.start_window()

    def state_dict(self) -> dict[str, Any]:
        """The state of each, by name."""
        return {name: wrapper.state_dict() for name, wrapper in self.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned.

        Raises:
            ValueError: if the state has other names; nothing was loaded.
        """
        if set(state_dict) != set(self):
            raise ValueError(
                f"the state has the optimizers {[*state_dict]}, not {[*self]}"
            )
        for name, wrapper in self.items():
            wrapper.load_state_dict(state_dict[name])


def wrappers_by_name(
    optim_wrapper: OptimWrapper | OptimWrapperDict,
) -> Mapping[str, OptimWrapper]:
    """Several wrappers by their names; a single one by the name ``""``."""
    return (
        {"": optim_wrapper}
        if isinstance(optim_wrapper, OptimWrapper)
        else optim_wrapper
    )
