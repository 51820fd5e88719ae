"""DistributedDataParallel that names unused parameters, and two for models that own their step."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hooktrain.model.base_model import BaseModel, train_step
from hooktrain.utils.registry import MODEL_WRAPPERS


@MODEL_WRAPPERS.register_module()
class NamingDistributedDataParallel(DistributedDataParallel):
    """DistributedDataParallel whose error about parameters without gradient has their names.

    Args:
        module: the model, on its device.
        broadcast_buffers: send the first rank's buffers to all in each forward pass. At the start
            they are sent in any case, as the parameters are.
        **kwargs: see :class:`torch.nn.parallel.DistributedDataParallel`. Without ``device_ids`` the
            module stays where it is, also on the CPU.
    """

    def __init__(
        self, module: nn.Module, *, broadcast_buffers: bool = True, **kwargs: Any
    ) -> None:
        c10d: Any = dist  # mypy does not know of these names
        level = c10d.get_debug_level()
        if (
            level == c10d.DebugLevel.OFF
        ):  # torch would only give indices of the parameters
            c10d.set_debug_level(c10d.DebugLevel.INFO)
        super().__init__(module, **kwargs)
        c10d.set_debug_level(level)
        # torch's argument of this name is deprecated, and is about the start too.
        self.broadcast_buffers = broadcast_buffers


@MODEL_WRAPPERS.register_module(
    ["StepDistributedDataParallel", "MMDistributedDataParallel"]
)
class StepDistributedDataParallel(NamingDistributedDataParallel):
    """DistributedDataParallel around a :class:`~hooktrain.model.BaseModel`, with its steps.

    The training step calls the model through DDP, so that the ranks exchange gradients. Where
    several backward passes are accumulated, they do so in the last one only. A model with
    several optimizers needs :class:`~hooktrain.model.SeparateDistributedDataParallel`.

    Args:
        module: the model, on its device. It has the ``data_preprocessor`` and ``parse_losses`` of a
            BaseModel, and does not override ``train_step``, which would not be called.
        detect_anomalous_params: log in each step the parameters that the loss does not depend on,
            to find out why DDP fails or hangs. It takes time.
        **kwargs: those of :class:`NamingDistributedDataParallel`.
    """

    def __init__(
        self, module: nn.Module, detect_anomalous_params: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(module, **kwargs)
        self.detect_anomalous_params = detect_anomalous_params

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        """Train on one batch; see :func:`hooktrain.model.base_model.train_step`.

        Returns:
            The values to log.

        Raises:
            TypeError: if the model overrides ``train_step``.
        """
        own = getattr(type(self.module), "train_step", BaseModel.train_step)
        if own is not BaseModel.train_step:
            problem = (
                f"{type(self.module).__name__} has its own train_step, not called here"
            )
            raise TypeError(f"{problem}: use SeparateDistributedDataParallel")
        return train_step(
            self.module, data, optim_wrapper, self, self.detect_anomalous_params
        )

    _run_forward = BaseModel._run_forward

    def val_step(self, data: Any) -> Any:
        """The model's own; the ranks do not communicate."""
        return self.module.val_step(data)

    def test_step(self, data: Any) -> Any:
        """The model's own; the ranks do not communicate."""
        return self.module.test_step(data)


@MODEL_WRAPPERS.register_module()
@MODEL_WRAPPERS.register_module(name="MMSeparateDistributedDataParallel")
class SeparateDistributedDataParallel(StepDistributedDataParallel):
    """DistributedDataParallel around each child of a model, with the model's own steps.

    For models with several optimizers, such as GANs: DDP around the whole would wait in each
    backward pass for the gradients of the parts that it does not reach. The model's ``train_step``
    calls its children, and so DDP; under :func:`torch.no_grad` where no backward pass through
    them follows, since DDP waits for one.

    Each child with trainable parameters is replaced, in the model, by a
    :class:`~hooktrain.model.StepDistributedDataParallel` around it. Other children stay as they
    are, with the values of the first rank. The state has the names of the bare model: those of this
    wrapper with a prefix ``module.``, as DDP has it, those of ``module`` without any. So a
    checkpoint fits any number of ranks.

    Args:
        module: the model, on its device; it is changed.
        broadcast_buffers: see :class:`~hooktrain.model.NamingDistributedDataParallel`.
        **kwargs: passed on for each child, such as ``device_ids``, ``find_unused_parameters``, or
            the ``detect_anomalous_params`` of StepDistributedDataParallel.

    Raises:
        ValueError: if trainable parameters are directly in the model, where no child exchanges
            them.
    """

    def __init__(
        self, module: nn.Module, broadcast_buffers: bool = False, **kwargs: Any
    ) -> None:
        # A DDP by type, so that all who look for one to get at its `module` find this one too. The
        # work is done by the DDPs around the children: this has none of a DDP's attributes.
        nn.Module.__init__(self)
        if own := [
            n for n, p in module.named_parameters(recurse=False) if p.requires_grad
        ]:
            raise ValueError(
                f"move {own} of {type(module).__name__} itself into a child"
            )
        trained = [
            c for c in module.children() if any(p.requires_grad for p in c.parameters())
        ]
        inside = {
            t for child in trained for t in (*child.parameters(), *child.buffers())
        }
        rest = [t for t in (*module.parameters(), *module.buffers()) if t not in inside]
        kwargs["broadcast_buffers"] = broadcast_buffers
        parts: dict[Any, nn.Module] = {
            child: _Part(child, **kwargs) for child in trained
        }
        # named_children() leaves out the second name of a child.
        for name, child in module._modules.items():
            module._modules[name] = parts.get(child, child)
        self.module = module
        # As DDP does for what is in it.
        for tensor in rest:
            dist.broadcast(
                tensor.detach(), group=kwargs.get("process_group"), group_src=0
            )

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.module(*inputs, **kwargs)

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        """The model's own; it calls the children, and so their ranks communicate.

        Returns:
            The values to log.
        """
        values: dict[str, Tensor] = self.module.train_step(data, optim_wrapper)
        return values

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, the ranks exchange the gradients of no child."""
        with ExitStack() as stack:
            for part in self._parts():
                stack.enter_context(part.no_sync())
            yield

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Register a communication hook with the DDP around each child."""
        for part in self._parts():
            part.register_comm_hook(state, hook)

    def _parts(self) -> list["_Part"]:
        return [child for child in self.module.children() if isinstance(child, _Part)]


class _Part(StepDistributedDataParallel):
    """DDP around a child. What is inside has the names in the state that it has without DDP."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """That of the child."""
        return self.module.state_dict(*args, **kwargs)

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, *args: Any
    ) -> None:
        for name in [name for name in state if name.startswith(prefix)]:
            state[f"{prefix}module.{name[len(prefix) :]}"] = state.pop(name)
        super()._load_from_state_dict(state, prefix, *args)


def is_model_wrapper(model: nn.Module) -> bool:
    """Whether a model is wrapped in something of ``MODEL_WRAPPERS``, which has it as ``module``."""
    wrappers = tuple(
        wrapper for _, wrapper in MODEL_WRAPPERS if isinstance(wrapper, type)
    )
    return isinstance(model, wrappers)


def unwrap_model(model: nn.Module) -> nn.Module:
    """The model inside all wrappers, in any order.

    Wrappers are those in ``MODEL_WRAPPERS``, torch's data parallel ones among them, which have the
    model as ``module``, and ``torch.compile``.

    Raises:
        TypeError: If it is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"a model must be an nn.Module object, but got {model!r:.80}")
    # torch.compile's class is known by its attribute, since importing it takes seconds.
    while (
        inner := "module" if is_model_wrapper(model) else "_orig_mod"
    ) in model._modules:
        model = model.get_submodule(inner)
    return model
