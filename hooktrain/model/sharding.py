"""A model sharded over ranks by torch's ``fully_shard`` (FSDP2), and its state as a whole.

Each rank holds a part of every parameter, of its gradient and of the optimizer's state. A layer's
parameters are brought together right before it computes. Names stay as they are.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from hooktrain.utils import comm
from hooktrain.utils.tensors import (
    full_tensor,
    full_tensors,
    is_sharded,
    local_tensor,
    shard_like,
)

if TYPE_CHECKING:  # it is heavy, and few runs need it
    from torch.distributed.fsdp import MixedPrecisionPolicy

# A policy of mixed precision, or its arguments, in which data types may be names.
Precision: TypeAlias = "MixedPrecisionPolicy | Mapping[str, Any] | None"
# Which modules of a model: those of some classes, given as classes or by their bare names, or those
# for which ``rule(name, module)``.
WrapRule: TypeAlias = (
    Collection[type[nn.Module] | str] | Callable[[str, nn.Module], bool]
)


def shard_model(
    model: nn.Module,
    *,
    wrap: WrapRule = (),
    mp_policy: Precision = None,
    offload: bool = False,
    activation_checkpointing: bool | WrapRule = False,
    reshard_after_forward: bool = True,
    mesh: DeviceMesh | None = None,
) -> nn.Module:
    """Shard a model in place; the parameters become DTensors, so make the optimizer afterwards.

    Initialise the process group first. Every rank must hold the same values, or the model is on
    the meta device (see :func:`init_deferred`). Call the model itself, not its ``forward``. If its
    step calls its children instead, name each of these in ``wrap``. Buffers are not sharded, and
    the ranks do not exchange them.

    Args:
        model: the model.
        wrap: the modules whose parameters are brought together one module at a time, such as the
            blocks of a transformer. The rest is one more unit. With none, the whole model is one.
        mp_policy: the precision to compute and to communicate in; a dict is its arguments, with
            names for data types: ``{"param_dtype": "bfloat16", "reduce_dtype": "float32"}``.
        offload: keep parameters, gradients and the optimizer's state in the CPU's memory.
        activation_checkpointing: the modules whose activations are computed again in the backward
            pass; True means those of ``wrap``.
        reshard_after_forward: free a unit's parameters after its forward pass and bring them
            together again for the backward one. False takes more memory and communicates less.
        mesh: the ranks, in one dimension, or in two to shard over the second and replicate over
            the first. None is all ranks, on the accelerator, or on the CPU if there is none.

    Returns:
        The model.

    Raises:
        ValueError: for a rule that matches nothing or that tears apart a shared parameter.
        TypeError: for a rule of another kind, or an unknown option of ``mp_policy``.
        AttributeError: for an unknown data type in ``mp_policy``.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    units = select_modules(model, wrap, "wrap")
    pinned = torch.accelerator.is_available()
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": build_mp_policy(mp_policy),
        # torch keeps the rest's parameters after the forward pass: the backward one begins there.
        "reshard_after_forward": None if reshard_after_forward else False,
        "offload_policy": CPUOffloadPolicy(pinned) if offload else OffloadPolicy(),
    }
    if activation_checkpointing is not False:
        rule = wrap if activation_checkpointing is True else activation_checkpointing
        # Around each `forward`, so that modules and names stay as they are.
        for module in select_modules(model, rule, "activation_checkpointing"):
            module.forward = functools.partial(
                checkpoint, module.forward, use_reentrant=False
            )
    tied = _tied(model)
    for unit in reversed(units):  # the inner ones first
        fully_shard(unit, **options)
    fully_shard(model, **options)
    _check_tied(
        model,
        tied,
        "leave the modules of wrap that share them to the rest of the model",
    )
    return model


def select_modules(
    model: nn.Module, rule: WrapRule, argument: str = "rule"
) -> list[nn.Module]:
    """The modules inside a model that a rule selects, outer ones before inner ones.

    Args:
        model: is never selected itself.
        rule: classes or names of classes, or a function of full name and module.
        argument: its name in error messages.

    Raises:
        TypeError: if ``rule`` is a single class or name.
        ValueError: if it selects no module; an empty collection may.
    """
    if isinstance(rule, str | type):
        raise TypeError(
            f"{argument} must be a collection of classes or a function, not {rule!r}"
        )
    inner = list(model.named_modules())[1:]
    if callable(rule):
        chosen = [module for name, module in inner if rule(name, module)]
    else:
        classes = tuple(kind for kind in rule if isinstance(kind, type))
        chosen = [
            m for _, m in inner if isinstance(m, classes) or type(m).__name__ in rule
        ]
    if not chosen and (callable(rule) or rule):
        there = sorted({type(module).__name__ for _, module in inner})
        raise ValueError(
            f"{argument}={rule!r} selects none of the model's modules: {there}"
        )
    return chosen


def build_mp_policy(policy: Precision) -> "MixedPrecisionPolicy":
    """A policy of mixed precision; None computes in the precision of the parameters.

    Args:
        policy: the policy; or its arguments, in which data types may be names.

    Raises:
        TypeError: for an unknown option.
        AttributeError: for an unknown data type.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    options = (policy or {}).items()
    typed = {
        k: getattr(torch, value) if isinstance(value, str) else value
        for k, value in options
    }
    return MixedPrecisionPolicy(**typed)


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state of a model as one process would have it: loads without any sharding. Collective.

    Returns:
        On the main process the state, with what is sharded put together on the CPU. On the others
        an empty dict, so that the model is in the memory of one process only.
    """
    state: dict[str, Any] = full_tensors(model.state_dict())
    return state if comm.is_main_process() else {}


@torch.no_grad()
def init_deferred(model: nn.Module, device: torch.device | str) -> None:
    """Give memory and values to a model that was built on the meta device.

    So a model that is too large for one process is built, sharded, and only then initialised::

        with torch.device("meta"):
            model = Transformer()
        shard_model(model, wrap={Block})
        init_deferred(model, "cuda")

    As when a model is constructed, each module's ``reset_parameters`` is called, children before
    their parent and in the order in which they are registered; then ``init_weights`` of the
    outermost modules that have it. While a module's method runs, each rank has the module as a
    whole in its memory; afterwards each rank keeps its shard of the main process's values. So the
    values depend on the seed, the device and the model, and not on the number of ranks. A single
    process that constructs the model on that device after the same seed gets the same ones, if
    constructors draw in the order above.

    Args:
        model: all of it on the meta device; sharded or not.
        device: for its memory; that of the ranks' mesh, or the CPU for a model that is offloaded.

    Raises:
        ValueError: if a part of the model is not on the meta device, a parameter or buffer is given
            no value by these methods, or shared parameters would come apart.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if real := sorted(name for name, tensor in tensors.items() if not tensor.is_meta):
        raise ValueError(
            f"the model must be built on the meta device, but these are not: {real}"
        )
    tied = _tied(model)
    model.to_empty(device=device)
    _check_tied(model, tied, "shard the model first, or build it on its device")
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for tensor in tensors.values():
        local_tensor(tensor).fill_(float("nan") if tensor.is_floating_point() else 0)
    model.apply(_reset)
    _init_outermost(model)
    # A host-device synchronisation for each tensor, once in a run.
    has_nan = [
        name for name, tensor in tensors.items() if local_tensor(tensor).isnan().any()
    ]
    unset = set().union(*comm.all_gather(has_nan))
    if unset:
        raise ValueError(
            f"no reset_parameters() or init_weights() initialises {sorted(unset)}"
        )


def _reset(module: nn.Module) -> None:
    for name in (
        "reset_parameters",
        "_reset_parameters",
    ):  # the latter in torch's attention
        if hasattr(module, name):
            _call_whole(module, name)
            return


def _init_outermost(module: nn.Module) -> None:
    if hasattr(module, "init_weights"):
        _call_whole(module, "init_weights")
        module.is_init = True  # type: ignore[assignment]
        return
    for child in module.children():
        _init_outermost(child)


def _call_whole(module: nn.Module, method: str) -> None:
    """Call a method of a module that has whole parameters meanwhile, and shards again at the end.

    torch draws random numbers for shards on accelerators only, and others than for the whole.
    """
    places: list[tuple[dict[str, Any], str, Any]] = [
        (inner._parameters, name, parameter)
        for inner in module.modules()
        for name, parameter in inner._parameters.items()
        if is_sharded(parameter)
    ]
    wholes = {p: nn.Parameter(full_tensor(p), p.requires_grad) for _, _, p in places}
    for parameters, name, parameter in places:
        parameters[name] = wholes[parameter]
    getattr(module, method)()
    for parameters, name, parameter in places:
        local_tensor(parameter).copy_(
            local_tensor(shard_like(parameters[name], parameter))
        )
        parameters[name] = parameter


def _tied(model: nn.Module) -> set[frozenset[str]]:
    """The names of each parameter that has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return {frozenset(group) for group in names.values() if len(group) > 1}


def _check_tied(model: nn.Module, tied: set[frozenset[str]], advice: str) -> None:
    if torn := tied - _tied(model):
        raise ValueError(
            f"{sorted(map(sorted, torn))} are shared and would come apart: {advice}"
        )
