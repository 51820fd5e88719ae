"""The state of an optimizer by the names of its parameters, and how it is loaded.

torch saves and loads by position. Where layers were added, removed, frozen or given
another group, positions mean other parameters; names do not.
"""

import logging
from collections.abc import Mapping, Sequence
from statistics import mode
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hooktrain.solver.param_groups import ParamGroup, settings_of, walk_parameters
from hooktrain.utils.tensors import shard_like

logger = logging.getLogger(__name__)

State = Mapping[str, Any]
Names = Mapping[Tensor, str]
# The number of a parameter's group, and the parameter itself, or the key of its state in
# a saved optimizer.
Entry = tuple[int, Any]
Entries = dict[str, Entry]  # by name

# They choose a kernel, not what it computes: a matter of the device, so they stay.
KERNEL_SETTINGS = ("foreach", "fused", "capturable")
WITHOUT_OPTIMIZER = (
    "resume without the optimizer (train.resume_parts, or checkpointables=[...])"
)


def parameter_names(model: nn.Module) -> dict[Tensor, str]:
    """The name of each parameter of a model, without what wrappers add to it."""
    return {parameter: names[0] for names, _, parameter in walk_parameters(model)}


def optimizer_state_dict(optimizer: Optimizer, names: Names) -> dict[str, Any]:
    """The state that torch gives, with names where torch has positions of parameters.

    ``{"kind": "SGD", "state": {name: {...}}, "param_groups": [{..., "params": [names]}]}``.
    torch's own ``load_state_dict`` takes it too.

    Args:
        optimizer: its tensors are not copied.
        names: of :func:`parameter_names`. Where a parameter is not in it, the state has
            positions.
    """
    state = {"kind": _kind(optimizer), **optimizer.state_dict()}
    entries = _entries(optimizer.param_groups)
    if not _are_named(entries, names):
        return state
    name_at = {
        position: names[parameter] for position, (_, parameter) in enumerate(entries)
    }
    # Some optimizers keep more than states of parameters, under keys of their own.
    by_name = {name_at.get(key, key): item for key, item in state["state"].items()}
    for group in state["param_groups"]:
        group["params"] = [name_at[position] for position in group["params"]]
    return {**state, "state": by_name}


def match_parameters(
    optimizer: Optimizer, state_dict: State, known: Names
) -> tuple[Entries, Entries]:
    """The parameters here and the saved ones, by names that both sides share.

    Args:
        optimizer: it is not changed.
        state_dict: what :func:`load_optimizer_state` is to load.
        known: the names of :func:`parameter_names`.

    Raises:
        ValueError: if that would refuse it.
    """
    kind = _kind(optimizer)
    saved_kind = state_dict.get("kind", kind)
    if saved_kind != kind:
        raise ValueError(
            f"the state is that of {saved_kind}, and this is {kind}: {WITHOUT_OPTIMIZER}"
        )
    groups = optimizer.param_groups
    saved_groups = state_dict["param_groups"]
    entries = _entries(groups)
    saved_entries = _entries(saved_groups)
    names = [
        known.get(parameter, f"#{position}")
        for position, (_, parameter) in enumerate(entries)
    ]
    saved_names = [key for _, key in saved_entries]
    if not _are_named(entries + saved_entries, known):
        saved_names = _names_of_positions(names, groups, saved_groups, known)
    here = dict(zip(names, entries, strict=True))
    saved = dict(zip(saved_names, saved_entries, strict=True))
    if here and here.keys().isdisjoint(saved):
        raise ValueError(
            f"the state of {[*saved][:3]}, ... has none of {[*here][:3]}: {WITHOUT_OPTIMIZER}"
        )
    return here, saved


def load_optimizer_state(optimizer: Optimizer, state_dict: State, names: Names) -> None:
    """Load what :func:`optimizer_state_dict` or a torch optimizer gave.

    The state of a parameter (momentum, Adam's moments and step) goes to the parameter of
    the same name and shape, in whichever group it is now. The settings of a group
    (``lr``, ``initial_lr``, ``betas``, ...) come from the saved group that most of its
    parameters were in. Warnings tell what differs. Where one side has no names, groups of
    the same sizes match by position.

    Of a full tensor a sharded parameter takes the shard of this rank.

    Args:
        optimizer: changed in place.
        state_dict: of an optimizer of the same kind. It is not changed.
        names: see :func:`optimizer_state_dict`.

    Raises:
        KeyError: if ``state`` or ``param_groups`` is missing.
        ValueError: if the state is that of another kind of optimizer, groups of other
            sizes have no names, or no name is on both sides.
    """
    here, saved = match_parameters(optimizer, state_dict, names)
    state = _fitting_states(optimizer, state_dict["state"], here, saved)
    groups = []
    changes: list[str] = []
    for number, group in enumerate(optimizer.param_groups):
        members = [name for name, (own, _) in here.items() if own == number]
        origins = [saved[name][0] for name in members if name in saved]
        settings = settings_of(group)
        if origins:
            origin = state_dict["param_groups"][mode(origins)]
            settings = _settings(settings, settings_of(origin), changes)
        groups.append({**settings, "params": members})
    if changes:
        logger.warning(
            "The optimizer's settings are those of the checkpoint: %s. For your lr resume without "
            "the hooks, as in docs/guide.md; for other settings of yours %s",
            ", ".join(dict.fromkeys(changes)),
            WITHOUT_OPTIMIZER,
        )
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def without_schedules(state: State) -> dict[str, Any]:
    """An optimizer's state, or several by name, without ``lr`` and other scheduled settings.

    Loaded, it leaves these as they are.
    """
    if "param_groups" not in state:
        return {name: without_schedules(one) for name, one in state.items()}
    groups = []
    for group in state["param_groups"]:
        kept = dict(group)
        kept.pop("lr", None)  # it may have been set without a schedule
        for key in group:
            if key.startswith("initial_"):
                del kept[key]
                kept.pop(key.removeprefix("initial_"), None)
        groups.append(kept)
    return {**state, "param_groups": groups}


def _kind(optimizer: Optimizer) -> str:
    """The name of torch's optimizer that it is or extends, else that of its class."""
    for kind in type(optimizer).__mro__:
        if kind.__module__.startswith("torch.optim") and kind is not Optimizer:
            return kind.__name__
    return type(optimizer).__name__


def _entries(groups: Sequence[ParamGroup]) -> list[Entry]:
    """All parameters in order."""
    return [
        (number, item)
        for number, group in enumerate(groups)
        for item in group["params"]
    ]


def _are_named(entries: Sequence[Entry], known: Names) -> bool:
    """Whether all parameters are known, and all keys of saved ones are names."""
    return all(isinstance(item, str) or item in known for _, item in entries)


def _names_of_positions(
    here: list[str],
    groups: Sequence[ParamGroup],
    saved_groups: Sequence[ParamGroup],
    known: Names,
) -> list[str]:
    """The names of saved parameters where one side has none."""
    sizes = [len(group["params"]) for group in groups]
    saved_sizes = [len(group["params"]) for group in saved_groups]
    if sizes == saved_sizes:
        return here
    # MMEngine's rules, and detectron2 of old, make a group for each parameter, in order.
    in_order = [name for name in known.values() if name in here]
    if saved_sizes == [1] * len(in_order):
        return in_order
    raise ValueError(
        "the optimizer or the saved state has no names of parameters, and the saved "
        f"groups have the sizes {saved_sizes}, not {sizes}: {WITHOUT_OPTIMIZER}"
    )


def _fitting_states(
    optimizer: Optimizer, states: Mapping[Any, Any], here: Entries, saved: Entries
) -> dict[Any, Any]:
    """The saved states by the names here, without those that do not fit."""
    fitting = dict(states)
    left_over = []
    reshaped = []
    for name, (_, key) in saved.items():
        state = fitting.pop(key, {})
        if name not in here:
            left_over.append(name)
            continue
        _, parameter = here[name]
        shape = _shape_of(optimizer, state)
        if shape not in (None, tuple(parameter.shape)):
            reshaped.append(f"{name} {shape}")
        elif state:
            fitting[name] = {
                entry: _like(parameter, value) for entry, value in state.items()
            }
    differences = {
        "has state of parameters that are not here": left_over,
        "has no state of": [name for name in here if name not in saved],
        "has state of other shapes, which is not loaded": reshaped,
    }
    for text, names in differences.items():
        if names:
            logger.warning(
                "The optimizer's checkpoint %s: %d, %s", text, len(names), names[:10]
            )
    return fitting


def _shape_of(optimizer: Optimizer, state: State) -> tuple[int, ...] | None:
    """The shape of the parameter that a state is of, if torch's optimizers know it."""
    if not hasattr(torch.optim, _kind(optimizer)):
        return None  # other optimizers may keep what they like
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    # An optimizer that extends torch's may keep less, such as a number for each row.
    ndim = max((tensor.ndim for tensor in tensors), default=0)
    shapes = [tensor.shape for tensor in tensors if tensor.ndim == ndim]
    # Adafactor's means of rows and of columns have size 1 in the other dimension.
    return tuple(max(sizes) for sizes in zip(*shapes, strict=True)) or None


def _like(parameter: Tensor, value: Any) -> Any:
    """The value, sharded and laid out in memory like its parameter, as fused kernels expect."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    value = shard_like(value, parameter)
    if value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _settings(ours: ParamGroup, saved: ParamGroup, changes: list[str]) -> ParamGroup:
    """The settings of a group: the saved ones where there are any. Notes what that changes."""
    kernel = {key: ours[key] for key in KERNEL_SETTINGS if key in ours}
    used = {**ours, **saved, **kernel}
    configured = dict(ours)
    if "initial_lr" in saved:
        # A schedule moves lr all the time; initial_lr is what the configuration said.
        configured.setdefault("initial_lr", configured.pop("lr"))
    for key, value in configured.items():
        if used[key] != value:
            changes.append(f"{key} is {used[key]}, not {value}")
    return used
