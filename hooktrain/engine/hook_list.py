"""The list of a trainer's hooks: their order, their names and their states."""

import logging
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from hooktrain.engine.hook_base import EVENTS, PHASES, HookBase
from hooktrain.utils.names import State, did_you_mean, states_of

# Refers to a registered hook: the object or its class.
HookReference: TypeAlias = HookBase | type[HookBase] | None

logger = logging.getLogger(__name__)


def named_hooks(hooks: Iterable[HookBase]) -> dict[str, HookBase]:
    """The hooks by their keys or class names. Repeated names get the suffixes ``#1``, ``#2``."""
    named: dict[str, HookBase] = {}
    for hook in hooks:
        name = first = hook.key or type(hook).__qualname__
        count = 0
        while name in named:
            count += 1
            name = f"{first}#{count}"
        named[name] = hook
    return named


def place_by_phase(hooks: Sequence[HookBase], hook: HookBase) -> int:
    """The index at which to insert a hook: behind the last hook that does not run after it.

    Raises:
        ValueError: for an unknown phase.
    """
    if hook.phase not in PHASES:
        raise ValueError(
            f"{type(hook).__qualname__} has an unknown phase {hook.phase!r}"
            f"{did_you_mean(hook.phase, PHASES)}"
        )
    return bisect_right(hooks, _place(hook), key=_place)


def _place(hook: HookBase) -> tuple[int, int]:
    return PHASES.index(hook.phase), hook._order


def place_beside(
    hooks: Sequence[HookBase], before: HookReference, after: HookReference
) -> tuple[int, str]:
    """The index right before or right after a registered hook, and that hook's phase.

    Raises:
        ValueError: if no such hook is registered.
    """
    wanted = after if before is None else before
    found = [
        index
        for index, hook in enumerate(hooks)
        if wanted in (hook, *type(hook).__mro__)
    ]
    if not found:
        raise ValueError(
            f"{wanted!r} is neither a registered hook nor its class: registered are "
            f"{[*named_hooks(hooks)]}"
        )
    index = found[-1] if before is None else found[0]
    return index + (before is None), hooks[index].phase


def describe(hooks: Iterable[HookBase]) -> str:
    """One line per hook, in order: its name, its phase and the events that it overrides."""
    return "\n".join(
        f"{key} ({hook.phase}): {', '.join(_overridden(hook, EVENTS))}"
        for key, hook in named_hooks(hooks).items()
    )


def _overridden(hook: HookBase, names: Iterable[str]) -> list[str]:
    """Those methods of HookBase that a hook overrides, by its class or by an attribute."""
    return [
        name
        for name in names
        if getattr(getattr(hook, name), "__func__", None) is not getattr(HookBase, name)
    ]


def warn_about_eventless_hook(hook: HookBase) -> None:
    """Warn about a hook with no method that a trainer or a checkpoint calls."""
    if not _overridden(hook, (*EVENTS, "run_files", "state_dict")):
        logger.warning(
            "The hook %s overrides no event, so the trainer never calls it; the events are %s",
            type(hook).__qualname__,
            ", ".join(EVENTS),
        )


def hook_states(hooks: Iterable[HookBase]) -> State:
    """The states of the hooks that have one, by name."""
    states = states_of(named_hooks(hooks))
    return {key: state for key, state in states.items() if state}


def load_hook_states(hooks: Iterable[HookBase], states: Mapping[str, State]) -> None:
    """Load what :func:`hook_states` returned; warn about hooks that have no state in it."""
    for key, hook in named_hooks(hooks).items():
        if key in states:
            hook.load_state_dict(states[key])
        elif hook.state_dict():
            logger.warning("The checkpoint has no state for the hook %r", key)
