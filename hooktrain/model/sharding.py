"""A model sharded over ranks by torch's ``fully_shard`` (FSDP2).

Each rank holds a part of every parameter, of its gradient and of the optimizer's state.
A layer's parameters are brought together right before it computes. Names stay as they
are.
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

    A model on the meta device gets memory for this rank's shards, and then values: as at
    construction, ``reset_parameters`` of each module is called, children before their
    parent, and then ``init_weights`` of the model, if it has that. Only what an operation
    uses is whole meanwhile, so a model may be larger than the memory of a device. The
    values are those of one process with the first rank's seed, on this kind of device, if
    its constructor draws in this order.
    Parts of a parameter (``weight[2]``) can be changed until the next one is used; torch
    refuses it then, since that would be lost.

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
            parameter; for what neither ``reset_parameters`` nor ``init_weights`` gives
            values to, on the meta device.
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
        # torch keeps the rest's parameters after the forward pass, since the backward
        # pass begins there.
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
            "modules share a parameter, which would come apart: leave those of them "
            f"that {wrap!r} selects to the rest of the model"
        )
    if on_meta(model):
        _initialise(model, offload)
    return model


def check_parallelized(model: nn.Module) -> None:
    """Refuse what would go wrong late where tensor parallelism and shards come together.

    Args:
        model: before it is sharded.

    Raises:
        ValueError: if some parameters are divided or replicated as DTensors and others
            are not, since no optimizer takes both together; or if rows cannot be divided
            evenly, since torch does not know then where shards of shards are.
    """
    parameters: dict[str, Any] = dict(model.named_parameters())
    plain = [name for name, p in parameters.items() if not is_sharded(p)]
    if len(plain) == len(parameters):
        return
    if plain:
        raise ValueError(
            f"parallelize has left out {plain}: divide or replicate them too, such as "
            "norms by SequenceParallel()"
        )
    for name, parameter in parameters.items():
        ranks = parameter.device_mesh.size()
        if parameter.placements[0].is_shard(0) and len(parameter) % ranks:
            raise ValueError(
                f"the {len(parameter)} rows of {name} cannot be divided by {ranks} ranks: "
                "pad them, or divide its columns"
            )


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


def _recomputed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward = type(module).forward
    return checkpoint(forward, module, *args, use_reentrant=False, **kwargs)


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
    # The base classes count too: fully_shard makes a class of its own.
    kinds = type(module).__mro__
    return any(kind in rule or kind.__name__ in rule for kind in kinds)


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


def on_meta(model: nn.Module, recurse: bool = True) -> bool:
    """Whether a tensor of a model, or only of the module itself, is on the meta device."""
    return any(tensor.is_meta for tensor in _tensors(model, recurse))


def _tensors(module: nn.Module, recurse: bool = False) -> list[Tensor]:
    return [*module.parameters(recurse), *module.buffers(recurse)]


@torch.no_grad()
def _initialise(model: nn.Module, offload: bool) -> None:
    """Give memory and values to what is on the meta device. A collective."""
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
            # torch's attention has it under the second name.
            reset = getattr(module, "_reset_parameters", lambda: None)
            getattr(module, "reset_parameters", reset)()
        getattr(model, "init_weights", lambda: None)()
    wholes.put_back()
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)
        buffer.data = buffer.to(device)
    forgotten = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor in wholes.untouched:
            forgotten.append(name)
    if forgotten:
        raise ValueError(
            "reset_parameters() of a module or init_weights() of the model must give values "
            f"to what is on the meta device: {forgotten}"
        )


class _Wholes(TorchDispatchMode):
    """Shows an operation whole tensors in place of sharded ones. Collective.

    So an initialiser may do anything to a tensor, and draws what it draws in one process.
    DTensor itself loses what is written to a part of one, and draws other numbers: on the
    CPU the same ones for each shard.
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
            return func(*args)  # which shares the memory of a shard
        sharded = [leaf for leaf in leaves if is_sharded(leaf)]
        if not self.wholes.keys() >= set(sharded):
            self.put_back()
            # Where a rank has all of it, full_tensor gives the shard itself.
            self.wholes = {tensor: full_tensor(tensor).clone() for tensor in sharded}
        args, kwargs = tree_map_only(
            Tensor, lambda tensor: self.wholes.get(tensor, tensor), given
        )
        return func(*args, **kwargs)

    def put_back(self) -> None:
        """Give each rank its shards."""
        for sharded, whole in self.wholes.items():
            sharded.copy_(shard_like(whole, sharded))
            # A part of it that is changed from now on would be lost.
            torch._C._set_throw_on_mutable_data_ptr(whole)
        self.wholes = {}
