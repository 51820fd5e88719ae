"""Fit the saved state of an optimizer to one of other parameters, by the names of the parameters.

torch matches by position, and refuses other groups. Where layers were added, removed, frozen or
given a group of their own since, positions mean other parameters; names do not.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from tabulate import tabulate
from torch import Tensor, nn

from hooktrain.solver.build import _WRAPPER_PARTS, _named_parameters

__all__ = ["StateMatch", "match_optimizer_state", "name_param_groups"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
ParamGroups = Sequence[Mapping[str, Any]]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class StateMatch:
    """How the saved state of an optimizer was fitted to its present parameters.

    Groups are given by their index, saved and present ones each counted from 0.

    Attributes:
        new: parameters that start without state.
        missing: saved parameters that are not here any more; their state was dropped.
        moved: ``(name, saved group, present group)``; their state went along.
        reshaped: ``(name, saved shape, present shape)``; their state was dropped.
        groups: for each present group, the saved one that its settings come from: the one that most
            of its parameters were in. None for a group of new parameters, which keeps its own.
        positions: for each present parameter, in order, which of the saved ones its state is from;
            None if it has none.
    """

    new: list[str]
    missing: list[str]
    moved: list[tuple[str, int, int]]
    reshaped: list[tuple[str, Shape, Shape]]
    groups: list[int | None]
    positions: list[int | None]

    def reorder(self, values: Sequence[T]) -> list[T | None]:
        """Something that was saved for each parameter, for the present ones; None for new ones.

        Raises:
            IndexError: if there are fewer values than saved parameters.
        """
        return [None if k is None else values[k] for k in self.positions]

    def table(self) -> str:
        """What changed, one parameter a line; empty if nothing did."""
        rows: list[tuple[str, ...]] = [(name, "new", "-", "no state") for name in self.new]
        rows += [(name, "missing", "dropped", "-") for name in self.missing]
        rows += [(name, "moved", f"group {a}", f"group {b}") for name, a, b in self.moved]
        rows += [(name, "reshaped", f"{a}, dropped", str(b)) for name, a, b in self.reshaped]
        headers = ["parameter", "change", "in the checkpoint", "here"]
        return tabulate(rows, headers, disable_numparse=True) if rows else ""


def match_optimizer_state(
    optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> tuple[dict[str, Any], StateMatch]:
    """What to give to ``optimizer.load_state_dict`` for the state of an optimizer like it.

    If the parameters are the same, this is what was saved. Otherwise the state of each parameter
    (momentum, Adam's moments and step) goes to the parameter of the same name and shape, in
    whichever group it is now, and the settings of a group (``lr``, ``initial_lr``, ``betas``, ...)
    come from the saved group that most of its parameters were in. A warning tells what is new,
    missing, moved or reshaped, in a table.

    Names are ``param_names`` of the parameter groups, which :func:`get_default_optimizer_params`
    and :func:`name_param_groups` set, and torch does for ``model.named_parameters()``. What
    wrappers add to them (``module.``, ``_orig_mod.``) does not count. Where one side has no names,
    groups of the same sizes match by position, as torch does it.

    Args:
        optimizer: it is not changed.
        state_dict: of an optimizer of the same kind, not changed; entries beside torch's own
            ``state`` and ``param_groups`` are not looked at. The result shares its tensors.

    Raises:
        KeyError: if one of the two entries is missing.
        ValueError: if the parameters are others and cannot be matched: without names on one of the
            sides, if a name stands for several parameters, or if no name is on both sides.
    """
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise KeyError(f"the state of an optimizer needs {key!r}: it has {sorted(state_dict)}")
    state, saved = state_dict["state"], state_dict["param_groups"]
    ids = [k for group in saved for k in group["params"]]
    found = _find(saved, optimizer.param_groups)
    match = _compare(optimizer, [state.get(k) for k in ids], saved, found)
    if match.positions == list(range(len(ids))) and _sizes(saved) == _sizes(optimizer.param_groups):
        return {"state": state, "param_groups": saved}, match
    _log(match)
    fitted = {k: item for k, item in state.items() if not isinstance(k, int)}
    for i, k in enumerate(match.positions):
        if k is not None and ids[k] in state:
            fitted[i] = state[ids[k]]
    groups = _fit_groups(saved, optimizer.param_groups, match.groups)
    return {"state": fitted, "param_groups": groups}, match


def name_param_groups(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Give the parameter groups of an optimizer ``param_names``, the full names in the model.

    For optimizers that were made of ``model.parameters()``, so that their state can be matched by
    name later. Groups added afterwards need ``param_names`` too; torch sees to that.

    Args:
        optimizer: its groups are changed in place; names that are there are replaced.
        model: has all of the optimizer's parameters; what wrappers add to the names is left out.

    Raises:
        ValueError: if it lacks one; nothing is changed.
    """
    names = {parameter: found[0] for found, _, parameter in _named_parameters(model)}
    for index, group in enumerate(optimizer.param_groups):
        strange = [tuple(p.shape) for p in group["params"] if p not in names]
        if strange:
            raise ValueError(
                f"group {index} of the optimizer has parameters that are not in the model, of the "
                f"shapes {strange}"
            )
    for group in optimizer.param_groups:
        group["param_names"] = [names[p] for p in group["params"]]


def _find(saved: ParamGroups, ours: ParamGroups) -> list[int | None]:
    """For each of our parameters, in order, which of the saved ones it is."""
    sizes, our_sizes = _sizes(saved), _sizes(ours)
    names, our_names = _names(saved), _names(ours)
    if sizes == our_sizes and (names is None or our_names is None or names == our_names):
        return list(range(sum(sizes)))
    if names is None or our_names is None:
        side = "the saved state has" if names is None else "this optimizer has"
        raise ValueError(
            f"the state is of parameter groups of the sizes {sizes}, this optimizer has {our_sizes}"
            f", and they cannot be matched by name, since {side} no param_names. Make optimizers "
            "of get_default_optimizer_params(model) or model.named_parameters(), or call "
            "name_param_groups(optimizer, model), before saving and before loading; or go on "
            "without the optimizer's state (train.resume_parts)"
        )
    for some in (names, our_names):
        if doubles := [name for name, count in Counter(some).items() if count > 1]:
            raise ValueError(f"param_names must be unique to be matched, but not so: {doubles}")
    places = {name: k for k, name in enumerate(names)}
    found = [places.get(name) for name in our_names]
    if found and all(k is None for k in found):
        raise ValueError(
            f"none of the optimizer's parameters ({', '.join(our_names[:3])}, ...) is in the saved "
            f"state ({', '.join(names[:3])}, ...): it is of another model. To start anew from its "
            "weights, go on without the optimizer's state (train.resume_parts)"
        )
    return found


def _sizes(groups: ParamGroups) -> list[int]:
    return [len(group["params"]) for group in groups]


def _names(groups: ParamGroups) -> list[str] | None:
    """The names of all parameters in order without the parts of wrappers, if they have names."""
    names: list[str] = []
    for group in groups:
        if "param_names" not in group:
            return None
        if len(group["param_names"]) != len(group["params"]):
            raise ValueError(
                f"{len(group['params'])} params have {len(group['param_names'])} param_names: "
                f"{group['param_names']!r}"
            )
        names += group["param_names"]
    names = [".".join(p for p in name.split(".") if p not in _WRAPPER_PARTS) for name in names]
    while names and all(name.startswith("module.") for name in names):
        names = [name.removeprefix("module.") for name in names]
    return names


def _compare(
    optimizer: torch.optim.Optimizer,
    states: Sequence[Mapping[str, Any] | None],
    saved: ParamGroups,
    found: list[int | None],
) -> StateMatch:
    """Sort the parameters into what happened to them."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    names = _names(optimizer.param_groups) or [f"#{i}" for i in range(len(parameters))]
    saved_names = _names(saved) or [f"#{k}" for k in range(len(states))]
    group_of = [g for g, group in enumerate(optimizer.param_groups) for _ in group["params"]]
    saved_group_of = [g for g, group in enumerate(saved) for _ in group["params"]]
    pairs = [(saved_group_of[k], g) for k, g in zip(found, group_of, strict=True) if k is not None]
    groups = [_most([a for a, b in pairs if b == g]) for g in range(len(optimizer.param_groups))]
    # Of the groups that a saved one was split into, only one is the same as before.
    heirs = [_most([b for a, b in pairs if a == g]) for g in range(len(saved))]

    here = set(found)
    missing = [name for k, name in enumerate(saved_names) if k not in here]
    match = StateMatch([], missing, [], [], groups, list(found))
    for i, (name, parameter, k) in enumerate(zip(names, parameters, found, strict=True)):
        if k is None:
            match.new.append(name)
            continue
        before, now = saved_group_of[k], group_of[i]
        shape = _other_shape(optimizer, states[k], parameter)
        if shape is not None:
            match.reshaped.append((name, shape, tuple(parameter.shape)))
            match.positions[i] = None
        elif groups[now] != before or heirs[before] != now:
            match.moved.append((name, before, now))
    return match


def _most(groups: list[int]) -> int | None:
    """The most frequent number, the lowest of several; None if there is none."""
    return min(set(groups), key=lambda g: (-groups.count(g), g), default=None)


def _other_shape(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any] | None, parameter: Tensor
) -> Shape | None:
    """The shape that a parameter had when its state was saved, if it shows that it was another."""
    kinds = [kind for kind in type(optimizer).__mro__ if kind is not torch.optim.Optimizer]
    if not state or not any(f"{kind.__module__}.".startswith("torch.optim.") for kind in kinds):
        return None  # the optimizers of others may keep what they like
    if isinstance(optimizer, torch.optim.LBFGS):
        return None  # it keeps its state for all parameters with the first one
    for value in state.values():
        # torch's own keep single numbers (step) and tensors of the parameter's shape, in Adafactor
        # with 1 for the dimensions that were averaged.
        if isinstance(value, Tensor) and value.ndim:
            shape = tuple(value.shape)
            fits = value.ndim == parameter.ndim and all(
                size in (1, own) for size, own in zip(shape, parameter.shape, strict=True)
            )
            if not fits:
                return shape
    return None


def _fit_groups(
    saved: ParamGroups, ours: ParamGroups, sources: Sequence[int | None]
) -> list[dict[str, Any]]:
    """Our groups with the settings of the saved ones."""
    fitted, count = [], 0
    for group, source in zip(ours, sources, strict=True):
        settings = {} if source is None else saved[source]
        own = {"params": list(range(count, count + len(group["params"])))}
        if "param_names" in group:
            own["param_names"] = list(group["param_names"])
        fitted.append({**group, **settings, **own})
        count += len(group["params"])
    return fitted


def _log(match: StateMatch) -> None:
    table = match.table()
    if table:
        logger.warning(
            "The optimizer's parameters are not those of the checkpoint. What is kept for each of "
            "them was matched by name:\n%s",
            table,
        )
    configured = [g for g, source in enumerate(match.groups) if source is None]
    if configured:
        logger.warning("Parameter groups %s are new: their settings are as configured", configured)
