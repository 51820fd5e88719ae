"""The state of an optimizer by the names of its parameters, and how it is loaded.

torch saves and loads by position. If the order of parameters or groups has changed, positions
mean other parameters; names do not.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from hooktrain.solver.param_groups import ParamGroup, settings_of, walk_parameters
from hooktrain.utils.names import State
from hooktrain.utils.tensors import shard_like

logger = logging.getLogger(__name__)

Names = Mapping[Tensor, str]

# They choose a kernel, not what it computes: a matter of the device, so they stay.
KERNEL_SETTINGS = ("foreach", "fused", "capturable")
WITHOUT_OPTIMIZER = (
    "resume without the optimizer (train.resume_parts, or checkpointables=[...])"
)


def parameter_names(model: nn.Module) -> dict[Tensor, str]:
    """The name of each parameter of a model, without what wrappers add to it."""
    return {parameter: name for name, _, parameter in walk_parameters(model)}


def optimizer_state_dict(optimizer: Optimizer, names: Names) -> State:
    """The state that torch gives, with names where torch has positions of parameters.

    ``{"kind": "SGD", "state": {name: {...}}, "param_groups": [{..., "params": [names]}]}``.
    torch's own ``load_state_dict`` takes it too. The state of an optimizer that has another form,
    or one state for all of its parameters, stays whole, under ``"whole"``.

    Args:
        optimizer: its tensors are not copied.
        names: of :func:`parameter_names`. If a parameter is not in it, the state has positions.
    """
    state = optimizer.state_dict()
    keys = [*_keys(optimizer, names).values()]
    kind = _kind(optimizer)
    if "param_groups" not in state or isinstance(optimizer, LBFGS):
        return {"kind": kind, "whole": state, "param_groups": [{"params": keys}]}
    # Some optimizers keep more than states of parameters, under keys of their own.
    by_position = dict(enumerate(keys))
    by_name = {by_position.get(key, key): item for key, item in state["state"].items()}
    for group in state["param_groups"]:
        group["params"] = [keys[position] for position in group["params"]]
    return {"kind": kind, **state, "state": by_name}


def fit_state(optimizer: Optimizer, state_dict: State, names: Names) -> State:
    """A state that was saved, in the form and with the keys of this optimizer.

    Args:
        optimizer: it is not changed.
        state_dict: see :func:`load_optimizer_state`.
        names: see :func:`optimizer_state_dict`.

    Raises:
        ValueError: if the state does not fit the optimizer.
    """
    kind = _kind(optimizer)
    saved_kind = state_dict.get("kind", kind)
    if saved_kind != kind:
        raise ValueError(
            f"the state is that of {saved_kind}, and this is {kind}: {WITHOUT_OPTIMIZER}"
        )
    key_of = _keys(optimizer, names)
    saved_as = _saved_keys(optimizer, state_dict, names)
    if "whole" in state_dict:
        return state_dict["whole"]  # type: ignore[no-any-return]
    settings_at = {}
    for group in state_dict["param_groups"]:
        for key in group["params"]:
            settings_at[saved_as[key]] = settings_of(group)
    groups = []
    for group in optimizer.param_groups:
        ours = settings_of(group)
        kernel = {name: ours[name] for name in KERNEL_SETTINGS if name in ours}
        members = [key_of[parameter] for parameter in group["params"]]
        settings: ParamGroup = {}
        for key in members:
            settings = settings_at[key]
            if settings != settings_at[members[0]]:
                raise ValueError(
                    f"{members[0]} and {key} are in one group, and were in groups of different "
                    f"settings: group them as before, or {WITHOUT_OPTIMIZER}"
                )
        groups.append({**ours, **settings, **kernel, "params": members})
    state = {saved_as.get(key, key): item for key, item in state_dict["state"].items()}
    return {"state": state, "param_groups": groups}


def load_optimizer_state(optimizer: Optimizer, state_dict: State, names: Names) -> None:
    """Load what :func:`optimizer_state_dict` or a torch optimizer gave.

    The state of a parameter (momentum, Adam's moments and step) goes to the parameter of the same
    name, in whichever group it is now, with the settings of its group (``lr``, ``initial_lr``,
    ``betas``, ...). If one side has no names, groups of the same sizes match by position.

    Of a full tensor a sharded parameter takes the shard of this rank.

    Args:
        optimizer: changed in place.
        state_dict: of an optimizer of the same kind. It is not changed.
        names: see :func:`optimizer_state_dict`.

    Raises:
        KeyError: if ``state`` or ``param_groups`` is missing.
        ValueError: see :func:`fit_state`.
    """
    fitting = fit_state(optimizer, state_dict, names)
    if "whole" not in state_dict:
        states = fitting["state"]
        for parameter, key in _keys(optimizer, names).items():
            if key in states:
                entries = states[key].items()
                states[key] = {name: _like(parameter, item) for name, item in entries}
    optimizer.load_state_dict(fitting)


def warn_of_settings(
    optimizer: Optimizer, ours: Sequence[ParamGroup], saved: Sequence[ParamGroup]
) -> None:
    """Warn of settings that are loaded, and were configured in another way for the saved run.

    Args:
        optimizer: has loaded the state.
        ours: the settings of its groups that were configured. They become those of the saved run
            where these are used.
        saved: the settings that were configured for the saved run.
    """
    changes = []
    for group, mine, theirs in zip(optimizer.param_groups, ours, saved, strict=False):
        for key, value in mine.items():
            if theirs.get(key, value) != value and group[key] != value:
                changes.append(f"{key} is {theirs[key]}, not {value}")
                mine[key] = theirs[key]
    if changes:
        logger.warning(
            "The optimizer's settings are those of the checkpoint: %s. For your lr resume without "
            "the hooks, as in docs/guide/configuration.md; for other settings of yours %s",
            ", ".join(dict.fromkeys(changes)),
            WITHOUT_OPTIMIZER,
        )


def without_schedules(state: State) -> State:
    """An optimizer's state, or several by name, without ``lr`` and other scheduled settings.

    Loaded, it leaves these as they are.
    """
    if "param_groups" not in state:
        return {name: without_schedules(one) for name, one in state.items()}
    groups = []
    for group in state["param_groups"]:
        scheduled = {key for key in group if f"initial_{key}" in group} | {"lr"}
        settings = group.items()
        groups.append(
            {k: v for k, v in settings if k.removeprefix("initial_") not in scheduled}
        )
    return {**state, "param_groups": groups}


def _kind(optimizer: Optimizer) -> str:
    """The name of torch's optimizer that it is or extends, else that of its class."""
    for kind in type(optimizer).__mro__:
        if kind.__module__.startswith("torch.optim") and kind is not Optimizer:
            return kind.__name__
    return type(optimizer).__name__


def _keys(optimizer: Optimizer, names: Names) -> dict[Tensor, Any]:
    """The names of all parameters in order, or their positions if one has no name."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if all(parameter in names for parameter in parameters):
        return {parameter: names[parameter] for parameter in parameters}
    return {parameter: position for position, parameter in enumerate(parameters)}


def _saved_keys(
    optimizer: Optimizer, state_dict: State, names: Names
) -> dict[Any, Any]:
    """The keys of the parameters here, by those in a saved state.

    Raises:
        ValueError: if these are other parameters.
    """
    here = [*_keys(optimizer, names).values()]
    saved = [key for group in state_dict["param_groups"] for key in group["params"]]
    same = saved
    if saved != here and not all(isinstance(key, str) for key in here + saved):
        same = _keys_at_positions(optimizer, state_dict, here, names)
    different = [key for key in here + same if (key in here) != (key in same)]
    if different or ("whole" in state_dict and same != here):
        raise ValueError(
            f"the optimizer and its saved state differ in the parameters {different[:10]}, or in "
            "their order: give it those of the saved run (what that run added later may be there "
            f"from the start, frozen), or {WITHOUT_OPTIMIZER}"
        )
    return dict(zip(saved, same, strict=True))


def _keys_at_positions(
    optimizer: Optimizer, state_dict: State, here: list[Any], names: Names
) -> list[Any]:
    """The keys of saved parameters if one side has no names."""
    sizes, saved_sizes = (
        [len(group["params"]) for group in groups]
        for groups in (optimizer.param_groups, state_dict["param_groups"])
    )
    if saved_sizes == sizes:
        return here
    # MMEngine's rules, and detectron2 of old, make a group for each parameter, in order.
    if saved_sizes == [1] * len(here):
        return [name for name in names.values() if name in here]
    raise ValueError(
        "the optimizer or the saved state has no names of parameters, and the saved "
        f"groups have the sizes {saved_sizes}, not {sizes}: {WITHOUT_OPTIMIZER}"
    )


def _like(parameter: Tensor, value: Any) -> Any:
    """The value, sharded and laid out in memory like its parameter, as fused kernels expect."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    value = shard_like(value, parameter)
    if value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)
