"""HookBase, and the ordered list of hooks that a trainer keeps."""

import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tabulate import tabulate

__all__ = ["HookBase", "HookList"]

EVENTS = ("before_train", "before_step", "after_backward", "after_step", "after_train")

logger = logging.getLogger(__name__)


class HookBase:
    """Something that happens around the steps of a trainer.

    A hook overrides the events that it cares about; each is called in order of registration::

        hook.before_train()
        for iter in range(start_iter, max_iter):
            hook.before_step()
            trainer.run_step()    # calls hook.after_backward() between backward and update
            hook.after_step()
        hook.after_train()

    ``before_step`` should be cheap, since timers count it into the step; work belongs into
    ``after_step``. Register a hook on every rank: those that write decide by themselves which
    rank does.

    A hook with state overrides both ``state_dict`` and ``load_state_dict``; its state travels in
    the trainer's, under :attr:`key`.

    Attributes:
        trainer: a weak proxy of the trainer, set when the hook is registered.
        key: the name of this hook in checkpoints and tables. None stands for the class's name;
            give names where several hooks of one class have state, so that removing one cannot
            shift the others.
    """

    trainer: Any = None
    key: str | None = None

    def before_train(self) -> None:
        """Called once before the first iteration."""

    def after_train(self) -> None:
        """Called once at the end, also after an error.

        ``trainer.iter == trainer.max_iter`` holds only if the run came to its end.
        """

    def before_step(self) -> None:
        """Called before each iteration."""

    def after_backward(self) -> None:
        """Called between the backward pass and the update, when the gradients are complete."""

    def after_step(self) -> None:
        """Called after each iteration."""

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart: tensors and plain types only. Empty for no state."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` gave."""
        logger.warning(
            "%s saves state but has no load_state_dict: it starts with its defaults",
            type(self).__qualname__,
        )


class HookList:
    """The hooks of one trainer, in the order in which they run."""

    def __init__(self) -> None:
        self._hooks: list[HookBase] = []
        # Those who have something to do at an event: calling all the others takes a microsecond
        # or two of each step.
        self._acting: dict[str, list[HookBase]] = {event: [] for event in EVENTS}

    def __iter__(self) -> Iterator[HookBase]:
        return iter(self._hooks)

    def __len__(self) -> int:
        return len(self._hooks)

    def __getitem__(self, index: int) -> HookBase:
        return self._hooks[index]

    def register(
        self,
        trainer: object,
        hooks: Iterable[HookBase | None],
        before: HookBase | type[HookBase] | str | None,
        after: HookBase | type[HookBase] | str | None,
    ) -> None:
        """See :meth:`TrainerBase.register_hooks`."""
        new = [hook for hook in hooks if hook is not None]
        for hook in new:
            if not isinstance(hook, HookBase):
                raise TypeError(f"hooks must be HookBase objects, but got {hook!r}")
        if before is not None and after is not None:
            raise ValueError("register_hooks takes before= or after=, not both")
        place = len(self._hooks)
        if before is not None:
            place = self._find(before)[0]
        elif after is not None:
            place = self._find(after)[-1] + 1
        for hook in new:
            # A proxy, since a cycle of strong references would keep the model's memory alive.
            hook.trainer = weakref.proxy(trainer)
        self._hooks[place:place] = new
        self._acting = {e: [h for h in self._hooks if _acts_at(h, e)] for e in EVENTS}

    def _find(self, target: HookBase | type[HookBase] | str) -> list[int]:
        def is_target(key: str, hook: HookBase) -> bool:
            if isinstance(target, type):
                return isinstance(hook, target)
            return key == target if isinstance(target, str) else hook is target

        pairs = enumerate(self.by_key().items())
        if not (found := [i for i, (key, hook) in pairs if is_target(key, hook)]):
            raise ValueError(f"no hook {target!r} is registered; there are {list(self.by_key())}")
        return found

    def by_key(self) -> dict[str, HookBase]:
        """The hooks in order, each by a distinct name: its key or class, then ``#1``, ``#2``."""
        seen: Counter[str] = Counter()
        named = {}
        for hook in self._hooks:
            name = hook.key or type(hook).__qualname__
            named[f"{name}#{seen[name]}" if seen[name] else name] = hook
            seen[name] += 1
        return named

    def acting_at(self, event: str) -> list[HookBase]:
        """The hooks that override an event, in order."""
        return self._acting[event]

    def describe(self) -> str:
        """A table of the hooks and the events that each overrides."""
        rows: list[list[Any]] = []
        for key, hook in self.by_key().items():
            rows.append([len(rows), key, *("x" if _acts_at(hook, e) else "" for e in EVENTS)])
        return tabulate(rows, headers=["", "hook", *EVENTS], tablefmt="pipe")

    def state_dict(self) -> dict[str, Any]:
        """The states of those hooks that have one, by key."""
        return {key: state for key, hook in self.by_key().items() if (state := hook.state_dict())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Give each hook its state back; refuse, changing nothing, if some would be lost."""
        hooks = self.by_key()
        if lost := [key for key in state_dict if key not in hooks]:
            raise ValueError(
                f"the checkpoint holds the state of hooks that are not registered: {lost}; "
                f"there are {list(hooks)}. Register them, or load the trainer's other parts only"
            )
        for key, hook in hooks.items():
            if key in state_dict:
                hook.load_state_dict(state_dict[key])
            elif hook.state_dict():
                logger.warning("The checkpoint has no state for the hook %r: it starts anew", key)


def _acts_at(hook: HookBase, event: str) -> bool:
    return getattr(getattr(hook, event), "__func__", None) is not getattr(HookBase, event)
