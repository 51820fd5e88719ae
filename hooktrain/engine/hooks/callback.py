"""Calls functions at the events of a trainer."""

from collections.abc import Callable
from typing import Any

from hooktrain.engine.hook_base import HookBase
from hooktrain.utils.names import Numbers

Callback = Callable[..., object] | None


class CallbackHook(HookBase):
    """Calls functions at the events of :class:`HookBase`.

    Args:
        before_train: called with the trainer before the first iteration.
        after_train: called with the trainer at the end.
        before_step: called with the trainer before each iteration.
        after_backward: called with the trainer before each update.
        after_step: called with the trainer after each iteration.
        after_evaluation: called with the trainer and the results after each evaluation.
        phase: the phase of this hook.
    """

    def __init__(
        self,
        *,
        before_train: Callback = None,
        after_train: Callback = None,
        before_step: Callback = None,
        after_backward: Callback = None,
        after_step: Callback = None,
        after_evaluation: Callback = None,
        phase: str = "run",
    ) -> None:
        self.phase = phase
        self._functions: dict[str, Callback] = {
            "before_train": before_train,
            "after_train": after_train,
            "before_step": before_step,
            "after_backward": after_backward,
            "after_step": after_step,
            "after_evaluation": after_evaluation,
        }

    def before_train(self) -> None:
        """Call the function given for this event."""
        self._call("before_train")

    def after_train(self) -> None:
        """Call the function given for this event."""
        self._call("after_train")

    def before_step(self) -> None:
        """Call the function given for this event."""
        self._call("before_step")

    def after_backward(self) -> None:
        """Call the function given for this event."""
        self._call("after_backward")

    def after_step(self) -> None:
        """Call the function given for this event."""
        self._call("after_step")

    def after_evaluation(self, results: Numbers) -> None:
        """Call the function given for this event."""
        self._call("after_evaluation", results)

    def _call(self, event: str, *args: Any) -> None:
        function = self._functions[event]
        if function is not None:
            function(self.trainer, *args)
