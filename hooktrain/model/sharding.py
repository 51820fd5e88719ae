"""A model sharded over ranks by torch's ``fully_shard`` (FSDP2).

Each rank holds a part of every parameter, of its gradient and of the optimizer's state.
The parameters of a layer are gathered right before it computes. Names stay the same.
"""

from collections.abc import Callable, Collection, Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from hooktrain.utils.tensors import full_tensor, is_sharded, shard_like

if TYPE_CHECKING:  # it is heavy, and few runs need it
    from torch.distributed.fsdp import MixedPrecisionPolicy

# A policy of mixed precision, or its arguments, in which data types may be names.
Precision: TypeAlias = "MixedPrecisionPolicy | Mapping[str, Any] | None"
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
) -> nn.Module:
    """Shard a model in place; the parameters become DTensors. A collective.

    Initialise the process group first, and make the optimizer afterwards. Every rank
    must hold the same values. Call the model itself, not its ``forward``. If its step
    calls its children instead, name each of these in ``wrap``. Buffers are not sharded,
    and the ranks do not exchange them.

    A model on the meta device gets memory for this rank's shards, and then values: as at
    construction, ``reset_parameters`` of each module is called, children before their
    parent, and then ``init_weights`` of the model, if it has that method. Only the
    tensors that an operation uses are whole meanwhile, so a model may be larger than the
    memory of a device. The values are those of one process with the first rank's seed, on
    this kind of device, if its constructor draws random numbers in this order.
    A part of a parameter (``weight[2]``) can be changed until the next parameter is used.
    After that torch refuses the change, which would be lost.

    Args:
        model: the model.
        wrap: the modules that are units of their own, such as the blocks of a
            transformer: the parameters of a unit are gathered together. The rest of the
            model is one more unit.
        mp_policy: the data types to compute and to communicate in, or a dict of the
            policy's arguments, in which data types may be names: ``{"param_dtype":
            "bfloat16", "reduce_dtype": "float32"}``.
        offload: keep parameters, gradients and the optimizer's state in CPU memory.
        reshard_after_forward: free a unit's parameters after its forward pass, and gather
            them again for the backward pass. False takes more memory and communicates
            less.
        mesh: the ranks, in one dimension, or in two to shard over the second and
            replicate over the first. None takes all ranks, on the accelerator, or on the
            CPU if there is none.

    Returns:
        The model.

    Raises:
        ValueError: for a rule that matches no module, or that puts modules with a shared
            parameter into different units; for a tensor on the meta device to which
            neither ``reset_parameters`` nor ``init_weights`` gives values.
        TypeError: for a rule of another kind, or an unknown option of ``mp_policy``.
        AttributeError: for an unknown data type in ``mp_policy``.
    """
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        FSDPModule,
        OffloadPolicy,
        fully_shard,
    )

    pinned = torch.accelerator.is_available()
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": build_mp_policy(mp_policy),
        # With None torch keeps the root's parameters after the forward pass, since the
        # backward pass begins there.
        "reshard_after_forward": None if reshard_after_forward else False,
        "offload_policy": CPUOffloadPolicy(pinned) if offload else OffloadPolicy(),
    }
    parameters = len(list(model.parameters()))
    for module in (*reversed(select_modules(model, wrap)), model):  # inner ones first
        if not isinstance(module, FSDPModule):  # it may be sharded already
            fully_shard(module, **options)
    # A parameter counts once, however many modules share it.
    if len(list(model.parameters())) > parameters:
        raise ValueError(
            "units of the model share a parameter, which would become two: let "
            f"{wrap!r} select none of the modules that share it"
        )
    if on_meta(model):
        _initialise(model, offload)
    return model


def check_parallelized(model: nn.Module) -> None:
    """Reject a model of tensor parallelism that cannot be sharded in addition.

    Args:
        model: the model before it is sharded.

    Raises:
        ValueError: if only some of the parameters are DTensors, since no optimizer takes
            both kinds together; or if rows cannot be divided evenly, since torch then
            does not know where the shards of shards are.
    """
    parameters: dict[str, Any] = dict(model.named_parameters())
    plain = [name for name, p in parameters.items() if not is_sharded(p)]
    if len(plain) == len(parameters):
        return
    if plain:
        raise ValueError(
            f"parallelize must divide or replicate {plain} too, for example norms by "
            "SequenceParallel()"
        )
    for name, parameter in parameters.items():
        ranks = parameter.device_mesh.size()
        if parameter.placements[0].is_shard(0) and len(parameter) % ranks:
            raise ValueError(
                f"the {len(parameter)} rows of {name} cannot be divided by {ranks} ranks: "
                "pad them, or divide its columns"
            )


def checkpoint_activations(model: nn.Module, rule: WrapRule) -> None:
    """Recompute the activations of modules in the backward pass, to save memory.

    Modules and their names stay the same. Call it before the model is sharded or compiled.

    Args:
        model: the model; it is changed in place.
        rule: see :func:`select_modules`, also for errors.
    """
    for module in select_modules(model, rule):
        # As a bound method it is copied with the model, and then belongs to the copy.
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
    # The base classes count too, since fully_shard gives a module a class of its own.
    kinds = type(module).__mro__
    return any(kind in rule or kind.__name__ in rule for kind in kinds)


def build_mp_policy(options: Precision) -> "MixedPrecisionPolicy":
    """Build a policy from its arguments, in which data types may be names.

    None changes no data type.

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


def on_meta(model: nn.Module, recurse: bool = True) -> bool:
    """Whether a tensor of a module is on the meta device; with ``recurse``, of its children too."""
    return any(tensor.is_meta for tensor in _tensors(model, recurse))


def _tensors(module: nn.Module, recurse: bool = False) -> list[Tensor]:
    return [*module.parameters(recurse), *module.buffers(recurse)]


@torch.no_grad()
def _initialise(model: nn.Module, offload: bool) -> None:
    """Give memory and values to the tensors on the meta device. A collective."""
    parameter: Any = next(model.parameters())
    device = parameter.device_mesh.device_type
    memory = "cpu" if offload else device
    order: list[nn.Module] = []
    model.apply(order.append)  # children before their parent
    fresh = [module for module in order if on_meta(module, recurse=False)]
    wholes = _Wholes()
    for module in fresh:
        module.to_empty(device=memory, recurse=False)
        wholes.untouched.update(_tensors(module))
    with torch.device(memory), wholes:
        for module in dict.fromkeys(fresh):  # one may be at several places
            # In torch's attention the method has the second name.
            reset = getattr(module, "_reset_parameters", lambda: None)
            getattr(module, "reset_parameters", reset)()
        getattr(model, "init_weights", lambda: None)()
    wholes.put_back()
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)
        buffer.data = buffer.to(device)
    named = (*model.named_parameters(), *model.named_buffers())
    forgotten = [name for name, tensor in named if tensor in wholes.untouched]
    if forgotten:
        raise ValueError(
            "reset_parameters() of a module or init_weights() of the model must give values "
            f"to these tensors on the meta device: {forgotten}"
        )


class _Wholes(TorchDispatchMode):
    """Gives operations whole tensors in place of sharded ones. Collective.

    So an initialiser may do anything to a tensor, and draws the same numbers as in one
    process. DTensor itself loses what is written to a part of a tensor, and draws other
    numbers: on the CPU the same ones for each shard.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.wholes: dict[Tensor, Tensor] = {}
        self.untouched: set[Tensor] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = (args, kwargs or {})
        leaves = tree_leaves(given)
        self.untouched.difference_update(leaves)
        if func is torch.ops.aten.detach.default:
            return func(*args)  # it shares the memory of a shard
        sharded = [leaf for leaf in leaves if is_sharded(leaf)]
        if not self.wholes.keys() >= set(sharded):
            self.put_back()
            # If one rank has all of it, full_tensor returns the shard itself.
            self.wholes = {tensor: full_tensor(tensor).clone() for tensor in sharded}
        args, kwargs = tree_map_only(
            Tensor, lambda tensor: self.wholes.get(tensor, tensor), given
        )
        return func(*args, **kwargs)

    def put_back(self) -> None:
        """Write the whole tensors back into the shards of each rank."""
        for sharded, whole in self.wholes.items():
            dist.broadcast(whole, 0)  # each rank has drawn its own
            sharded.copy_(shard_like(whole, sharded))
            # A change of a part of it would be lost from now on.
            torch._C._set_throw_on_mutable_data_ptr(whole)
        self.wholes = {}
