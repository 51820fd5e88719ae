"""The state of an optimizer by the names of its parameters, and how it is loaded.

torch saves and loads by position. Where layers were added, removed, frozen or given
another group, positions mean other parameters; names do not.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.optim import Optimizer

from hooktrain.solver.param_groups import ParamGroup, settings_of, walk_parameters
from hooktrain.utils.tensors import shard_like

logger = logging.getLogger(__name__)

State = Mapping[str, Any]
Names = Mapping[Tensor, str]
# By name: the number of a parameter's group, and the parameter itself, or the key of its
# state in a saved optimizer.
Entries = dict[str, tuple[int, Any]]
# Of a table: a parameter or group, what differs, the saved value, and the one here.
Row = tuple[str, str, Any, Any]

# They choose a kernel, not what it computes: a matter of the device, so they stay.
KERNEL_SETTINGS = ("foreach", "fused", "capturable")
WAY_OUT = "resume without the optimizer (train.resume_parts, or checkpointables=[...])"


def parameter_names(model: nn.Module) -> dict[Tensor, str]:
    """The name of each parameter of a model, without what wrappers add to it."""
    names: dict[Tensor, str] = {}
    for names_of_one, _, parameter in walk_parameters(model):
        names[parameter] = names_of_one[0]
    return names


def optimizer_state_dict(
    optimizer: Optimizer,
    names: Names | None = None,
) -> dict[str, Any]:
    """The state that torch gives, with names where torch has positions of parameters.

    ``{"kind": "SGD", "state": {name: {...}}, "param_groups": [{..., "params": [names]}]}``.
    torch's own ``load_state_dict`` takes it too.

    Args:
        optimizer: its tensors are not copied.
        names: of :func:`parameter_names`. A parameter that is not in it has its name in
            ``param_names`` of its group. Where some have no name, or two have the same,
            the state has positions.
    """
    state = {"kind": _kind(optimizer), **optimizer.state_dict()}
    entries = _by_name(optimizer.param_groups, names or {})
    if entries is None:
        return state
    name_of: dict[Any, str] = {}
    in_order = iter(entries)
    groups = []
    for group in state["param_groups"]:
        members = list(islice(in_order, len(group["params"])))
        name_of |= zip(group["params"], members, strict=True)
        groups.append({**settings_of(group), "params": members})
    named = {name_of.get(key, key): item for key, item in state["state"].items()}
    return {**state, "state": named, "param_groups": groups}


def check_optimizer_state(
    optimizer: Optimizer,
    state_dict: State,
    names: Names | None = None,
) -> None:
    """Refuse what :func:`load_optimizer_state` would refuse, and change nothing."""
    _matched(optimizer, state_dict, names or {})


def load_optimizer_state(
    optimizer: Optimizer,
    state_dict: State,
    names: Names | None = None,
) -> None:
    """Load what :func:`optimizer_state_dict` or a torch optimizer gave.

    The state of a parameter (momentum, Adam's moments and step) goes to the parameter of
    the same name and shape, in whichever group it is now. The settings of a group
    (``lr``, ``initial_lr``, ``betas``, ...) come from the saved group that most of its
    parameters were in. A warning tells in a table what differs. Where one side has no
    names, groups of the same sizes match by position.

    For sharded parameters full tensors are split, which is collective.

    Args:
        optimizer: changed in place.
        state_dict: of an optimizer of the same kind. It is not changed.
        names: see :func:`optimizer_state_dict`.

    Raises:
        KeyError: if ``state`` or ``param_groups`` is missing.
        ValueError: if the state is that of another kind of optimizer, groups of other
            sizes have no names, or no name is on both sides.
    """
    here, saved = _matched(optimizer, state_dict, names or {})
    rows: list[Row] = []
    state = _fitting_states(optimizer, state_dict["state"], here, saved, rows)
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        members = [name for name, entry in here.items() if entry[0] == number]
        origins = sorted(saved[name][0] for name in members if name in saved)
        saved_settings: ParamGroup = {}
        if origins:
            [(origin, _)] = Counter(origins).most_common(1)
            saved_settings = settings_of(state_dict["param_groups"][origin])
        settings = _settings(number, group, saved_settings, rows)
        groups.append({**settings, "params": members})
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    if rows:
        headers = ["", "difference", "checkpoint (used)", "here"]
        table = tabulate(rows, headers, "pipe", disable_numparse=True)
        logger.warning("The optimizer is not as in the checkpoint:\n%s", table)


def without_schedules(state: State) -> dict[str, Any]:
    """An optimizer's state, or several by name, without the settings that were scheduled.

    Loaded, it leaves these (``lr`` for most) as they are.
    """
    if "param_groups" not in state:
        return {name: without_schedules(one) for name, one in state.items()}
    groups = []
    for group in state["param_groups"]:
        scheduled = {key for key in group if key.startswith("initial_")}
        scheduled |= {key.removeprefix("initial_") for key in scheduled}
        if "momentum" in scheduled:
            scheduled.add("betas")
        kept = {key: value for key, value in group.items() if key not in scheduled}
        groups.append(kept)
    return {**state, "param_groups": groups}


def _kind(optimizer: Optimizer) -> str:
    """The name of torch's optimizer that it is or extends, else that of its class."""
    for kind in type(optimizer).__mro__:
        if kind.__module__.startswith("torch.optim") and kind is not Optimizer:
            return kind.__name__
    return type(optimizer).__name__


def _by_name(groups: Sequence[ParamGroup], known: Names) -> Entries | None:
    """All parameters by their names; None unless each has one for itself."""
    entries: dict[Any, Any] = {}
    count = 0
    for number, group in enumerate(groups):
        own_names: Any = group.get("param_names", group["params"])
        for item, name in zip(group["params"], own_names, strict=True):
            entries[known.get(item, name)] = (number, item)
            count += 1
    is_named = all(isinstance(name, str) for name in entries)
    return entries if is_named and len(entries) == count else None


def _by_position(groups: Sequence[ParamGroup]) -> Entries:
    entries: Entries = {}
    for number, group in enumerate(groups):
        for item in group["params"]:
            entries[f"#{len(entries)}"] = (number, item)
    return entries


def _matched(
    optimizer: Optimizer,
    state_dict: State,
    known: Names,
) -> tuple[Entries, Entries]:
    """The parameters here and the saved ones, by names that both sides share."""
    kind = _kind(optimizer)
    saved_kind = state_dict.get("kind", kind)
    if saved_kind != kind:
        raise ValueError(
            f"the state is that of {saved_kind}, and this is {kind}: {WAY_OUT}"
        )
    groups = optimizer.param_groups
    saved_groups = state_dict["param_groups"]
    here = _by_name(groups, known)
    saved = _by_name(saved_groups, {})
    if here is None or saved is None:
        here = here or _by_position(groups)
        names = _names_of_positions(here, groups, saved_groups, known)
        saved = _by_position(saved_groups)
        saved = dict(zip(names, saved.values(), strict=True))
    if here and here.keys().isdisjoint(saved):
        ours = [*here][:3]
        theirs = [*saved][:3]
        raise ValueError(f"the state of {theirs}, ... has none of {ours}: {WAY_OUT}")
    return here, saved


def _names_of_positions(
    here: Entries,
    groups: Sequence[ParamGroup],
    saved_groups: Sequence[ParamGroup],
    known: Names,
) -> list[str]:
    """The names of saved parameters where one side has none."""
    sizes = [len(group["params"]) for group in groups]
    saved_sizes = [len(group["params"]) for group in saved_groups]
    if sizes == saved_sizes:
        return [*here]
    # MMEngine's rules make a group for each parameter, in the model's order.
    in_order = [name for name in known.values() if name in here]
    if saved_sizes == [1] * len(in_order):
        return in_order
    raise ValueError(
        "the optimizer or the saved state has no names of parameters, and the saved "
        f"groups have the sizes {saved_sizes}, not {sizes}: {WAY_OUT}"
    )


def _fitting_states(
    optimizer: Optimizer,
    states: Mapping[Any, Any],
    here: Entries,
    saved: Entries,
    rows: list[Row],
) -> dict[Any, Any]:
    """The saved states by the names here; ``rows`` tell of those that do not fit."""
    fitting = dict(states)
    for name, (_, key) in saved.items():
        fitting.pop(key, None)
        if name not in here:
            rows.append((name, "missing", "dropped", "-"))
    for name, (_, parameter) in here.items():
        if name not in saved:
            rows.append((name, "new", "-", "no state"))
            continue
        state = states.get(saved[name][1], {})
        ours = tuple(parameter.shape)
        theirs = _shape_of(optimizer, state)
        if theirs not in (None, ours):
            rows.append((name, "reshaped", f"{theirs}, dropped", ours))
        elif state:
            fitting[name] = {k: _like(parameter, v) for k, v in state.items()}
    return fitting


def _shape_of(optimizer: Optimizer, state: State) -> tuple[int, ...] | None:
    """The shape of the parameter that a state is of, if torch's optimizers know it."""
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    shapes = [tensor.shape for tensor in tensors if tensor.ndim > 0]
    is_torchs = hasattr(torch.optim, _kind(optimizer))
    if not shapes or not is_torchs:
        return None  # other optimizers may keep what they like
    # Adafactor's means of rows and of columns have size 1 in the other dimension.
    return tuple(max(sizes) for sizes in zip(*shapes, strict=False))


def _like(parameter: Tensor, value: Any) -> Any:
    """Sharded, and in memory as its parameter, which fused kernels take for granted."""
    if not isinstance(value, Tensor):
        return value
    value = shard_like(value, parameter)
    if value.shape != parameter.shape or value.stride() == parameter.stride():
        return value
    turned = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
    return turned.copy_(value)


def _settings(
    number: int,
    group: ParamGroup,
    saved: ParamGroup,
    rows: list[Row],
) -> ParamGroup:
    """The settings to use; ``rows`` tell which saved ones overrule the configured."""
    ours = settings_of(group)
    used = {**ours, **saved}
    for key in KERNEL_SETTINGS:
        if key in ours:
            used[key] = ours[key]
    if "initial_lr" in saved and "lr" in ours:
        # A schedule moves lr all the time; initial_lr is what the configuration said.
        ours["initial_lr"] = ours.pop("lr")
    for key, value in ours.items():
        if used[key] != value:
            rows.append((f"group {number}", key, used[key], value))
    return used
