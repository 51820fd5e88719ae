"""The state of an optimizer by the names of its parameters, and how it gets into another one.

torch saves and loads by position. Where layers were added, removed, frozen or given another
group, positions mean other parameters; names do not.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.optim import Optimizer

from hooktrain.solver.param_groups import WRAPPER_PARTS, settings_of, walk_parameters
from hooktrain.utils.tensors import shard_like

logger = logging.getLogger(__name__)

ParamGroups = Sequence[Mapping[str, Any]]
Names = Mapping[Tensor, str]
# By name: the number of a parameter's group, and the parameter, or its state in a saved optimizer.
Places = dict[str, tuple[int, Any]]

# They choose a kernel, not what it computes: a matter of the device, so they stay as built.
_KERNELS = ("foreach", "fused", "capturable")
_WAY_OUT = "resume without the optimizer (train.resume_parts, or checkpointables=[...])"


def parameter_names(model: nn.Module) -> Names:
    """The name of each parameter of a model, without what wrappers add to it."""
    return {parameter: names[0] for names, _, parameter in walk_parameters(model)}


def optimizer_state_dict(
    optimizer: Optimizer, names: Names | None = None
) -> dict[str, Any]:
    """The state that torch gives, with names where torch has the positions of parameters.

    ``{"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}``. torch's own
    ``load_state_dict`` takes it too.

    Args:
        optimizer: its tensors are not copied.
        names: of :func:`parameter_names`. A parameter that is not in it has its name in
            ``param_names`` of its group. Where some have no name, or two have the same, the state
            has positions.
    """
    state = {**optimizer.state_dict(), "kind": _kind(optimizer)}
    in_order = _names(optimizer.param_groups, names)
    if in_order is None:
        return state
    ids = [k for group in state["param_groups"] for k in group["params"]]
    name_of = dict(zip(ids, in_order, strict=True))
    groups = [
        {**group, "params": [name_of[k] for k in group["params"]]}
        for group in state["param_groups"]
    ]
    for group in groups:
        group.pop(
            "param_names", None
        )  # the same, or as they are called in a part of the model
    named = {name_of.get(k, k): item for k, item in state["state"].items()}
    return {**state, "state": named, "param_groups": groups}


def load_optimizer_state(
    optimizer: Optimizer, state_dict: Mapping[str, Any], names: Names | None = None
) -> None:
    """Load what :func:`optimizer_state_dict` or a torch optimizer gave.

    The state of a parameter (momentum, Adam's moments and step) goes to the parameter of the same
    name and shape, in whichever group it is now. The settings of a group (``lr``, ``initial_lr``,
    ``betas``, ...) come from the saved group that most of its parameters were in. Warnings tell in
    tables which parameters are new, missing, moved or reshaped, and which settings are not as
    configured. Where one side has no names, groups of the same sizes match by position.

    For sharded parameters full tensors are split, which is collective.

    Args:
        optimizer: changed in place.
        state_dict: of an optimizer of the same kind. It is not changed.
        names: see :func:`optimizer_state_dict`.

    Raises:
        KeyError: if ``state`` or ``param_groups`` is missing.
        ValueError: if the state is that of another kind of optimizer, groups of other sizes have no
            names, or no name is on both sides.
    """
    kind, saved_kind = _kind(optimizer), state_dict.get("kind")
    if saved_kind not in (kind, None):
        raise ValueError(
            f"the state is that of {saved_kind}, and this is {kind}: {_WAY_OUT}"
        )
    states, saved_groups = state_dict["state"], state_dict["param_groups"]
    here, saved = _places(optimizer.param_groups, saved_groups, names)
    # The saved group that most parameters of a group were in, and the other way round. Of the
    # groups that a saved one was split into, only one is the same as before.
    counts = Counter((here[name][0], saved[name][0]) for name in here if name in saved)
    origins = dict(sorted(counts, key=lambda pair: (counts[pair], -pair[1])))
    heirs = {b: a for a, b in sorted(counts, key=lambda pair: (counts[pair], -pair[0]))}
    kept = {a: b for a, b in origins.items() if heirs[b] == a}
    state = _match(optimizer, states, here, saved, kept)
    sources = {g: saved_groups[source] for g, source in origins.items()}
    groups = _fit_groups(optimizer.param_groups, sources)
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def without_schedules(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of an optimizer, or of several by name, without the settings that were scheduled.

    Loaded, it leaves these (``lr`` for most, also in a wrapper's base settings) as they are.
    """
    if "param_groups" not in state:
        return {name: without_schedules(one) for name, one in state.items()}
    groups = [
        {key: value for key, value in group.items() if not _is_scheduled(key, group)}
        for group in state["param_groups"]
    ]
    return {**state, "param_groups": groups, "base_param_settings": {}}


def _is_scheduled(key: str, group: Mapping[str, Any]) -> bool:
    name = "momentum" if key == "betas" else key
    return key.startswith("initial_") or f"initial_{name}" in group


def _kind(optimizer: Optimizer) -> str:
    """The name in torch of its algorithm, also of a subclass; else that of its class."""
    kinds = [
        c for c in type(optimizer).__mro__ if c.__module__.startswith("torch.optim")
    ]
    return (type(optimizer) if kinds[0] is Optimizer else kinds[0]).__name__


def _names(groups: ParamGroups, known: Names | None = None) -> list[str] | None:
    """The names of all parameters in order; None unless each has one for itself."""
    known, names = known or {}, []
    for group in groups:
        own = group.get("param_names", group["params"])
        names += [
            known.get(p, name) for p, name in zip(group["params"], own, strict=True)
        ]
    if not all(isinstance(name, str) for name in names):
        return None
    bare = [
        ".".join(p for p in name.split(".") if p not in WRAPPER_PARTS) for name in names
    ]
    return bare if len(set(bare)) == len(bare) else None


def _places(
    groups: ParamGroups, saved: ParamGroups, known: Names | None
) -> tuple[Places, Places]:
    """The parameters here and the saved ones, by names that both sides share."""
    names, saved_names = _names(groups, known), _names(saved)
    if names is None or saved_names is None:
        sizes, saved_sizes = (
            [len(g["params"]) for g in some] for some in (groups, saved)
        )
        in_order = [name for name in (known or {}).values() if name in (names or ())]
        if names and sizes != saved_sizes == [1] * len(in_order):
            saved_names = (
                in_order  # MMEngine's rules make a group for each, in the model's order
            )
        elif sizes != saved_sizes:
            side = "this optimizer has" if names is None else "the saved state has"
            counts = f"groups of the sizes {saved_sizes}, not {sizes}"
            raise ValueError(f"{side} no names, and the saved one {counts}: {_WAY_OUT}")
        else:
            names = saved_names = (
                names or saved_names or [f"#{i}" for i in range(sum(sizes))]
            )
    if names and not set(names) & set(saved_names):
        problem = f"the state of {saved_names[:3]}, ... has none of {names[:3]}, ..."
        raise ValueError(f"{problem}: {_WAY_OUT}")
    here, there = (
        [(g, item) for g, group in enumerate(some) for item in group["params"]]
        for some in (groups, saved)
    )
    return dict(zip(names, here, strict=True)), dict(
        zip(saved_names, there, strict=True)
    )


def _match(
    optimizer: Optimizer,
    states: dict[Any, Any],
    here: Places,
    saved: Places,
    kept: dict[int, int],
) -> dict[Any, Any]:
    """The state by present positions. A table tells which parameters are not as before."""
    ids = {k for _, k in saved.values()}
    state = {k: item for k, item in states.items() if k not in ids}
    rows = [(name, "missing", "dropped", "-") for name in saved if name not in here]
    for position, (name, (group, parameter)) in enumerate(here.items()):
        if name not in saved:
            rows.append((name, "new", "-", "no state"))
            continue
        before, k = saved[name]
        item = states.get(k, {})
        if shape := _other_shape(optimizer, item, parameter):
            rows.append(
                (name, "reshaped", f"{shape}, dropped", f"{tuple(parameter.shape)}")
            )
            continue
        if kept.get(group) != before:
            rows.append((name, "moved", f"group {before}", f"group {group}"))
        if item:
            state[position] = {
                key: _placed(value, parameter) for key, value in item.items()
            }
    headers = ["parameter", "change", "in the checkpoint", "here"]
    _warn("The optimizer's parameters are not as in the checkpoint", headers, rows)
    return state


def _placed(value: Any, parameter: Tensor) -> Any:
    """Sharded and laid out in memory as its parameter, which fused kernels take for granted."""
    if not isinstance(value, Tensor):
        return value
    value = shard_like(value, parameter)
    if value.shape != parameter.shape or value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(
        value
    )


def _other_shape(
    optimizer: Optimizer, state: Mapping[str, Any], parameter: Tensor
) -> tuple[int, ...] | None:
    """The shape that a parameter had when its state was saved, if it was another."""
    kinds = {*type(optimizer).__mro__} - {Optimizer}
    if not any(kind.__module__.startswith("torch.optim") for kind in kinds):
        return None  # other optimizers may keep what they like
    # torch's keep tensors of the parameter's shape. Adafactor's means of rows and of columns have
    # size 1 in the other dimension.
    shapes = [v.shape for v in state.values() if isinstance(v, Tensor) and v.ndim]
    shape = tuple(max(sizes) for sizes in zip(*shapes, strict=False))
    return shape if shapes and shape != tuple(parameter.shape) else None


def _fit_groups(
    groups: ParamGroups, sources: Mapping[int, Mapping[str, Any]]
) -> list[Any]:
    """The groups with the settings of saved ones, as torch loads them."""
    fitted, rows, count = [], [], 0
    for g, group in enumerate(groups):
        ours, theirs = settings_of(group), settings_of(sources.get(g, {}))
        kernels = {key: ours[key] for key in _KERNELS if key in ours}
        ids = list(range(count, count + len(group["params"])))
        fitted.append({**ours, **theirs, **kernels, "params": ids})
        count += len(ids)
        # A schedule moves lr all the time; initial_lr is what the configuration said.
        if "initial_lr" in theirs and "lr" in ours:
            ours = {"initial_lr": ours.pop("lr"), **ours}
        changed = [
            k for k in ours if k not in kernels and theirs.get(k, ours[k]) != ours[k]
        ]
        rows += [(g, key, ours[key], theirs[key]) for key in changed]
        if g not in sources and ids:
            logger.warning(
                "Parameter group %d is new: its settings are as configured", g
            )
    headers = ["group", "setting", "configured", "checkpoint (used)"]
    _warn("The checkpoint overrules settings of the optimizer", headers, rows)
    return fitted


def _warn(text: str, headers: list[str], rows: Sequence[tuple[Any, ...]]) -> None:
    if rows:
        table = tabulate(rows, headers, "pipe", disable_numparse=True)
        logger.warning("%s:\n%s", text, table)
