"""A model sharded over ranks by torch's ``fully_shard`` (FSDP2).

Each rank holds a part of every parameter, of its gradient and of the optimizer's state.
A layer's parameters are brought together right before it computes. Names stay as they
are.
"""

import math
from collections.abc import Callable, Collection, Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:  # it is heavy, and few runs need it
    from torch.distributed.fsdp import MixedPrecisionPolicy

# A policy of mixed precision, or its arguments, in which data types may be names.
Precision: TypeAlias = "MixedPrecisionPolicy | Mapping[str, Any] | None"
# Which modules of a model: those of some classes, given as classes or by their bare
# names, or those for which ``rule(name, module)``.
WrapRule: TypeAlias = (
    Collection[type[nn.Module] | str] | Callable[[str, nn.Module], bool]
)


def shard_model(
    model: nn.Module,
    *,
    wrap: WrapRule = (),
    mp_policy: Precision = None,
    offload: bool = False,
    reshard_after_forward: bool = True,
    mesh: DeviceMesh | None = None,
) -> nn.Module:
    """Shard a model in place; the parameters become DTensors. A collective.

    Initialise the process group first, and make the optimizer afterwards. Every rank
    must hold the same values. Call the model itself, not its ``forward``. If its step
    calls its children instead, name each of these in ``wrap``. Buffers are not sharded,
    and the ranks do not exchange them.

    A model on the meta device gets memory and values one unit at a time, so it may be
    larger than the memory of one device. As at construction, ``reset_parameters`` of each
    module is called, children before their parent. The first rank's values count. A
    model that has ``init_weights`` initialises all weights again by it, when it is
    sharded.

    Args:
        model: the model.
        wrap: the modules whose parameters are brought together one module at a time,
            such as the blocks of a transformer. The rest is one more unit. With none,
            the whole model is one.
        mp_policy: the precision to compute and to communicate in; a dict is its
            arguments, with names for data types: ``{"param_dtype": "bfloat16",
            "reduce_dtype": "float32"}``.
        offload: keep parameters, gradients and the optimizer's state in the CPU's memory.
        reshard_after_forward: free a unit's parameters after its forward pass and bring
            them together again for the backward one. False takes more memory and
            communicates less.
        mesh: the ranks, in one dimension, or in two to shard over the second and
            replicate over the first. None is all ranks, on the accelerator, or on the CPU
            if there is none.

    Returns:
        The model.

    Raises:
        ValueError: for a rule that matches nothing or that tears apart a shared
            parameter; for modules on the meta device that have no ``reset_parameters``,
            in a model without ``init_weights``.
        TypeError: for a rule of another kind, or an unknown option of ``mp_policy``.
        AttributeError: for an unknown data type in ``mp_policy``.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    pinned = torch.accelerator.is_available()
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": build_mp_policy(mp_policy),
        # torch keeps the rest's parameters after the forward pass, since the backward
        # pass begins there.
        "reshard_after_forward": None if reshard_after_forward else False,
        "offload_policy": CPUOffloadPolicy(pinned) if offload else OffloadPolicy(),
    }
    units = {model, *select_modules(model, wrap)}
    is_deferred = on_meta(model)
    if is_deferred:
        _check_initialisable(model)
    parameters = len(list(model.parameters()))
    device: Any = torch.accelerator.current_accelerator(check_available=True)
    if mesh is not None:
        device = mesh.device_type

    def initialise_and_shard(module: nn.Module) -> None:
        _initialise(module, device or "cpu")
        if module in units:
            units.remove(module)  # it may be at several places
            fully_shard(module, **options)

    model.apply(initialise_and_shard)  # children before their parent
    # A parameter counts once, however many modules share it.
    if len(list(model.parameters())) > parameters:
        raise ValueError(
            "modules share a parameter, which would come apart: leave those of them "
            f"that {wrap!r} selects to the rest of the model"
        )
    if is_deferred and hasattr(model, "init_weights"):
        model.init_weights()  # type: ignore[operator]
    return model


def checkpoint_activations(model: nn.Module, rule: WrapRule) -> None:
    """Let modules compute their activations again in the backward pass, in less memory.

    Modules and names stay as they are. Do it before the model is sharded or compiled.

    Args:
        model: is changed.
        rule: see :func:`select_modules`.

    Raises:
        TypeError: as :func:`select_modules`.
        ValueError: as :func:`select_modules`.
    """
    for module in select_modules(model, rule):
        # A method of this module, which a copy of the model copies too.
        module.forward = MethodType(_recomputed, module)


def _recomputed(
    module: nn.Module,
    *args: Any,
    **kwargs: Any,
) -> Any:
    forward = type(module).forward
    return checkpoint(
        forward,
        module,
        *args,
        use_reentrant=False,
        **kwargs,
    )


def select_modules(model: nn.Module, rule: WrapRule) -> list[nn.Module]:
    """The modules inside a model that a rule selects, outer ones before inner ones.

    Args:
        model: is never selected itself.
        rule: classes or names of classes, or a function of full name and module.

    Raises:
        TypeError: if ``rule`` is a single class or name.
        ValueError: if it selects no module; an empty collection may.
    """
    if isinstance(rule, str | type | bool):
        raise TypeError(
            f"a rule must be a collection of classes or a function, not {rule!r}"
        )
    modules = dict(model.named_modules())
    del modules[""]
    chosen = []
    for name, module in modules.items():
        if _selects(rule, name, module):
            chosen.append(module)
    if rule and not chosen:
        kinds = {type(module).__name__ for module in modules.values()}
        raise ValueError(
            f"the rule {rule!r} selects none of the model's modules: {sorted(kinds)}"
        )
    return chosen


def _selects(rule: WrapRule, name: str, module: nn.Module) -> bool:
    if callable(rule):
        return rule(name, module)
    # Its class and their bases: fully_shard makes a class of its own.
    if any(kind.__name__ in rule for kind in type(module).__mro__):
        return True
    classes = tuple(kind for kind in rule if isinstance(kind, type))
    return isinstance(module, classes)


def build_mp_policy(options: Precision) -> "MixedPrecisionPolicy":
    """A policy from its arguments, in which data types may be names; None is float32.

    Raises:
        TypeError: for an unknown option.
        AttributeError: for an unknown data type.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if isinstance(options, MixedPrecisionPolicy):
        return options
    typed: dict[str, Any] = dict(options or {})
    for name, value in typed.items():
        if isinstance(value, str):
            typed[name] = getattr(torch, value)
    return MixedPrecisionPolicy(**typed)


def on_meta(model: nn.Module) -> bool:
    """Whether a part of a model is on the meta device."""
    return any(tensor.is_meta for tensor in _tensors(model, recurse=True))


def _tensors(module: nn.Module, recurse: bool = False) -> list[Tensor]:
    return [*module.parameters(recurse), *module.buffers(recurse)]


def _reset_method(module: nn.Module) -> Callable[[], None] | None:
    # torch's attention has it under the second name.
    other = getattr(module, "_reset_parameters", None)
    return getattr(module, "reset_parameters", other)


def _check_initialisable(model: nn.Module) -> None:
    if hasattr(model, "init_weights"):
        return
    lacking = []
    for name, module in model.named_modules():
        if _tensors(module) and _reset_method(module) is None:
            lacking.append(name or type(model).__name__)
    if lacking:
        raise ValueError(
            f"no reset_parameters() to initialise what is on the meta device: {lacking}"
        )


@torch.no_grad()
def _initialise(module: nn.Module, device: str) -> None:
    """Give memory and values to what a module itself has on the meta device."""
    if not any(tensor.is_meta for tensor in _tensors(module)):
        return
    module.to_empty(device=device, recurse=False)
    for tensor in _tensors(module):
        if tensor.is_floating_point():
            # So that what is forgotten is seen in the first loss.
            tensor.fill_(math.nan)
    reset = _reset_method(module)
    if reset is not None:
        reset()
    for tensor in _tensors(module):
        dist.broadcast(tensor, 0)
