"""The state of an optimizer by the names of its parameters, and how it is loaded.

torch saves and loads states by position. If the order of parameters or groups has changed, the
positions belong to other parameters, but the names do not.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from hooktrain.solver.param_groups import ParamGroup, settings_of, walk_parameters
from hooktrain.utils.names import State
from hooktrain.utils.tensors import shard_like, to_device

logger = logging.getLogger(__name__)

Names = Mapping[Tensor, str]

# These settings choose a kernel for the device, not what it computes, so loading keeps ours.
KERNEL_SETTINGS = ("foreach", "fused", "capturable")
WITHOUT_OPTIMIZER = (
    "resume without the optimizer (train.resume_parts, or checkpointables=[...])"
)


def parameter_names(model: nn.Module) -> dict[Tensor, str]:
    """The name of each parameter of a model, without the parts that wrappers add."""
    return {parameter: name for name, _, parameter in walk_parameters(model)}


def optimizer_state_dict(optimizer: Optimizer, names: Names) -> State:
    """The state dict of an optimizer, with names in place of torch's positions of parameters.

    ``{"kind": "SGD", "state": {name: {...}}, "param_groups": [{..., "params": [names]}]}``, and
    the data types of the parameters under ``"dtypes"``. torch's own ``load_state_dict`` accepts it
    too. If an optimizer's state has another form, or is one state for all parameters, it is kept
    whole, under ``"whole"``.

    Args:
        optimizer: the optimizer, whose tensors are not copied.
        names: the names from :func:`parameter_names`. If they lack a parameter, the state keeps
            positions.
    """
    state = optimizer.state_dict()
    named = _keys(optimizer, names)
    keys = [*named.values()]
    kind = type(optimizer).__name__
    if "param_groups" not in state or isinstance(optimizer, LBFGS):
        return {"kind": kind, "whole": state, "param_groups": [{"params": keys}]}
    # Some optimizers store more than the states of parameters, under additional keys.
    dtypes = {key: parameter.dtype for parameter, key in named.items()}
    by_position = dict(enumerate(keys))
    by_name = {by_position.get(key, key): item for key, item in state["state"].items()}
    for group in state["param_groups"]:
        group["params"] = [keys[position] for position in group["params"]]
    return {"kind": kind, **state, "state": by_name, "dtypes": dtypes}


def fit_state(optimizer: Optimizer, state_dict: State, names: Names) -> State:
    """Convert a saved state to the form and the keys of this optimizer.

    Args:
        optimizer: the optimizer, which is not changed.
        state_dict: see :func:`load_optimizer_state`.
        names: see :func:`optimizer_state_dict`.

    Raises:
        ValueError: if the state does not fit the optimizer.
    """
    kind = type(optimizer).__name__
    saved_kind = state_dict.get("kind", kind)
    if saved_kind != kind:
        raise ValueError(
            f"the state is of {saved_kind}, but the optimizer is {kind}: {WITHOUT_OPTIMIZER}"
        )
    key_of = _keys(optimizer, names)
    saved_as = _saved_keys(optimizer, state_dict, names)
    if "whole" in state_dict:
        return state_dict["whole"]  # type: ignore[no-any-return]
    settings_at = {
        saved_as[key]: settings_of(group)
        for group in state_dict["param_groups"]
        for key in group["params"]
    }
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
                    f"{members[0]} and {key} are in one group, but were in groups with different "
                    f"settings: group them as before, or {WITHOUT_OPTIMIZER}"
                )
        groups.append({**ours, **settings, **kernel, "params": members})
    state = {saved_as.get(key, key): item for key, item in state_dict["state"].items()}
    return {"state": state, "param_groups": groups}


def load_optimizer_state(optimizer: Optimizer, state_dict: State, names: Names) -> None:
    """Load a state from :func:`optimizer_state_dict` or from a torch optimizer's ``state_dict``.

    The state of a parameter (momentum, Adam's moments and step) goes to the parameter of the same
    name, whichever group it is in now, together with the settings of its saved group (``lr``,
    ``initial_lr``, ``betas``, ...). If one side has no names, groups of equal sizes match by
    position. A sharded parameter takes this rank's shard of a full tensor. Tensors keep their data
    types, unless the parameter has another one than when it was saved.

    Args:
        optimizer: the optimizer, which is changed in place.
        state_dict: the state of an optimizer of the same kind. It is not changed.
        names: see :func:`optimizer_state_dict`.

    Raises:
        KeyError: if ``state`` or ``param_groups`` is missing.
        ValueError: see :func:`fit_state`.
    """
    fitting = fit_state(optimizer, state_dict, names)
    states = {} if "whole" in state_dict else fitting["state"]
    dtypes = state_dict.get("dtypes", {})
    kept = {}
    for parameter, key in _keys(optimizer, names).items():
        if key in states:
            states[key] = {
                name: _like(parameter, item) for name, item in states[key].items()
            }
            if dtypes.get(key) == parameter.dtype:
                kept[parameter] = states[key]
    optimizer.load_state_dict(fitting)
    # torch has cast all entries but "step" to the data type of the parameter.
    for parameter, saved in kept.items():
        for name, item in saved.items():
            if name != "step" and getattr(item, "dtype", None) != parameter.dtype:
                optimizer.state[parameter][name] = to_device(item, parameter.device)


def warn_about_changed_settings(
    optimizer: Optimizer, ours: Sequence[ParamGroup], saved: Sequence[ParamGroup]
) -> None:
    """Warn about loaded settings that differ from the configuration of this run.

    Args:
        optimizer: the optimizer, after it has loaded the state.
        ours: the configured settings of its groups. Those that the loaded state replaces are
            updated to the saved run's.
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
            "The optimizer uses the checkpoint's settings: %s. To use your lr, resume without "
            "the hooks, as in docs/guide/configuration.md; to use your other settings, %s",
            ", ".join(dict.fromkeys(changes)),
            WITHOUT_OPTIMIZER,
        )


def without_schedules(state: State) -> State:
    """An optimizer's state, or several by name, without ``lr`` and other scheduled settings.

    Loading it leaves these settings unchanged.
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


def _keys(optimizer: Optimizer, names: Names) -> dict[Tensor, Any]:
    """The names of all parameters in order, or their positions if one has no name."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if all(parameter in names for parameter in parameters):
        return {parameter: names[parameter] for parameter in parameters}
    return {parameter: position for position, parameter in enumerate(parameters)}


def _saved_keys(
    optimizer: Optimizer, state_dict: State, names: Names
) -> dict[Any, Any]:
    """Map the keys of a saved state to the keys of this optimizer's parameters.

    Raises:
        ValueError: if the parameters differ.
    """
    here = [*_keys(optimizer, names).values()]
    saved = [key for group in state_dict["param_groups"] for key in group["params"]]
    same = saved
    if saved != here and not all(isinstance(key, str) for key in here + saved):
        same = _keys_at_positions(optimizer, state_dict, here, names)
    different = set(here) ^ set(same)
    if different or ("whole" in state_dict and same != here):
        raise ValueError(
            "the optimizer and its saved state differ in the parameters "
            f"{sorted(different)[:10]}, or in their order: build it with those of the saved run "
            "(any that were added during that run may be there from the start, frozen), or "
            f"{WITHOUT_OPTIMIZER}"
        )
    return dict(zip(saved, same, strict=True))


def _keys_at_positions(
    optimizer: Optimizer, state_dict: State, here: list[Any], names: Names
) -> list[Any]:
    """Map keys as :func:`_saved_keys` does, by position, if one side has no names."""
    sizes, saved_sizes = (
        [len(group["params"]) for group in groups]
        for groups in (optimizer.param_groups, state_dict["param_groups"])
    )
    if saved_sizes == sizes:
        return here
    # MMEngine's rules and old versions of detectron2 make a group for each parameter, in order.
    if saved_sizes == [1] * len(here):
        return [name for name in names.values() if name in here]
    raise ValueError(
        "the optimizer or the saved state has no parameter names, and the saved "
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
