"""The base class of hooks."""

import copy
import pickle
from typing import Any

import pytest

from hooktrain.engine import HookBase
from hooktrain.engine.hook_base import EVENTS
from toys import Idle


def test_a_hook_overrides_only_what_it_needs() -> None:
    hook = HookBase()
    for event in EVENTS:
        arguments = [{"accuracy": 0.5}] if event == "after_evaluation" else []
        assert getattr(hook, event)(*arguments) is None
    assert hook.state_dict() == {}
    hook.check_state_dict({"count": 3})


def test_a_hook_that_saves_and_cannot_load_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class OnlySaves(HookBase):
        def state_dict(self) -> dict[str, Any]:
            return {"count": 3}

    OnlySaves().load_state_dict({"count": 3})
    assert "OnlySaves" in caplog.text


class Counts(HookBase):
    def __init__(self) -> None:
        self.count = 3


@pytest.mark.parametrize(
    "make", [copy.copy, copy.deepcopy, lambda hook: pickle.loads(pickle.dumps(hook))]
)
def test_a_copy_of_a_registered_hook_has_no_trainer(make: Any) -> None:
    hook = Counts()
    trainer = Idle(hook)
    copied = make(hook)
    assert (copied.count, copied.trainer) == (3, None)
    assert len(pickle.dumps(hook)) < 200
    other = Idle(copied)
    assert (hook.trainer.hooks, copied.trainer.hooks) == ((hook,), (copied,))
    assert trainer.hooks != other.hooks
