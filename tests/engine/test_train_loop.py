"""The loop: order of events, errors, stopping, continuing, hooks and their state."""

import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gloo import run_ranks
from hooktrain.checkpoint import Checkpointer
from hooktrain.engine import (
    HookBase,
    SimpleTrainer,
    TrainerBase,
    create_ddp_model,
    hooks,
)
from hooktrain.engine.agreement import agree_on_run
from hooktrain.engine.hook_base import EVENTS
from hooktrain.engine.hooks import CallbackHook
from hooktrain.events import EventStorage, get_event_storage
from hooktrain.utils import comm
from toys import Net, batches, sgd


class Recorder(CallbackHook):
    """Writes down each event as "name event iteration"."""

    def __init__(self, log: list[str], name: str = "hook", fail: Any = None) -> None:
        def note(event: str, trainer: Any, *_: Any) -> None:
            entry = f"{name} {event} {trainer.iter}"
            log.append(entry)
            if fail is not None and entry == str(fail):
                raise fail

        super().__init__(**{event: partial(note, event) for event in EVENTS})


class Trainer(TrainerBase):
    """Notes each step; raises in the iteration `fail_at`."""

    def __init__(self, log: list[str] | None = None, fail_at: int = -1) -> None:
        super().__init__()
        self.log = [] if log is None else log
        self.fail_at = fail_at

    def run_step(self) -> None:
        self.log.append(f"step {self.iter}")
        if self.iter == self.fail_at:
            raise ValueError(f"broken at {self.iter}")
        self.after_backward()


def test_events_come_in_the_documented_order() -> None:
    log: list[str] = []
    trainer = Trainer(log)
    trainer.register_hooks([Recorder(log, "a"), None, Recorder(log, "b")])
    trainer.train(3, 4)
    assert log == [
        "a before_train 3",
        "b before_train 3",
        "a before_step 3",
        "b before_step 3",
        "step 3",
        "a after_backward 3",
        "b after_backward 3",
        "a after_step 3",
        "b after_step 3",
        "a after_train 4",
        "b after_train 4",
    ]


def test_metrics_are_stamped_with_the_iteration() -> None:
    def put(name: str, trainer: Any) -> None:
        get_event_storage().put_scalar(name, 1.0)

    putting = CallbackHook(
        before_step=partial(put, "x"), after_train=partial(put, "end")
    )
    trainer = Trainer()
    trainer.register_hooks([putting])
    trainer.train(0, 3)
    assert [i for _, i in trainer.storage.history("x").values()] == [0, 1, 2]
    assert trainer.storage.latest()["end"] == (1.0, 3)


def test_a_run_that_is_already_complete_runs_no_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    log: list[str] = []
    trainer = Trainer(log)
    trainer.register_hooks([Recorder(log)])
    trainer.train(5, 5)
    assert log == ["hook before_train 5", "hook after_train 5"]
    assert trainer.iter == trainer.max_iter == 5
    (message,) = caplog.messages
    assert message.startswith("Nothing is left to train: max_iter=5 is reached")
    assert "counts from iteration 0" in message
    # The model may be that of another fold.
    assert "needs its own folder" in message
    assert "load_checkpoint()" in message


@pytest.mark.parametrize(("start", "end"), [(5, 4), (-1, 4)])
def test_a_start_outside_of_the_run_is_refused_with_both_numbers(
    start: int, end: int
) -> None:
    with pytest.raises(ValueError, match=f"start_iter={start}.*max_iter={end}"):
        Trainer().train(start, end)


def test_an_end_before_what_is_done_is_refused_with_what_is_done() -> None:
    trainer = Trainer()
    trainer.train(max_iter=3)
    with pytest.raises(ValueError, match="start_iter=3"):
        trainer.train(max_iter=2)


@pytest.mark.parametrize("error", [OSError, SystemExit, KeyboardInterrupt])
def test_a_failing_hook_at_the_end_does_not_hide_the_first_error(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    log: list[str] = []
    trainer = Trainer(log, fail_at=0)
    failing = Recorder(log, "a", error("a after_train 0"))
    trainer.register_hooks([failing, Recorder(log, "b")])
    with pytest.raises(ValueError, match="broken at 0"):
        trainer.train(0, 2)
    assert log[-1] == "b after_train 0"
    assert "Exception while ending the failed run" in caplog.text


@pytest.mark.parametrize("error", [OSError, SystemExit, KeyboardInterrupt])
def test_the_first_of_several_errors_at_the_end_of_a_good_run_is_raised(
    error: type[BaseException],
) -> None:
    log: list[str] = []
    trainer = Trainer(log)
    failing = [Recorder(log, name, error(f"{name} after_train 1")) for name in "ab"]
    trainer.register_hooks(failing)
    with pytest.raises(error, match="a after_train 1"):
        trainer.train(0, 1)
    assert log[-1] == "b after_train 1"
    assert not trainer.succeeded


def test_a_failing_hook_at_the_end_does_not_hide_an_earlier_error_that_waits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    waiting = ValueError("the evaluation failed")
    trainer = Trainer()
    early = CallbackHook(after_train=lambda trainer: trainer.raise_later(waiting))
    trainer.register_hooks([early, Recorder([], "b", OSError("b after_train 1"))])
    with pytest.raises(ValueError, match="the evaluation failed"):
        trainer.train(0, 1)
    assert "b after_train 1" in caplog.text


def test_a_stop_completes_the_iteration() -> None:
    def stop(trainer: Any) -> None:
        if trainer.iter == 2:
            trainer.request_stop("enough")

    trainer = Trainer()
    trainer.register_hooks([CallbackHook(after_step=stop)])
    trainer.train(0, 10)
    assert trainer.log == ["step 0", "step 1", "step 2"]
    assert trainer.iter == trainer.max_iter == 3
    assert trainer.stop_reason == "enough"
    trainer.train(max_iter=5)
    assert trainer.log[3:] == ["step 3", "step 4"]
    for name in ("should_stop", "stop", "stop_training"):
        with pytest.raises(AttributeError, match=r"trainer\.request_stop\(reason\)"):
            setattr(trainer, name, True)


class Counter(HookBase):
    """A hook with state."""

    def __init__(self, start: int = 0, key: str | None = None) -> None:
        self.count, self.key = start, key

    def after_step(self) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: Any) -> None:
        self.count = state_dict["count"]


def test_hooks_are_placed_before_or_after_others_by_class_or_object() -> None:
    trainer = Trainer()
    third, last, fourth = Counter(key="third"), Recorder([]), Counter(key="fourth")
    trainer.register_hooks([third, last])
    trainer.register_hooks([Counter(key="first")], before=third)
    trainer.register_hooks([Counter(key="second")], before=third)
    trainer.register_hooks([fourth], after=third)
    trainer.register_hooks([Counter(key="sixth")], before=Recorder)
    trainer.register_hooks([Counter(key="fifth")], after=fourth)
    trainer.register_hooks([Counter(key="zeroth")], before=Counter)
    trainer.register_hooks([Counter(key="seventh")], after=Counter)
    trainer.register_hooks([Counter(key="end")], after=HookBase)
    keys = [hook.key or type(hook).__name__ for hook in trainer.hooks]
    counted = ["zeroth", "first", "second", "third", "fourth", "fifth", "sixth"]
    assert keys == [*counted, "seventh", "Recorder", "end"]


def test_hooks_are_described_with_their_events() -> None:
    trainer = Trainer()
    trainer.register_hooks([HookBase(), Counter(), Counter()])
    trainer.register_hooks([hooks.IterationTimer()])
    expected = [
        "IterationTimer (time): after_step, after_train",
        "HookBase (run): ",
        "Counter (run): after_step",
        "Counter#1 (run): after_step",
    ]
    assert trainer.describe_hooks().splitlines() == expected


def test_a_hook_that_is_registered_during_a_run_begins_at_once() -> None:
    log: list[str] = []

    class Registers(HookBase):
        def before_train(self) -> None:
            self.trainer.register_hooks([Recorder(log, "first")], before=self)

        def after_step(self) -> None:
            if self.trainer.iter == 1:
                self.trainer.register_hooks([Recorder(log, "second")])

    trainer = Trainer()
    trainer.register_hooks([Registers()])
    trainer.train(0, 3)
    assert [entry for entry in log if "train" in entry] == [
        "first before_train 0",
        "second before_train 1",
        "first after_train 3",
        "second after_train 3",
    ]
    assert [entry for entry in log if "second" in entry and "step" in entry] == [
        "second before_step 2",
        "second after_step 2",
    ]
    trainer.register_hooks([Recorder(log, "third")])
    assert log[-1] == "second after_train 3"


def test_a_hook_is_for_one_trainer_and_for_one_place() -> None:
    first, second, hook = Trainer(), Trainer(), HookBase()
    with pytest.raises(ValueError, match="already has a trainer"):
        first.register_hooks([hook, hook])
    with pytest.raises(ValueError, match="already has a trainer"):
        second.register_hooks([hook])
    assert (first.hooks, second.hooks) == ((hook,), ())


def test_two_stateful_hooks_of_one_class_both_come_back() -> None:
    saved = Trainer()
    saved.register_hooks([Counter(10), Counter(20), Counter(30, key="mine")])
    saved.train(0, 1)
    loaded = Trainer()
    hooks = [Counter(), Counter(), Counter(key="mine")]
    loaded.register_hooks(hooks)
    loaded.load_state_dict(saved.state_dict())
    assert [hook.count for hook in hooks] == [11, 21, 31]


def test_a_hook_that_cannot_load_does_not_break_the_resume(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class OnlySaves(HookBase):
        def state_dict(self) -> dict[str, Any]:
            return {"x": 1}

    saved, loaded = Trainer(), Trainer()
    saved.register_hooks([OnlySaves()])
    loaded.register_hooks([OnlySaves()])
    loaded.load_state_dict(saved.state_dict())
    assert "no load_state_dict" in caplog.text


class Refuses(Counter):
    """Takes no count above 3."""

    def check_state_dict(self, state_dict: Any) -> None:
        if state_dict["count"] > 3:
            raise ValueError("too many")


def test_a_hook_may_refuse_a_state_before_anything_is_changed(tmp_path: Path) -> None:
    def make() -> tuple[Any, Checkpointer]:
        trainer, saver = own_loop(SimpleTrainer, tmp_path, [])
        trainer.register_hooks([Counter(), Refuses()])
        return trainer, saver

    first, saver = make()
    first.train(max_iter=3)
    second, saver = make()
    saver.resume_or_load("")
    second.train(max_iter=5)
    third, saver = make()
    before = third.model.fc.weight.clone()
    with pytest.raises(ValueError, match="too many"):
        saver.resume_or_load("")
    assert torch.equal(third.model.fc.weight, before)
    assert (third.done, third.hooks[0].count) == (0, 0)
    third.load_state_dict({"iteration": second.state_dict()["iteration"]})


def test_the_state_of_a_hook_that_is_gone_is_refused() -> None:
    saved, loaded = Trainer(), Trainer()
    saved.register_hooks([Counter(7)])
    saved.train(0, 2)
    state = saved.state_dict()
    with pytest.raises(ValueError, match=r"\['Counter'\]"):
        loaded.load_state_dict(state)
    assert loaded.state_dict()["iteration"] == -1
    loaded.load_state_dict({"iteration": state["iteration"]})
    assert loaded.state_dict()["iteration"] == 1


def test_a_new_stateful_hook_is_told_that_it_starts_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loaded = Trainer()
    loaded.register_hooks([Counter()])
    loaded.load_state_dict(Trainer().state_dict())
    assert "'Counter'" in caplog.text


def test_a_state_saved_inside_an_iteration_holds_the_iteration_before() -> None:
    states = []

    def save(trainer: Any) -> None:
        states.append(trainer.state_dict()["iteration"])

    trainer = Trainer()
    trainer.register_hooks([CallbackHook(before_step=save, after_step=save)])
    trainer.train(0, 2)
    assert states == [-1, 0, 0, 1]


def stop_on_one_rank() -> tuple[int, str | None]:
    def stop(trainer: Any) -> None:
        if trainer.iter == 5 and comm.get_rank() == 1:
            trainer.request_stop("rank 1 has had enough")

    trainer = Trainer()
    trainer.sync_period = 4
    trainer.register_hooks([CallbackHook(after_step=stop)])
    trainer.train(0, 20)
    return trainer.iter, trainer.stop_reason


def test_ranks_stop_together_at_the_next_exchange() -> None:
    assert run_ranks(stop_on_one_rank, 2) == [(8, "rank 1 has had enough")] * 2


class Draws(Trainer):
    """Draws from each generator in each step."""

    def run_step(self) -> None:
        self.log.append(str((torch.rand(1).item(), np.random.rand(), random.random())))


def resumed_with_hooks_on_the_main_rank_only() -> tuple[
    list[str], list[str], list[bool]
]:
    def trainer() -> Draws:
        draws = Draws()
        main_only = Counter(key="main only") if comm.is_main_process() else None
        draws.register_hooks([Counter(), main_only])
        return draws

    torch.manual_seed(comm.get_rank())
    whole = trainer()
    whole.train(0, 4)
    torch.manual_seed(comm.get_rank())
    first = trainer()
    first.train(0, 2)
    second = trainer()
    second.load_state_dict(comm.broadcast(first.state_dict()))
    second.train(max_iter=4)
    counts = [hook.count for hook in second.hooks]  # type: ignore[attr-defined]
    assert counts == [4] * len(counts)
    return (
        whole.log,
        first.log + second.log,
        [hook.on_every_rank for hook in second.hooks],
    )


def test_hooks_on_the_main_rank_only_resume_exactly() -> None:
    main, other = run_ranks(resumed_with_hooks_on_the_main_rank_only, 2)
    assert main[0] == main[1]
    assert other[0] == other[1]
    assert len({*main[0], *other[0]}) == 8
    assert (main[2], other[2]) == ([True, False], [True])


def train_with_lone_hooks(folder: Path) -> list[str]:
    saver = Checkpointer(nn.Linear(1, 1), folder)
    shards = Checkpointer(nn.Linear(1, 1), folder, sharded=True)
    refused = []
    for lone in (
        hooks.EvalHook(0, dict),
        hooks.Preemption(saver),
        hooks.ReplayCheck(2),
        hooks.PeriodicCheckpointer(saver, 1),
        hooks.PeriodicCheckpointer(shards, 1),
        hooks.BestCheckpointer(saver, "accuracy", "max"),
        hooks.BestCheckpointer(shards, "accuracy", "max"),
    ):
        trainer = Trainer()
        trainer.register_hooks([lone] if comm.is_main_process() else [])
        try:
            agree_on_run(trainer.hooks, {})
        except RuntimeError as error:
            refused.append(str(error))
    return refused


def test_a_hook_that_calls_collectives_is_refused_where_some_ranks_have_it(
    tmp_path: Path,
) -> None:
    lone = ["EvalHook", "Preemption", "ReplayCheck"]
    lone += ["PeriodicCheckpointer", "BestCheckpointer"]
    expected = [f"register {name} on every rank, or on none" for name in lone]
    assert run_ranks(train_with_lone_hooks, 2, tmp_path) == [expected, []]


class Phased(HookBase):
    """Writes down its key at each event."""

    def __init__(self, log: list[str], key: str, phase: str = "run") -> None:
        self.log, self.key, self.phase = log, key, phase

    def after_step(self) -> None:
        self.log.append(self.key or "")

    def after_evaluation(self, results: Any) -> None:
        self.log.append(f"{self.key} {results}")


def test_hooks_run_in_the_order_of_their_phases_then_of_their_registration() -> None:
    log: list[str] = []
    phases = ["end", "save", "run", "write", "evaluate", "run", "update", "time"]
    trainer = Trainer()
    for number, phase in enumerate(phases):
        trainer.register_hooks([Phased(log, f"{phase} {number}", phase)])
    trainer.train(0, 1)
    order = ["time 7", "update 6", "run 2", "run 5", "evaluate 4", "write 3"]
    assert log == [*order, "save 1", "end 0"]


def test_a_hook_that_is_placed_takes_over_the_phase_of_its_neighbour() -> None:
    log: list[str] = []
    trainer = Trainer()
    saves, writes = Phased(log, "saves", "save"), Phased(log, "writes", "write")
    trainer.register_hooks([saves])
    trainer.register_hooks([Phased(log, "behind")], after=saves)
    trainer.register_hooks([writes, Phased(log, "runs")])
    trainer.register_hooks([Phased(log, "in front", "end")], before=writes)
    trainer.train(0, 1)
    assert log == ["runs", "in front", "writes", "saves", "behind"]
    assert {hook.key: hook.phase for hook in trainer.hooks} == {
        "runs": "run",
        "in front": "write",
        "writes": "write",
        "saves": "save",
        "behind": "save",
    }


def test_an_unknown_phase_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'evaluation'; did you mean 'evaluate'"):
        Trainer().register_hooks([Phased([], "a", "evaluation")])


def test_an_evaluation_calls_the_hooks_with_its_numbers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log: list[str] = []
    trainer = Trainer()
    evaluates = CallbackHook(
        after_step=lambda t: t.after_evaluation({"a": {"b": 1}, "names": "cat"})
    )
    trainer.register_hooks([Phased(log, "late", "save"), evaluates])
    trainer.register_hooks([Phased(log, "early", "time")])
    trainer.train(4, 5)
    assert log == ["early", "early {'a/b': 1.0}", "late {'a/b': 1.0}", "late"]
    assert trainer.storage.latest() == {"a/b": (1.0, 4)}
    assert "['names']" in caplog.text


def evaluate_on_both() -> tuple[dict[str, Any], list[str]]:
    log: list[str] = []
    trainer = Trainer()
    evaluates = CallbackHook(
        after_step=lambda t: t.after_evaluation({"score": comm.get_rank() + 2})
    )
    trainer.register_hooks([evaluates, Phased(log, "hook")])
    trainer.train(0, 1)
    return trainer.storage.latest(), log


def test_all_ranks_take_the_results_of_the_main_one() -> None:
    expected = ({"score": (2.0, 0)}, ["hook {'score': 2.0}", "hook"])
    assert run_ranks(evaluate_on_both, 2) == [expected, expected]


def stop_by_an_evaluation() -> int:
    """Where a run ends whose second evaluation is no better, and is not saved either."""
    model = create_ddp_model(Net())
    trainer = SimpleTrainer(model, batches(1), sgd(model), gather_metric_period=20)
    evaluation = hooks.EvalHook(3, lambda: {"acc": 0.5})
    trainer.register_hooks([evaluation, hooks.EarlyStopping("acc", "max", patience=1)])
    trainer.train(max_iter=40)
    return trainer.iter


def test_ranks_stop_right_after_the_evaluation_that_asks_for_it() -> None:
    assert run_ranks(stop_by_an_evaluation, 2) == [6, 6]


def test_the_list_of_hooks_can_be_put_into_another_order_as_in_detectron2() -> None:
    log: list[str] = []
    trainer = Trainer(log)
    trainer.register_hooks([Recorder(log, "a"), Recorder(log, "b")])
    trainer._hooks = trainer._hooks[::-1]  # type: ignore[assignment, index]
    trainer.train(0, 1)
    assert log[:2] == ["b before_train 0", "a before_train 0"]
    assert "b after_step 0" in log


class OwnLoop(SimpleTrainer):
    """The loop of AdelaiDet, unbiased-teacher and others."""

    def train_loop(self, start_iter: int, max_iter: int) -> None:
        self.iter = self.start_iter = start_iter
        self.max_iter = max_iter
        with EventStorage(start_iter) as self.storage:
            try:
                self.before_train()
                for self.iter in range(start_iter, max_iter):
                    self.before_step()
                    self.run_step()
                    self.after_step()
            finally:
                self.after_train()


def own_loop(
    kind: type[SimpleTrainer], folder: Path, evaluated: list[Any]
) -> tuple[Any, Checkpointer]:
    model = Net()
    trainer = kind(model, batches(1), sgd(model))
    trainer.seed = 3
    checkpointer = Checkpointer(model, folder, trainer=trainer)
    saving = hooks.PeriodicCheckpointer(checkpointer, 2)
    evaluation = hooks.EvalHook(3, lambda: evaluated.append(trainer.iter))
    trainer.register_hooks([saving, evaluation])
    return trainer, checkpointer


def test_an_own_loop_does_what_train_does(tmp_path: Path) -> None:
    reference, _ = own_loop(SimpleTrainer, tmp_path / "train", expected := [])
    reference.train(max_iter=5)

    seen: list[int] = []
    first, _ = own_loop(OwnLoop, tmp_path / "own", seen)
    first.train_loop(0, 4)
    trainer, checkpointer = own_loop(OwnLoop, tmp_path / "own", seen)
    checkpointer.resume_or_load("")
    assert trainer.iter == 3
    trainer.train_loop(trainer.iter + 1, 5)

    assert torch.equal(trainer.model.fc.weight, reference.model.fc.weight)
    # At the end of the first part and of the second.
    assert (seen, expected) == ([2, 3, 4], [2, 4])
    assert (trainer.iter, trainer.succeeded) == (5, True)
    assert torch.load(tmp_path / "own" / "model_final.pth")["trainer"]["iteration"] == 4


def test_an_own_loop_that_fails_is_not_evaluated_as_finished(tmp_path: Path) -> None:
    trainer, _ = own_loop(OwnLoop, tmp_path, seen := [])
    failing = Recorder([], fail=RuntimeError("hook after_step 4"))
    trainer.register_hooks([failing])
    with pytest.raises(RuntimeError, match="after_step 4"):
        trainer.train_loop(0, 5)
    assert (seen, trainer.succeeded) == ([2], False)


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("max_iter", 30, r"request_stop\(\).*train\(max_iter"),
        ("max_iter", 6, r"request_stop\(\).*train\(max_iter"),
        ("epoch_length", 3, "data_loader"),
    ],
)
def test_what_a_run_has_read_cannot_be_set_in_it(
    name: str, value: int, instead: str
) -> None:
    trainer = Trainer()

    def change(trainer: Any) -> None:
        if trainer.iter == 5:
            setattr(trainer, name, value)

    trainer.register_hooks([CallbackHook(before_step=change)])
    with pytest.raises(RuntimeError, match=f"^{name} cannot be set.*{instead}"):
        trainer.train(max_iter=10)
    setattr(trainer, name, value)  # between two runs it can
    assert getattr(trainer, name) == value


def test_a_second_thread_cannot_train_at_the_same_time_but_a_nested_run_can() -> None:
    refused: list[BaseException | None] = []
    inner = Trainer()

    def train_elsewhere(trainer: Any) -> None:
        with ThreadPoolExecutor(1) as pool:
            refused.append(pool.submit(Trainer().train, max_iter=1).exception())
        inner.train(max_iter=2)

    trainer = Trainer()
    trainer.register_hooks([CallbackHook(before_step=train_elsewhere)])
    trainer.train(max_iter=1)
    assert inner.done == 2
    assert "another thread" in str(refused[0])
    train_elsewhere(None)  # no run is in the way any more
    assert refused[1] is None


def test_a_seed_and_a_period_that_are_set_in_a_run_hold_from_the_next_iteration() -> (
    None
):
    drawn: list[float] = []
    periods: list[int] = []

    def note(trainer: Any) -> None:
        drawn.append(random.random())
        if trainer.ends_period:
            periods.append(trainer.iter)
        if trainer.iter == 5:
            trainer.seed, trainer.sync_period = 8, 3

    def train(seed: int, max_iter: int) -> Any:
        trainer = Trainer()
        trainer.seed = seed
        trainer.register_hooks([CallbackHook(after_step=note)])
        trainer.train(max_iter=max_iter)
        return trainer

    changed = train(7, 10)
    assert periods == [8, 9]  # and the last one
    assert changed.state_dict()["seed"] == 8
    train(7, 6)
    train(8, 10)
    assert drawn[:6] == drawn[10:16]
    assert drawn[6:10] == drawn[22:26]


def train_with_best_on_main(folder: Path, max_iter: int) -> tuple[int, float | None]:
    trainer, checkpointer = own_loop(SimpleTrainer, folder, [])
    trainer.register_hooks([hooks.EvalHook(2, lambda: {"score": trainer.iter})])
    best = hooks.BestCheckpointer(checkpointer, "score", "max")
    if comm.is_main_process():
        trainer.register_hooks([best])
    else:
        del trainer._hooks[-1]  # the one that saves
    checkpointer.resume_or_load("")
    first = trainer.iter
    trainer.train(max_iter=max_iter)
    return first, best.best_metric


def test_a_run_resumes_with_a_best_checkpointer_on_the_main_rank_only(
    tmp_path: Path,
) -> None:
    assert run_ranks(train_with_best_on_main, 2, tmp_path, 4) == [(0, 3), (0, None)]
    assert run_ranks(train_with_best_on_main, 2, tmp_path, 6) == [(3, 5), (3, None)]


def test_the_state_of_a_trainer_is_not_loaded_in_a_run() -> None:
    trainer = Trainer()
    trainer.train(0, 2)
    state = trainer.state_dict()
    trainer.register_hooks(
        [CallbackHook(after_step=lambda t: t.load_state_dict(state))]
    )
    with pytest.raises(
        RuntimeError, match="the state of the trainer cannot be set during a run"
    ):
        trainer.train(0, 9)
    assert (trainer.iter, trainer.done) == (0, 1)
    trainer.load_state_dict(state)
    assert trainer.done == 2
