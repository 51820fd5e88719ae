"""Any function is a hook."""

from collections.abc import Callable
from typing import Any

from hooktrain.engine.train_loop import HookBase

Callback = Callable[[Any], object]


class CallbackHook(HookBase):
    """Calls functions at the events; each gets the trainer.

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
