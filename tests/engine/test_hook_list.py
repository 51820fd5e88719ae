"""Hooks in any order of registration."""

import random
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

from equality import assert_equal
from hooktrain.checkpoint import Checkpointer
from hooktrain.engine import HookBase, SimpleTrainer, default_hooks
from hooktrain.engine.hooks import EMA, CallbackHook, EarlyStopping
from hooktrain.events import JSONWriter, load_json_metrics
from toys import Idle, linear_trainer


class Reads(HookBase):
    """Keeps the results of evaluations."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def after_evaluation(self, results: Any) -> None:
        self.seen.append(dict(results))

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: Any) -> None:
        self.seen = list(state_dict["seen"])


class Shrinks(HookBase):
    """Changes the weights."""

    def after_step(self) -> None:
        with torch.no_grad():
            self.trainer.model.fc.weight.mul_(0.5)


class Measures(HookBase):
    """Puts a metric."""

    def after_step(self) -> None:
        self.trainer.storage.put_scalar("twice", 2.0 * self.trainer.done)


class StepsLikeTimm(HookBase):
    """Has a method that no trainer calls."""

    def step_update(self, num_updates: int) -> None:
        self.seen = num_updates


class ByAttribute(HookBase):
    def __init__(self) -> None:
        self.after_train = self.tell  # type: ignore[method-assign]

    def tell(self) -> None:
        """Is called at the end."""


class OnlyFiles(HookBase):
    def run_files(self) -> list[str]:
        return ["notes.txt"]


class OnlyState(HookBase):
    def state_dict(self) -> dict[str, Any]:
        return {"seen": 1}


class Inherits(Measures):
    """Has the event of its base class."""


def test_a_hook_without_an_event_is_told_when_it_is_registered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = Idle(Inherits(), ByAttribute(), OnlyFiles(), OnlyState(), CallbackHook())
    assert caplog.messages == []
    trainer.register_hooks([StepsLikeTimm()])
    (text,) = caplog.messages
    assert "StepsLikeTimm overrides no event" in text
    assert "after_evaluation, after_train" in text


def make(folder: Path, order: Sequence[int]) -> SimpleTrainer:
    """A trainer with the default hooks (the first of six) and five others, in an order."""
    trainer = linear_trainer(gather_metric_period=2)
    trainer.seed = 3
    saver = Checkpointer(trainer.model, folder, trainer=trainer)

    def evaluate() -> dict[str, float]:
        return {"weight": float(trainer.model.fc.weight.detach().abs().sum())}

    default = default_hooks(
        checkpointer=saver,
        checkpoint_period=2,
        eval_function=evaluate,
        eval_period=2,
        best_metric="weight",
        best_mode="min",
        writers=[JSONWriter(folder / "metrics.json")],
        log_period=2,
    )
    ema = EMA(trainer.model, 0.5)
    own = [Reads(), Shrinks(), Measures(), ema, EarlyStopping("weight", "min")]
    groups: list[list[HookBase]] = [default, *([hook] for hook in own)]
    for place in order:
        trainer.register_hooks(groups[place])
    return trainer


def outcome(folder: Path, trainer: SimpleTrainer) -> dict[str, Any]:
    """What is on the disk, and the state of the hooks, without times."""
    rows = load_json_metrics(folder / "metrics.json")
    files = {}
    for path in sorted(folder.glob("*.pth")):
        files[path.name] = torch.load(path, weights_only=True)
        for state in (files[path.name], files[path.name]["trainer"]):
            state.pop("storage", None)
            state.pop("meta", None)
        hooks = files[path.name]["trainer"]["hooks"]
        files[path.name]["trainer"]["hooks"] = dict(sorted(hooks.items()))
    return {
        "rows": [{k: v for k, v in r.items() if "time" not in k} for r in rows],
        "files": files,
        "seen": next(h.seen for h in trainer.hooks if isinstance(h, Reads)),
    }


OWN = {"Reads", "Shrinks", "Measures", "EarlyStopping"}
ORDERS = random.Random(0).sample(list(permutations(range(6))), 24)


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("usual")
    trainer = make(folder, range(6))
    trainer.train(max_iter=5)
    return outcome(folder, trainer)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_hooks_in_any_order_give_the_same_files_and_weights(
    order: tuple[int, ...], tmp_path: Path, usual: dict[str, Any]
) -> None:
    trainer = make(tmp_path, order)
    trainer.train(max_iter=5)
    assert_equal(outcome(tmp_path, trainer), usual)


def test_hooks_in_any_order_run_in_the_order_of_their_phases(tmp_path: Path) -> None:
    orders = set()
    for order in permutations(range(6)):
        trainer = make(tmp_path, order)
        kinds = [type(hook).__name__ for hook in trainer.hooks]
        orders.add(tuple(kind for kind in kinds if kind not in OWN))
    assert len(orders) == 2  # the average and the schedule are both in "update"
    assert all(order[0] == "IterationTimer" for order in orders)


class Ordered(HookBase):
    """A hook of a phase with a place in it, as those of compat/mmengine."""

    def __init__(self, key: str, order: int) -> None:
        self.key = key
        self._order = order


def test_a_hook_comes_behind_all_that_do_not_come_after_it() -> None:
    trainer = linear_trainer()
    ten = Ordered("ten", 10)
    trainer.register_hooks([ten, Ordered("fifty", 50)])
    trainer.register_hooks([Ordered("placed", 50)], before=ten)
    trainer.register_hooks([Ordered("twenty", 20)])
    keys = [hook.key for hook in trainer.hooks]
    assert keys == ["placed", "ten", "twenty", "fifty"]


def test_hooks_without_a_state_may_be_left_out_or_added_in_a_resumed_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = Idle(Measures(), Reads())
    first.train(0, 1)
    assert list(first.state_dict()["hooks"]) == ["Reads"]
    again = Idle(Reads(), Shrinks())
    again.load_state_dict(first.state_dict())
    assert again.done == 1
    assert caplog.messages == []
