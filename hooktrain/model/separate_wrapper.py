"""DistributedDataParallel around each part of a model that has several optimizers."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hooktrain.model.wrappers import StepDistributedDataParallel
from hooktrain.utils.registry import MODEL_WRAPPERS

__all__ = ["SeparateDistributedDataParallel"]


@MODEL_WRAPPERS.register_module(
    name=["SeparateDistributedDataParallel", "MMSeparateDistributedDataParallel"]
)
class SeparateDistributedDataParallel(DistributedDataParallel):
    """DistributedDataParallel around each child of a model, with the model's own steps.

    For models with several optimizers, such as GANs: DDP around the whole would wait in each
    backward pass for the gradients of the parts that it does not reach. The model's ``train_step``
    calls its children, and thereby DDP; under :func:`torch.no_grad` where no backward pass through
    them follows, since DDP waits for one.

    Each child with trainable parameters is replaced, in the model, by a
    :class:`~hooktrain.model.StepDistributedDataParallel` around it. Other children stay as they
    are, with the values of the first rank. The state has the names of the bare model: those of this
    wrapper with a prefix ``module.``, as DDP has it, those of ``module`` without any. So a
    checkpoint fits any number of ranks.

    Args:
        module: the model, on its device; it is changed.
        broadcast_buffers: see :class:`~hooktrain.model.NamingDistributedDataParallel`.
        find_unused_parameters: see :class:`torch.nn.parallel.DistributedDataParallel`.
        **kwargs: passed on for each child, as ``device_ids``, or the ``detect_anomalous_params`` of
            StepDistributedDataParallel.

    Raises:
        ValueError: if no child has trainable parameters; or if the model has some of its own, which
            no child would exchange.
    """

    def __init__(
        self,
        module: nn.Module,
        broadcast_buffers: bool = False,
        find_unused_parameters: bool = False,
        **kwargs: Any,
    ) -> None:
        # DDP by type, so that all who look for a DDP to get at its `module` find this one too. The
        # work is done by the DDPs around the children: this has none of a DDP's attributes.
        nn.Module.__init__(self)
        trained = [
            child
            for child in module.children()
            if any(parameter.requires_grad for parameter in child.parameters())
        ]
        own = [n for n, p in module.named_parameters(recurse=False) if p.requires_grad]
        if own:
            raise ValueError(
                f"the parameters {own} stand directly in {type(module).__name__}, in no child that "
                "DistributedDataParallel could be put around: move them into a child"
            )
        if not trained:
            raise ValueError(f"no child of {type(module).__name__} has trainable parameters")
        options = {
            "broadcast_buffers": broadcast_buffers,
            "find_unused_parameters": find_unused_parameters,
            **kwargs,
        }
        parts = {child: _Part(child, **options) for child in trained}
        # named_children() has no second name of a child.
        for name, child in module._modules.items():
            if child in parts:
                module._modules[name] = parts[child]
        self.module = module
        _broadcast_rest(module, kwargs.get("process_group"))

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

    def val_step(self, data: Any) -> Any:
        """The model's own."""
        return self.module.val_step(data)

    def test_step(self, data: Any) -> Any:
        """The model's own."""
        return self.module.test_step(data)

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

    def train(self, mode: bool = True) -> "SeparateDistributedDataParallel":
        """Set the mode of the wrapper and the model."""
        nn.Module.train(self, mode)
        return self

    def _parts(self) -> list["_Part"]:
        return [child for child in self.module.children() if isinstance(child, _Part)]


class _Part(StepDistributedDataParallel):
    """DDP around a child. What is inside has the names in the state that it has without DDP."""

    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        super().__init__(module, **kwargs)
        self._prefix = ""
        self.register_load_state_dict_pre_hook(_add_wrapper)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_drop_wrapper)  # type: ignore[no-untyped-call]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """That of the child."""
        return self.module.state_dict(*args, **kwargs)


def _add_wrapper(part: _Part, state: dict[str, Any], prefix: str, *_: Any) -> None:
    part._prefix = prefix
    for name in [name for name in state if name.startswith(prefix)]:
        state[f"{prefix}module.{name[len(prefix) :]}"] = state.pop(name)


def _drop_wrapper(part: _Part, incompatible: Any) -> None:
    inside = f"{part._prefix}module."
    for names in incompatible:
        names[:] = [
            part._prefix + name[len(inside) :] if name.startswith(inside) else name
            for name in names
        ]


def _broadcast_rest(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """The first rank's values for what is in no DDP, as DDP itself does for what is in it."""
    parts = [child for child in module.children() if not isinstance(child, _Part)]
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    for part in parts:
        tensors += [*part.parameters(), *part.buffers()]
    source = dist.get_global_rank(group or dist.distributed_c10d._get_default_group(), 0)
    for tensor in tensors:
        dist.broadcast(tensor.detach(), source, group)
