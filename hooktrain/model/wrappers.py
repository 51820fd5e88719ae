"""DistributedDataParallel for models with their own step, and calls of wrapped models."""

import inspect
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.utils import _replace_by_prefix
from torch.nn.parallel import DistributedDataParallel

from hooktrain.model.base_model import BaseModel
from hooktrain.model.losses import Values
from hooktrain.utils.names import did_you_mean
from hooktrain.utils.tensors import broadcast_model

logger = logging.getLogger(__name__)

# Parts of a name that come from a wrapper, not from the model: torch.compile, activation
# checkpointing and FSDP 1. "module" is one only inside data parallel wrappers and averaged models.
WRAPPER_PARTS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_OF_WRAPPERS = re.compile(rf"(?<![^.])({'|'.join(WRAPPER_PARTS)}|module)\.")

_NO_MAPPINGS = (Tensor, list, tuple)

_by_keywords: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


class NamingDistributedDataParallel(DistributedDataParallel):
    """DistributedDataParallel with a fixed bucket order, whose errors name unused parameters.

    torch rearranges the buckets of gradients after the first backward pass. With three or more
    ranks, the first iteration of a resumed run would therefore add gradients in another order than
    an uninterrupted run. Here a backward pass of zeros arranges the buckets at construction, in the
    reverse order of the parameters, which costs one exchange of gradients. With
    ``find_unused_parameters`` torch never rearranges them. With ``static_graph`` or sparse
    gradients the order is left to torch.

    Args:
        module: the model, on its device.
        broadcast_buffers: whether to broadcast the first rank's buffers in each forward pass. At
            construction they are always broadcast, like the parameters.
        **kwargs: see :class:`torch.nn.parallel.DistributedDataParallel`. Without ``device_ids``
            the module stays on its device, which may be the CPU.

    Attributes:
        exchanged: the parameters whose gradients the ranks exchange: those that were trainable at
            construction.
    """

    def __init__(
        self, module: nn.Module, *, broadcast_buffers: bool = True, **kwargs: Any
    ) -> None:
        c10d: Any = dist  # mypy does not know these names
        level = c10d.get_debug_level()
        if level == c10d.DebugLevel.OFF:  # torch would give indices instead of names
            c10d.set_debug_level(c10d.DebugLevel.INFO)
        super().__init__(module, **kwargs)
        c10d.set_debug_level(level)
        self.exchanged = [p for p in module.parameters() if p.requires_grad]
        is_sparse = any(getattr(each, "sparse", False) for each in module.modules())
        if not (self.find_unused_parameters or self.static_graph or is_sparse):
            self._arrange_buckets()
        # torch's argument of this name is deprecated, and also governs the broadcast at
        # construction.
        self.broadcast_buffers = broadcast_buffers

    def _arrange_buckets(self) -> None:
        if dist.get_world_size(self.process_group) < 3:  # a + b is b + a
            return
        module, self.module = self.module, nn.Module()
        self.module.forward = partial(_add_zeros, self.exchanged)
        self.broadcast_buffers = False
        self(torch.zeros(())).backward()
        self.module = module
        module.zero_grad()


def _add_zeros(parameters: list[nn.Parameter], total: Tensor) -> Tensor:
    """Add 0 of each parameter, so that the gradient of the last one is ready first."""
    zeros = ((parameter * 0).abs().sum().to(total) for parameter in parameters)
    return sum(zeros, total)


class StepDistributedDataParallel(NamingDistributedDataParallel):
    """DistributedDataParallel around a :class:`hooktrain.model.BaseModel`.

    The training step calls the model through DDP, so that the ranks exchange gradients. With
    gradient accumulation they do so only in the last backward pass. A model with several
    optimizers needs :class:`hooktrain.model.SeparateDistributedDataParallel`.

    Args:
        module: the model, on its device, with the ``data_preprocessor`` and ``parse_losses`` of a
            BaseModel. It must not override ``train_step``, since that would not be called.
        **kwargs: see :class:`torch.nn.parallel.DistributedDataParallel`.
    """

    _run_forward = BaseModel._run_forward

    def train_step(self, data: Any, optim_wrapper: Any) -> Values:
        """Run the step of :class:`hooktrain.model.BaseModel`, with the forward pass through DDP.

        Returns:
            The metrics of the step.

        Raises:
            TypeError: if the model overrides ``train_step``.
        """
        model = type(self.module)
        step = getattr(model, "train_step", None)
        if step not in (None, BaseModel.train_step):
            raise TypeError(
                f"StepDistributedDataParallel would not call {model.__name__}.train_step: "
                "use SeparateDistributedDataParallel"
            )
        return BaseModel.train_step(self, data, optim_wrapper)  # type: ignore[arg-type]

    def data_preprocessor(self, data: Any, training: bool = False) -> Any:
        """Call the ``data_preprocessor`` of the model."""
        return self.module.data_preprocessor(data, training)

    def parse_losses(self, losses: Any) -> tuple[Tensor, Values]:
        """Call ``parse_losses`` of the model."""
        return self.module.parse_losses(losses)  # type: ignore[no-any-return]

    def val_step(self, data: Any) -> Any:
        """Call ``val_step`` of the model; the ranks do not communicate."""
        return self.module.val_step(data)

    def test_step(self, data: Any) -> Any:
        """Call ``test_step`` of the model; the ranks do not communicate."""
        return self.module.test_step(data)


class SeparateDistributedDataParallel(StepDistributedDataParallel):
    """DistributedDataParallel around each child of a model, with the model's own steps.

    Use it for models with several optimizers, such as GANs. DDP around the whole model would wait
    in each backward pass for the gradients of children that the pass does not reach. The model's
    ``train_step`` calls its children, and thereby their DDP. It must call a child under
    :func:`torch.no_grad` if no backward pass through the child follows, since DDP waits for one.

    Each child with trainable parameters is replaced, in the model, by a
    :class:`hooktrain.model.StepDistributedDataParallel` around it. Other children get the first
    rank's values, and are not wrapped. The state dict of ``module`` has the names of the bare
    model, and that of this wrapper has them with the prefix ``module.``, as with DDP. So a
    checkpoint fits any number of ranks.

    Args:
        module: the model, on its device; it is changed in place.
        broadcast_buffers: whether to broadcast the first rank's buffers in each forward pass.
        **kwargs: arguments of DDP for each child, such as ``device_ids`` or
            ``find_unused_parameters``.

    Raises:
        ValueError: if the model has trainable parameters outside its children, since the ranks
            would not exchange their gradients.
    """

    def __init__(
        self, module: nn.Module, broadcast_buffers: bool = False, **kwargs: Any
    ) -> None:
        # Code that looks for a DDP with a `module` recognises this object by its type. It has no
        # other attributes of DDP, since the DDP around each child does the work.
        nn.Module.__init__(self)
        named = module.named_parameters(recurse=False)
        own = [name for name, parameter in named if parameter.requires_grad]
        if own:
            raise ValueError(
                f"move the parameters {own} of {type(module).__name__} itself into a child"
            )
        broadcast_model(module, kwargs.get("process_group"))
        kwargs["broadcast_buffers"] = broadcast_buffers
        self.exchanged = [p for p in module.parameters() if p.requires_grad]
        parts: Any = {
            child: _Part(child, **kwargs)
            for child in module.children()
            if any(parameter.requires_grad for parameter in child.parameters())
        }
        # named_children() omits the second name of a child.
        for name, inner in module._modules.items():
            module._modules[name] = parts.get(inner, inner)
        self.module = module

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.module(*inputs, **kwargs)

    def train_step(self, data: Any, optim_wrapper: Any) -> Values:
        """Call ``train_step`` of the model, which calls the children through their DDP."""
        return self.module.train_step(data, optim_wrapper)  # type: ignore[no-any-return]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the ranks from exchanging gradients in backward passes inside this context."""
        with ExitStack() as stack:
            for child in self.module.children():
                if isinstance(child, _Part):
                    stack.enter_context(child.no_sync())
            yield


class _Part(StepDistributedDataParallel):
    """DDP around a child. Its state dict has the names of the bare child."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state of the child."""
        return self.module.state_dict(*args, **kwargs)

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, *args: Any
    ) -> None:
        _replace_by_prefix(state, prefix, f"{prefix}module.")
        super()._load_from_state_dict(state, prefix, *args)


def is_model_wrapper(model: nn.Module) -> bool:
    """Whether the model is a data parallel wrapper: torch's, one of these, or a subclass."""
    return isinstance(model, nn.DataParallel | DistributedDataParallel)


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the model inside all wrappers, in any order.

    Wrappers are those of :func:`is_model_wrapper`, which hold the model as ``module``, and
    ``torch.compile``.

    Raises:
        TypeError: if ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"a model must be an nn.Module object, but got {model!r:.80}")
    while True:
        # The class of torch.compile is slow to import, so its attribute identifies it.
        name = "module" if is_model_wrapper(model) else "_orig_mod"
        if name not in model._modules:
            return model
        model = model.get_submodule(name)


def bare_name(name: str) -> str:
    """The name of a tensor without the parts that wrappers add, around any part of the model.

    Names are equal if their bare names are: a part ``"module"`` of the model itself is left out
    too.
    """
    return _OF_WRAPPERS.sub("", name)


def call_model(model: Callable[..., Any], batch: Any) -> Any:
    """Call a model with a batch, or with the items of the batch as keyword arguments.

    Hugging Face's models take keyword arguments. They are used if the first batch is a dict whose
    keys are all parameters of the model's ``forward``, and ``forward`` has several parameters. A
    ``forward`` with a single parameter, such as ``forward(self, batch)``, gets the dict itself.
    The choice is logged.
    """
    # Mapping is checked last, since isinstance is slow with an abstract class.
    is_mapping = not isinstance(batch, _NO_MAPPINGS) and isinstance(batch, Mapping)
    if is_mapping and isinstance(model, nn.Module):
        bare = unwrap_model(model)
        if bare not in _by_keywords:
            _by_keywords[bare] = _takes_keywords(bare, batch)
        if _by_keywords[bare]:
            return model(**batch)
    return model(batch)


def _takes_keywords(model: nn.Module, batch: Mapping[Any, Any]) -> bool:
    names = inspect.signature(model.forward).parameters
    others = [key for key in batch if key not in names]
    if len(names) < 2 or len(others) == len(batch):
        return False
    name = type(model).__name__
    if others:
        hint = did_you_mean(others[0], names)
        text = "forward() of %s gets each batch as one dict, since it has no parameter %r%s"
        logger.warning(text, name, others[0], hint)
        return False
    logger.info("forward() of %s gets each batch as keyword arguments", name)
    return True
