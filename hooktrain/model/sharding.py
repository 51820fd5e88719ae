"""A model sharded over ranks by torch's ``fully_shard`` (FSDP2).

Each rank holds a part of every parameter, of its gradient and of the optimizer's state.
The parameters of a layer are gathered right before it computes. Names stay the same.
"""

from collections.abc import Callable, Collection
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from hooktrain.utils.tensors import Tensors, broadcast_model, compute_device, shard_like

if TYPE_CHECKING:  # it is heavy, and few runs need it
    from torch.distributed.fsdp import MixedPrecisionPolicy

Precision: TypeAlias = "MixedPrecisionPolicy | None"
# Selects modules of a model: those of some classes, given as classes or by their bare
# names, or those for which ``rule(name, module)`` is true.
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
    values: Tensors | None = None,
) -> nn.Module:
    """Shard a model in place; the parameters become DTensors. A collective.

    Initialise the process group first, and build the optimizer afterwards. Every rank
    must hold the same values. Call the model itself, not its ``forward``. If the training
    step calls the model's children instead, name each of these in ``wrap``. Buffers are not
    sharded, and the ranks do not exchange them.

    A model on the meta device is sharded there if ``values`` is None. Afterwards, call its
    ``to_empty`` and initialise its tensors.

    Args:
        model: the model.
        wrap: the modules to shard as separate units, such as the blocks of a
            transformer: the parameters of a unit are gathered together. The rest of the
            model is one more unit.
        mp_policy: the data types to compute and to communicate in; None changes nothing.
        offload: keep parameters, gradients and the optimizer's state in CPU memory.
        reshard_after_forward: free a unit's parameters after its forward pass, and gather
            them again for the backward pass. False takes more memory and communicates
            less.
        mesh: the ranks, in one dimension, or in two to shard over the second and
            replicate over the first; all replicas then get the values of the first one.
            None takes all ranks, on the accelerator, or on the CPU if there is none.
        values: for a model on the meta device, the values of all parameters and buffers by
            name on the first rank; ignored on the other ranks. A rank allocates memory for
            its shards, and for one whole tensor at a time.

    Returns:
        The model.

    Raises:
        ValueError: if the rule matches no module, or puts modules with a shared
            parameter into different units.
        KeyError: on the first rank, if a tensor has no value.
        TypeError: if ``wrap`` is not a valid rule.
    """
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    pinned = torch.accelerator.is_available()
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": mp_policy or MixedPrecisionPolicy(),
        # With None torch keeps the root's parameters after the forward pass, since the
        # backward pass begins there.
        "reshard_after_forward": None if reshard_after_forward else False,
        "offload_policy": CPUOffloadPolicy(pinned) if offload else OffloadPolicy(),
    }
    parameters = len(list(model.parameters()))
    for module in (*reversed(select_modules(model, wrap)), model):  # inner ones first
        if not is_unit(module):  # it may be sharded already
            fully_shard(module, **options)
    # A parameter counts once, however many modules share it.
    if len(list(model.parameters())) > parameters:
        raise ValueError(
            "units of the model share a parameter, which would become two: let "
            f"{wrap!r} select none of the modules that share it"
        )
    if values is not None:
        _fill(model, values, offload)
    elif mesh is not None and mesh.ndim > 1:
        # Replicas may have different values.
        broadcast_model(model, mesh.get_group(0))
    return model


def is_unit(module: nn.Module) -> bool:
    """Whether ``fully_shard`` has made a module a unit, whose parameters are gathered together."""
    return hasattr(type(module), "reshard")  # a method of torch's FSDPModule


def checkpoint_activations(model: nn.Module, rule: WrapRule) -> None:
    """Recompute the activations of modules in the backward pass, to save memory.

    Modules and their names stay the same. Call it before the model is sharded or compiled.

    Args:
        model: the model; it is changed in place.
        rule: see :func:`select_modules`, also for errors.
    """
    for module in select_modules(model, rule):
        # A bound method is copied with the model, and is then bound to the copy.
        module.forward = MethodType(_recomputed, module)


def _recomputed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward = type(module).forward
    return checkpoint(forward, module, *args, use_reentrant=False, **kwargs)


def select_modules(model: nn.Module, rule: WrapRule) -> list[nn.Module]:
    """Return the modules inside a model that a rule selects, outer ones before inner ones.

    Args:
        model: the model, which is never selected itself.
        rule: classes or names of classes, or a function of full name and module.

    Raises:
        TypeError: if ``rule`` is a single class or name.
        ValueError: if it selects no module, unless it is an empty collection.
    """
    if isinstance(rule, str | type | bool):
        raise TypeError(f"a rule must be a list of classes or a function, not {rule!r}")
    modules = dict(model.named_modules())
    del modules[""]
    chosen = [
        module for name, module in modules.items() if _selects(rule, name, module)
    ]
    if rule and not chosen:
        kinds = {type(module).__name__ for module in modules.values()}
        raise ValueError(
            f"the rule {rule!r} selects none of the model's modules: {sorted(kinds)}"
        )
    return chosen


def _selects(rule: WrapRule, name: str, module: nn.Module) -> bool:
    if callable(rule):
        return rule(name, module)
    # The base classes count too, since fully_shard changes the class of a module.
    kinds = type(module).__mro__
    return any(kind in rule or kind.__name__ in rule for kind in kinds)


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters and buffers of a model with their names."""
    return [*model.named_parameters(), *model.named_buffers()]


@torch.no_grad()
def _fill(model: nn.Module, values: Tensors, offload: bool) -> None:
    """Allocate a sharded model and fill it with the first rank's values. A collective."""
    device = compute_device(model).type
    model.to_empty(device="cpu" if offload else device)
    for name, tensor in named_tensors(model):
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if dist.get_rank() == 0:
            whole.copy_(values[name])
        dist.broadcast(whole, 0)
        tensor.copy_(shard_like(whole, tensor))
    for buffer in model.buffers():
        buffer.data = buffer.to(device)
