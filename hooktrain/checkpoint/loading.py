"""From a checked state into the objects it belongs to: which parts of it, and in which order."""

import difflib
import inspect
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from hooktrain.checkpoint.surgery import load_model_state

__all__ = ["restore"]

logger = logging.getLogger(__name__)

State = dict[str, Any]


def restore(
    path: str,
    state: State,
    model: nn.Module,
    checkpointables: Mapping[str, Any],
    names: Iterable[str] | None,
    *,
    must_have_all: bool = False,
) -> State:
    """Load a model and what was chosen beside it. Nothing is changed if there is no such thing.

    Args:
        path: where the state is from, for the messages.
        state: with the model's under ``"model"``.
        model: changed in place.
        checkpointables: what could be loaded beside it, by name.
        names: of those to load, or of components of them; None for all.
        must_have_all: whether None means that the state must have all.

    Returns:
        The entries that were not loaded.

    Raises:
        ValueError: if a name is unknown, or not in the state.
        TypeError: if components of one are named that loads as a whole only.
    """
    chosen = _choose(path, state, checkpointables, names, must_have_all)
    _check_only(chosen, checkpointables)
    logger.info("Loading %s from %s", ", ".join(["model", *chosen]), path)
    load_model_state(model, state["model"])
    for key, components in chosen.items():
        only = {} if components is None else {"only": components}
        checkpointables[key].load_state_dict(state[key], **only)
    left = {key: item for key, item in state.items() if key not in {"model", *chosen}}
    unused = [key for key in left if key != "iteration"]
    if unused:
        logger.info("Entries of %s that were not loaded: %s", path, ", ".join(unused))
    return left


def _choose(
    path: str,
    state: State,
    checkpointables: Mapping[str, Any],
    names: Iterable[str] | None,
    must_have_all: bool,
) -> dict[str, set[str] | None]:
    """What to load beside the model: the components of each, or None for the whole."""
    if names is None:
        lacking = [key for key in checkpointables if key not in state]
        if lacking and must_have_all:
            raise ValueError(
                f"{path} holds no {lacking}, only {sorted(state)}: it cannot be resumed in "
                "full. Name what is to be loaded, with checkpointables=[...], to go on without"
            )
        if lacking:
            logger.warning("%s holds no %s: they keep their state", path, lacking)
        return {key: None for key in checkpointables if key in state}
    chosen: dict[str, set[str] | None] = {}
    for name in names:
        key, _, component = name.partition(".")
        if name == "model":  # always loaded
            continue
        _check_known(name, key, checkpointables, "is not among what this checkpointer loads")
        _check_known(name, key, state, f"is not in {path}")
        components = chosen.setdefault(key, set() if component else None)
        if not component:
            chosen[key] = None
        elif components is not None:
            _check_known(name, component, state[key], f"is not in {path}")
            components.add(component)
    return chosen


def _check_only(chosen: Mapping[str, set[str] | None], checkpointables: Mapping[str, Any]) -> None:
    for key, components in chosen.items():
        load = checkpointables[key].load_state_dict
        if components is not None and "only" not in inspect.signature(load).parameters:
            raise TypeError(
                f"cannot load {sorted(components)} of {key!r} alone: "
                f"its load_state_dict takes no argument 'only'"
            )


def _check_known(name: str, part: str, known: Iterable[str], problem: str) -> None:
    if part not in known:
        near = difflib.get_close_matches(part, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; there are {sorted(known)}"
        raise ValueError(f"checkpointables: {name!r} {problem}{hint}")
