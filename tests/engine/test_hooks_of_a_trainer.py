"""The hooks of a trainer, its state, and its ranks."""

import gc
import logging
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from loop_toys import Recorder, Trainer

from gloo import run_ranks
from hooktrain.engine import HookBase, TrainerBase
from hooktrain.utils import comm


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


def test_hooks_hold_the_trainer_weakly() -> None:
    trainer = Trainer()
    hook = Recorder([])
    trainer.register_hooks([hook])
    gone = weakref.ref(trainer)
    gc.disable()
    try:
        del trainer
        assert gone() is None
    finally:
        gc.enable()
    with pytest.raises(ReferenceError):
        _ = hook.trainer.iter


def test_hooks_are_placed_before_or_after_others_by_class_key_or_object() -> None:
    trainer = Trainer()
    first, last = Counter(key="first"), Recorder([])
    trainer.register_hooks([first, last])
    trainer.register_hooks([Counter(key="second")], after=first)
    trainer.register_hooks([Counter(key="zeroth")], before="first")
    trainer.register_hooks([Counter(key="third")], before=Recorder)
    trainer.register_hooks([Counter(key="fourth")], after=Counter)
    keys = [line.split("|")[2].strip() for line in trainer.describe_hooks().splitlines()[2:]]
    assert keys == ["zeroth", "first", "second", "third", "fourth", "Recorder"]


def test_a_place_that_is_not_there_is_refused() -> None:
    trainer = Trainer()
    trainer.register_hooks([Counter()])
    with pytest.raises(ValueError, match=r"'Missing'.*Counter"):
        trainer.register_hooks([Counter()], before="Missing")
    with pytest.raises(ValueError, match="not both"):
        trainer.register_hooks([Counter()], before=Counter, after=Counter)


def test_something_that_is_no_hook_is_refused() -> None:
    with pytest.raises(TypeError, match="'print'"):
        Trainer().register_hooks(["print"])  # type: ignore[list-item]


def test_describe_hooks_shows_who_runs_when() -> None:
    trainer = Trainer()
    trainer.register_hooks([Counter(), Counter()])
    table = trainer.describe_hooks()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert rows[0] == [
        "",
        "hook",
        "before_train",
        "before_step",
        "after_backward",
        "after_step",
        "after_train",
    ]
    assert rows[2] == ["0", "Counter", "", "", "", "x", ""]
    assert rows[3] == ["1", "Counter#1", "", "", "", "x", ""]


def test_two_stateful_hooks_of_one_class_both_come_back() -> None:
    saved = Trainer()
    saved.register_hooks([Counter(10), Counter(20), Counter(30, key="mine")])
    saved.train(0, 1)
    loaded = Trainer()
    hooks = [Counter(), Counter(), Counter(key="mine")]
    loaded.register_hooks(hooks)
    loaded.load_state_dict(saved.state_dict())
    assert [hook.count for hook in hooks] == [11, 21, 31]


def test_a_hook_that_saves_but_cannot_load_warns_and_does_not_break_the_resume(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class OnlySaves(HookBase):
        def state_dict(self) -> dict[str, Any]:
            return {"x": 1}

    saved, loaded = Trainer(), Trainer()
    saved.register_hooks([OnlySaves()])
    loaded.register_hooks([OnlySaves()])
    loaded.load_state_dict(saved.state_dict())
    assert "OnlySaves saves state but has no load_state_dict" in caplog.text


def test_the_state_of_a_hook_that_is_gone_is_refused_by_name_unless_left_out() -> None:
    saved, loaded = Trainer(), Trainer()
    saved.register_hooks([Counter(7)])
    saved.train(0, 2)
    state = saved.state_dict()
    with pytest.raises(ValueError, match=r"\['Counter'\]"):
        loaded.load_state_dict(state)
    assert loaded.state_dict()["iteration"] == -1
    loaded.load_state_dict(state, only=["iteration"])
    assert loaded.state_dict()["iteration"] == 1


def test_a_new_stateful_hook_is_told_that_it_starts_anew(caplog: pytest.LogCaptureFixture) -> None:
    loaded = Trainer()
    loaded.register_hooks([Counter()])
    loaded.load_state_dict(Trainer().state_dict())
    assert "no state for the hook 'Counter'" in caplog.text


def test_unknown_parts_of_the_state_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\['optimiser'\].*iteration"):
        Trainer().load_state_dict({}, only=["optimiser"])


def test_train_continues_after_a_loaded_state_and_iter_is_the_last_finished_one() -> None:
    saved = Trainer()
    saved.train(0, 3)
    assert saved.state_dict()["iteration"] == 2
    loaded = Trainer()
    loaded.load_state_dict(saved.state_dict())
    assert loaded.iter == 2
    loaded.train(max_iter=5)
    assert loaded.log == ["step 3", "step 4"]


def test_a_state_saved_inside_an_iteration_holds_the_iteration_before() -> None:
    states = []

    class Save(HookBase):
        def before_step(self) -> None:
            states.append(self.trainer.state_dict()["iteration"])

        def after_step(self) -> None:
            states.append(self.trainer.state_dict()["iteration"])

    trainer = Trainer()
    trainer.register_hooks([Save()])
    trainer.train(0, 2)
    assert states == [-1, 0, 0, 1]


def test_the_state_holds_tensors_and_plain_types_only(tmp_path: Any) -> None:
    trainer = Trainer()
    trainer.register_hooks([Counter()])
    trainer.train(0, 2)
    torch.save(trainer.state_dict(), tmp_path / "state.pth")
    state = torch.load(tmp_path / "state.pth", weights_only=True)
    assert state["iteration"] == 1
    assert state["meta"]["world_size"] == 1


def test_random_numbers_go_on_after_a_resume_as_if_nothing_had_happened() -> None:
    class Draw(Trainer):
        def run_step(self) -> None:
            self.log.append(str(torch.rand(1).item()))

    torch.manual_seed(0)
    whole = Draw()
    whole.train(0, 4)
    torch.manual_seed(0)
    first = Draw()
    first.train(0, 2)
    state = first.state_dict()
    torch.manual_seed(99)
    second = Draw()
    second.load_state_dict(state)
    torch.rand(5)  # what happens between loading and training must not matter
    second.train(max_iter=4)
    assert first.log + second.log == whole.log


def test_run_step_must_be_defined() -> None:
    with pytest.raises(NotImplementedError, match="run_step"):
        TrainerBase().train(0, 1)


def test_a_failed_run_logs_the_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match="broken at 0"):
        Trainer(fail_at=0).train(0, 1)
    assert "Exception during training:" in caplog.text
    assert "broken at 0" in caplog.text


def stop_on_one_rank() -> tuple[int, str | None]:
    class Stopper(HookBase):
        def after_step(self) -> None:
            if self.trainer.iter == 5 and comm.get_rank() == 1:
                self.trainer.request_stop("rank 1 has had enough")

    trainer = Trainer()
    trainer.sync_period = 4
    trainer.register_hooks([Stopper()])
    trainer.train(0, 20)
    return trainer.iter, trainer.stop_reason


def test_ranks_stop_together_at_the_next_exchange() -> None:
    assert run_ranks(stop_on_one_rank, 2) == [(8, "rank 1 has had enough")] * 2


class Draws(Trainer):
    """Draws from each generator in each step."""

    def run_step(self) -> None:
        self.log.append(str((torch.rand(1).item(), np.random.rand(), random.random())))


def resumed_with_hooks_on_the_main_rank_only() -> tuple[list[str], list[str], list[bool]]:
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
    counts = [hook.count for hook in second._hooks]  # type: ignore[attr-defined]
    assert counts == [4] * len(counts)
    return whole.log, first.log + second.log, [hook.on_every_rank for hook in second._hooks]


def test_hooks_on_the_main_rank_only_resume_exactly_and_each_rank_draws_its_own_numbers() -> None:
    main, other = run_ranks(resumed_with_hooks_on_the_main_rank_only, 2)
    assert main[0] == main[1]
    assert other[0] == other[1]
    assert len({*main[0], *other[0]}) == 8
    assert (main[2], other[2]) == ([True, False], [True])


def different_periods() -> None:
    trainer = Trainer()
    trainer.sync_period = 20 + comm.get_rank()
    with pytest.raises(ValueError, match=r"the same on all ranks, not \[20, 21\]"):
        trainer.train(0, 1)


def test_ranks_that_would_exchange_at_different_iterations_are_refused() -> None:
    run_ranks(different_periods, 2)


def test_the_list_of_hooks_can_be_put_into_another_order_as_in_detectron2() -> None:
    log: list[str] = []
    trainer = Trainer(log)
    trainer.register_hooks([Recorder(log, "a"), Recorder(log, "b")])
    trainer._hooks = trainer._hooks[::-1]  # type: ignore[assignment, index]
    trainer.train(0, 1)
    assert log[:2] == ["b before_train 0", "a before_train 0"]
    assert "b after_step 0" in log
