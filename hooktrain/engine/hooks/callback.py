"""Functions as hooks."""

from collections.abc import Callable
from typing import Any

from hooktrain.engine.train_loop import HookBase

Callback = Callable[[Any], object]


class CallbackHook(HookBase):
    """Calls functions at the events; each gets the trainer.

    Args:
        before_train: called once before the first iteration.
        after_train: called once at the end; see :class:`HookBase` for this and the others.
        before_step: called before each iteration.
        after_backward: called between the backward pass and the update.
        after_step: called after each iteration.
    """

    def __init__(
        self,
        *,
        before_train: Callback | None = None,
        after_train: Callback | None = None,
        before_step: Callback | None = None,
        after_backward: Callback | None = None,
        after_step: Callback | None = None,
    ) -> None:
        self._before_train = before_train or _nothing
        self._after_train = after_train or _nothing
        self._before_step = before_step or _nothing
        self._after_backward = after_backward or _nothing
        self._after_step = after_step or _nothing

    def before_train(self) -> None:
        """Call the function given for this event."""
        self._before_train(self.trainer)

    def after_train(self) -> None:
        """Call the function given for this event."""
        self._after_train(self.trainer)

    def before_step(self) -> None:
        """Call the function given for this event."""
        self._before_step(self.trainer)

    def after_backward(self) -> None:
        """Call the function given for this event."""
        self._after_backward(self.trainer)

    def after_step(self) -> None:
        """Call the function given for this event."""
        self._after_step(self.trainer)


def _nothing(_: Any) -> None:
    pass
