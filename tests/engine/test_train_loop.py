"""The bare loop: order of events, errors, stopping, continuing, state."""

import pytest
from loop_toys import Recorder, Trainer

from hooktrain.engine import HookBase
from hooktrain.utils.events import get_event_storage


def test_events_come_in_the_documented_order_and_hooks_in_that_of_registration() -> None:
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


def test_metrics_are_stamped_with_the_iteration_and_at_the_end_with_max_iter() -> None:
    class Put(HookBase):
        def before_step(self) -> None:
            get_event_storage().put_scalar("x", 1.0)

        def after_train(self) -> None:
            get_event_storage().put_scalar("end", 2.0)

    trainer = Trainer()
    trainer.register_hooks([Put()])
    trainer.train(0, 3)
    assert [i for _, i in trainer.storage.history("x").values()] == [0, 1, 2]
    assert trainer.storage.latest()["end"] == (2.0, 3)


def test_a_second_call_of_train_continues_after_the_first() -> None:
    trainer = Trainer()
    trainer.train(max_iter=2)
    trainer.train(max_iter=4)
    assert trainer.log == ["step 0", "step 1", "step 2", "step 3"]
    assert trainer.start_iter == 2


def test_a_run_that_is_already_complete_runs_no_step_and_ends_as_any_other() -> None:
    log: list[str] = []
    trainer = Trainer(log)
    trainer.register_hooks([Recorder(log)])
    trainer.train(5, 5)
    assert log == ["hook before_train 5", "hook after_train 5"]
    assert trainer.iter == trainer.max_iter == 5


@pytest.mark.parametrize(("start", "end"), [(5, 4), (-1, 4)])
def test_a_start_outside_of_the_run_is_refused_with_both_numbers(start: int, end: int) -> None:
    with pytest.raises(ValueError, match=f"start_iter={start}.*max_iter={end}"):
        Trainer().train(start, end)


def test_train_without_max_iter_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match="max_iter"):
        Trainer().train()


def test_a_failing_step_leaves_iter_there_and_every_hook_still_ends() -> None:
    log: list[str] = []
    trainer = Trainer(log, fail_at=1)
    trainer.register_hooks([Recorder(log, "a"), Recorder(log, "b")])
    with pytest.raises(ValueError, match="broken at 1"):
        trainer.train(0, 2)
    assert trainer.iter == 1
    assert log[-3:] == ["step 1", "a after_train 1", "b after_train 1"]


def test_a_failure_in_the_last_iteration_is_no_success() -> None:
    trainer = Trainer(fail_at=2)
    with pytest.raises(ValueError, match="broken at 2"):
        trainer.train(0, 3)
    assert trainer.iter != trainer.max_iter
    assert trainer.state_dict()["iteration"] == 1


def test_a_failing_hook_at_the_end_hides_neither_the_first_error_nor_the_other_hooks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log: list[str] = []
    trainer = Trainer(log, fail_at=0)
    trainer.register_hooks([Recorder(log, "a", fail_at="a after_train 0"), Recorder(log, "b")])
    with pytest.raises(ValueError, match="broken at 0"):
        trainer.train(0, 2)
    assert log[-1] == "b after_train 0"
    assert "Exception while ending the failed run" in caplog.text


def test_the_first_of_several_errors_at_the_end_of_a_good_run_is_raised() -> None:
    log: list[str] = []
    trainer = Trainer(log)
    trainer.register_hooks([Recorder(log, n, fail_at=f"{n} after_train 1") for n in "ab"])
    with pytest.raises(OSError, match="a after_train 1"):
        trainer.train(0, 1)
    assert log[-1] == "b after_train 1"


def test_hooks_that_never_began_are_not_ended() -> None:
    log: list[str] = []
    trainer = Trainer(log)
    failing = Recorder(log, "b", fail_at="b before_train 0")
    trainer.register_hooks([Recorder(log, "a"), failing, Recorder(log, "c")])
    with pytest.raises(OSError, match="b before_train 0"):
        trainer.train(0, 1)
    assert log == ["a before_train 0", "b before_train 0", "a after_train 0"]


def test_ctrl_c_ends_the_hooks_and_reaches_the_caller() -> None:
    log: list[str] = []
    trainer = Trainer(log)

    class CtrlC(HookBase):
        def after_step(self) -> None:
            raise KeyboardInterrupt

    trainer.register_hooks([CtrlC(), Recorder(log)])
    with pytest.raises(KeyboardInterrupt):
        trainer.train(0, 3)
    assert log[-1] == "hook after_train 0"


def test_a_stop_completes_the_iteration_and_makes_it_the_end_of_the_run() -> None:
    class Stopper(HookBase):
        def after_step(self) -> None:
            if self.trainer.iter == 2:
                self.trainer.request_stop("enough")

    trainer = Trainer()
    trainer.register_hooks([Stopper()])
    trainer.train(0, 10)
    assert trainer.log == ["step 0", "step 1", "step 2"]
    assert trainer.iter == trainer.max_iter == 3
    assert trainer.stop_reason == "enough"
    trainer.train(max_iter=5)
    assert trainer.log[3:] == ["step 3", "step 4"]


def test_a_stop_asked_for_before_the_first_step_runs_none() -> None:
    class Stopper(HookBase):
        def before_train(self) -> None:
            self.trainer.request_stop("nothing to do")

    trainer = Trainer()
    trainer.register_hooks([Stopper()])
    trainer.train(0, 10)
    assert trainer.log == []
    assert trainer.iter == trainer.max_iter == 0
