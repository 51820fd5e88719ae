"""Any function is a hook."""

from collections.abc import Callable
from typing import Any

from hooktrain.engine.train_loop import HookBase

__all__ = ["CallbackHook"]

Callback = Callable[[Any], object]


class CallbackHook(HookBase):
    """Calls functions at the events; each is given the trainer.

    Args:
        before_train: called once before the first iteration; and so on for the other events.
        after_train: see :class:`HookBase`.
        before_step: see :class:`HookBase`.
        after_backward: see :class:`HookBase`.
        after_step: see :class:`HookBase`.
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
        self._before_train = before_train
        self._after_train = after_train
        self._before_step = before_step
        self._after_backward = after_backward
        self._after_step = after_step

    def before_train(self) -> None:
        """Call the function given for this event."""
        if self._before_train:
            self._before_train(self.trainer)

    def after_train(self) -> None:
        """Call the function given for this event."""
        if self._after_train:
            self._after_train(self.trainer)

    def before_step(self) -> None:
        """Call the function given for this event."""
        if self._before_step:
            self._before_step(self.trainer)

    def after_backward(self) -> None:
        """Call the function given for this event."""
        if self._after_backward:
            self._after_backward(self.trainer)

    def after_step(self) -> None:
        """Call the function given for this event."""
        if self._after_step:
            self._after_step(self.trainer)
