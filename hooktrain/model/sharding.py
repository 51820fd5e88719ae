"""A model sharded over ranks by torch's ``fully_shard`` (FSDP2), and its state as a whole.

Each rank holds a part of every parameter, of its gradient and of the optimizer's state. What is
needed of a layer is brought together right before it computes. Names stay as they are.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.utils.checkpoint import checkpoint

from hooktrain.utils import comm
from hooktrain.utils.dtensor import full_tensors, load_full_state_dict
from hooktrain.utils.registry import did_you_mean

__all__ = [
    "WrapRule",
    "apply_activation_checkpointing",
    "build_mp_policy",
    "full_state_dict",
    "load_full_state_dict",
    "select_modules",
    "shard_model",
    "tied_parameters",
]

WrapRule: TypeAlias = Collection[type[nn.Module] | str] | Callable[[str, nn.Module], bool]
"""Which modules of a model: those of some classes, given as classes or by their bare names, or
those for which ``rule(name, module)``."""


def shard_model(
    model: nn.Module,
    *,
    wrap: WrapRule = (),
    mp_policy: MixedPrecisionPolicy | Mapping[str, Any] | None = None,
    offload: bool = False,
    activation_checkpointing: bool | WrapRule = False,
    reshard_after_forward: bool = True,
    mesh: DeviceMesh | None = None,
) -> nn.Module:
    """Shard a model in place; the parameters become DTensors, so make the optimizer afterwards.

    Every rank must hold the same values, or the model be on the meta device (see
    :func:`~hooktrain.model.deferred.init_deferred`). Call the model itself, not its ``forward``; a
    model whose step calls its children instead wants each of these in ``wrap``. Buffers are not
    sharded, and the ranks do not exchange them.

    Args:
        model: the model.
        wrap: the modules that are brought together one at a time, such as the blocks of a
            transformer; what remains is one more unit. With none, the whole model is one.
        mp_policy: the precision to compute and to communicate in; a dict is its arguments, with
            names for data types: ``{"param_dtype": "bfloat16", "reduce_dtype": "float32"}``.
        offload: keep parameters, gradients and the optimizer's state in the CPU's memory.
        activation_checkpointing: the modules whose activations are computed again in the backward
            pass; True means those of ``wrap``.
        reshard_after_forward: free a unit's parameters after its forward pass and bring them
            together again for the backward one. False takes more memory and communicates less.
        mesh: the ranks, in one dimension, or in two to shard over the second and replicate over
            the first. None is all ranks, on the kind of device that the parameters are on; of a
            model on the meta device the accelerator, where there is one.

    Returns:
        The model.

    Raises:
        RuntimeError: without a process group.
        ValueError: for a rule that matches nothing or that tears apart a shared parameter, or an
            unknown option of ``mp_policy``.
        TypeError: for a rule or policy of another kind.
    """
    if not dist.is_initialized():
        raise RuntimeError("a model is sharded over ranks: initialise the process group first")
    units = select_modules(model, wrap, "wrap")
    options: dict[str, Any] = {
        "mesh": mesh or init_device_mesh(_device_type(model), (comm.get_world_size(),)),
        "mp_policy": build_mp_policy(mp_policy),
        # torch keeps the rest's parameters after the forward pass: the backward one begins there.
        "reshard_after_forward": None if reshard_after_forward else False,
    }
    pinned = options["mesh"].device_type != "cpu"
    options["offload_policy"] = CPUOffloadPolicy(pinned) if offload else OffloadPolicy()
    if activation_checkpointing is not False:
        rule = wrap if activation_checkpointing is True else activation_checkpointing
        apply_activation_checkpointing(model, rule)
    tied = tied_parameters(model)
    for unit in reversed(units):  # the inner ones first
        fully_shard(unit, **options)
    fully_shard(model, **options)
    if torn := tied - tied_parameters(model):
        raise ValueError(
            f"wrap puts a shared parameter into several units, where it would be several ones: "
            f"{sorted(map(sorted, torn))}; leave these modules to the rest of the model"
        )
    return model


def select_modules(model: nn.Module, rule: WrapRule, argument: str = "rule") -> list[nn.Module]:
    """The modules inside of a model that a rule means, outer ones before inner ones.

    Args:
        model: the model, which is not meant itself.
        rule: classes or names of classes, or a function of full name and module.
        argument: its name in error messages.

    Raises:
        TypeError: if ``rule`` is neither.
        ValueError: if it means no module at all; an empty collection may.
    """
    inner = [(name, module) for name, module in model.named_modules() if module is not model]
    if callable(rule) and not isinstance(rule, type):
        chosen = [module for name, module in inner if rule(name, module)]
    else:
        classes = () if isinstance(rule, str | type) else tuple(rule)
        if isinstance(rule, str | type) or not all(isinstance(c, str | type) for c in classes):
            raise TypeError(
                f"{argument} must be a collection of module classes, or a function of a module's "
                f"name and the module, but got {rule!r}"
            )
        chosen = [m for _, m in inner if any(_is_of(m, c) for c in classes)]
        if not classes:
            return []
    if not chosen:
        there = ", ".join(sorted({type(module).__name__ for _, module in inner}))
        raise ValueError(
            f"{argument}={rule!r} means no module of {type(model).__name__}, which has {there}"
        )
    return chosen


def _is_of(module: nn.Module, kind: type[nn.Module] | str) -> bool:
    return type(module).__name__ == kind if isinstance(kind, str) else isinstance(module, kind)


def apply_activation_checkpointing(model: nn.Module, rule: WrapRule) -> None:
    """Let modules keep their inputs only, and compute again what the backward pass needs.

    By :func:`torch.utils.checkpoint.checkpoint`, around the ``forward`` of each: modules and names
    stay as they are. Dropout draws the same numbers again.

    Args:
        model: changed in place. If it is to be sharded, call this first.
        rule: the modules, none of them inside of another.
    """
    for module in select_modules(model, rule, "activation_checkpointing"):
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)


def build_mp_policy(
    policy: MixedPrecisionPolicy | Mapping[str, Any] | None,
) -> MixedPrecisionPolicy:
    """A policy of mixed precision; None computes in the precision of the parameters.

    Raises:
        TypeError: if it is neither policy, dict nor None.
        ValueError: for an unknown option or data type.
    """
    if policy is None or isinstance(policy, MixedPrecisionPolicy):
        return policy or MixedPrecisionPolicy()
    if not isinstance(policy, Mapping):
        raise TypeError(f"mp_policy must be a MixedPrecisionPolicy or a dict, but got {policy!r}")
    known = [field.name for field in fields(MixedPrecisionPolicy)]
    options = dict(policy)
    for key, value in options.items():
        if key not in known:
            raise ValueError(f"mp_policy has no option {key!r}{did_you_mean(key, known)}")
        if isinstance(value, str):
            options[key] = getattr(torch, value, None)
            if not isinstance(options[key], torch.dtype):
                raise ValueError(f"mp_policy[{key!r}] must be a torch data type, but got {value!r}")
    return MixedPrecisionPolicy(**options)


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state of a model as one process would have it: loads without any sharding. Collective.

    Returns:
        On the main process the state, with what is sharded put together on the CPU. On the others
        an empty dict, so that the model is in the memory of one process only.
    """
    state: dict[str, Any] = full_tensors(model.state_dict())
    return state if comm.is_main_process() else {}


def tied_parameters(model: nn.Module) -> set[frozenset[str]]:
    """The names of each parameter that has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return {frozenset(group) for group in names.values() if len(group) > 1}


def _device_type(model: nn.Module) -> str:
    device = next((p.device for p in model.parameters() if not p.is_meta), None)
    if device is None and torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
    return "cpu" if device is None else device.type
