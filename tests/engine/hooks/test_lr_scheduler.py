"""The hook that steps schedules of each family, in lists, and for several optimizers."""

import copy
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)

from hooktrain.checkpoint import Checkpointer
from hooktrain.engine import SimpleTrainer, StepTrainer, default_hooks
from hooktrain.engine.hooks import (
    CallbackHook,
    EvalHook,
    LRScheduler,
    PeriodicCheckpointer,
)
from hooktrain.solver import (
    ConstantParamScheduler,
    CosineParamScheduler,
    LinearParamScheduler,
    OptimWrapper,
    OptimWrapperDict,
    WarmupParamScheduler,
)
from toys import LinearLoss, Two, batches, linear_trainer, sgd


def recorded(trainer: Any, name: str = "lr") -> list[float]:
    return [value for value, _ in trainer.storage.history(name).values()]


@pytest.mark.parametrize("several", [False, True])
def test_the_rate_that_is_logged_is_the_one_used_in_the_iteration(
    several: bool,
) -> None:
    schedule = LinearParamScheduler(1.0, 0.0)
    trainer = linear_trainer(
        LRScheduler(scheduler=[schedule] if several else schedule), lr=8.0
    )
    trainer.train(0, 4)
    assert recorded(trainer) == [8.0, 6.0, 4.0, 2.0]
    assert trainer.optimizer.param_groups[0]["lr"] == 0.0


def test_a_second_longer_run_lays_the_schedule_over_its_whole_length() -> None:
    trainer = linear_trainer(
        LRScheduler(scheduler=LinearParamScheduler(1.0, 0.0)), lr=8.0
    )
    trainer.train(0, 2)
    trainer.train(max_iter=4)
    assert recorded(trainer) == [8.0, 4.0, 4.0, 2.0]


def test_a_scheduler_of_the_trainer_is_found() -> None:
    trainer = linear_trainer(LRScheduler(), lr=1.0)
    trainer.scheduler = StepLR(trainer.optimizer, 1, gamma=0.5)  # type: ignore[attr-defined]
    trainer.train(0, 2)
    assert recorded(trainer) == [1.0, 0.5]


@pytest.mark.parametrize("by_epoch", [False, True])
def test_the_log_says_how_often_a_scheduler_of_torch_steps(
    by_epoch: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = linear_trainer(lr=1.0)
    trainer.epoch_length = 3
    schedule = ExponentialLR(trainer.optimizer, 0.5)
    hook = LRScheduler(scheduler=schedule, by_epoch=by_epoch)
    hooks = default_hooks(
        scheduler=hook if by_epoch else schedule,
        checkpointer=Checkpointer(trainer.model, tmp_path, trainer=trainer),
        checkpoint_period=10,
    )
    trainer.register_hooks(hooks)
    with caplog.at_level(logging.INFO, "hooktrain"):
        trainer.train(0, 4)
    assert recorded(trainer) == ([1, 1, 1, 0.5] if by_epoch else [1, 0.5, 0.25, 0.125])
    steps, period = (1, 3) if by_epoch else (4, 1)
    told = (
        f"ExponentialLR takes {steps} steps in this run; iterations per step: {period}"
    )
    assert [text for text in caplog.messages if text.startswith(told)]


def train_two_epochs(
    schedule: Any, by_epoch: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Train for two epochs of three iterations, with the log from INFO on."""
    trainer = linear_trainer(lr=1.0)
    trainer.epoch_length = 3
    made = schedule(trainer.optimizer)
    trainer.register_hooks([LRScheduler(scheduler=made, by_epoch=by_epoch)])
    with caplog.at_level(logging.INFO, "hooktrain"):
        trainer.train(0, 6)


@pytest.mark.parametrize(
    ("schedule", "by_epoch", "steps", "is_wave"),
    [
        (lambda o: CosineAnnealingLR(o, T_max=2), False, 6, True),
        (lambda o: CosineAnnealingLR(o, T_max=2), True, 2, False),
        (lambda o: CosineAnnealingLR(o, T_max=6), False, 6, False),
        (lambda o: CosineAnnealingLR(o, T_max=5), False, 6, False),  # after a warm-up
        (lambda o: OneCycleLR(o, 1.0, total_steps=90), False, 6, False),
        (lambda o: StepLR(o, 2), False, 6, False),
    ],
)
def test_the_log_says_how_many_steps_a_scheduler_takes_and_if_a_cosine_goes_up_again(
    schedule: Any,
    by_epoch: bool,
    steps: int,
    is_wave: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    train_two_epochs(schedule, by_epoch, caplog)
    assert f" takes {steps} steps in this run" in caplog.text
    assert f"(by_epoch={by_epoch}; True counts epochs)" in caplog.text
    assert ("rises again after T_max=2 steps" in caplog.text) is is_wave


def test_the_log_has_the_rates_of_the_group_with_the_highest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = LinearLoss()
    frozen = {"params": [torch.nn.Parameter(torch.ones(9))], "lr": 0.0}
    trained = {"params": model.parameters(), "lr": 0.5}
    optimizer = torch.optim.SGD([frozen, trained])
    trainer = SimpleTrainer(model, batches(2), optimizer)
    schedule = CosineParamScheduler(1, 0.2)
    trainer.register_hooks([LRScheduler(scheduler=schedule)])
    with caplog.at_level(logging.INFO, "hooktrain"):
        trainer.train(0, 2)
    assert "lr goes from 0.5 to 0.1; the schedule's highest is about 0.5" in caplog.text


@pytest.mark.parametrize(
    ("schedule", "by_epoch", "told"),
    [
        (lambda o: CosineAnnealingLR(o, 90), False, "6 of T_max=90"),
        (lambda o: CosineAnnealingLR(o, 6), True, "2 of T_max=6"),
        (lambda o: CosineAnnealingLR(o, 6), False, None),
        (lambda o: OneCycleLR(o, 1.0, total_steps=90), False, "6 of total_steps=90"),
        (lambda o: LinearLR(o, total_iters=12), False, "6 of total_iters=12"),
        (lambda o: LinearLR(o, total_iters=3), False, None),
        (lambda o: LambdaLR(o, lambda n: 0.5**n), False, None),
    ],
)
def test_the_log_says_that_a_schedule_is_longer_than_the_run(
    schedule: Any, by_epoch: bool, told: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    train_two_epochs(schedule, by_epoch, caplog)
    assert (told or "takes") in caplog.text
    said = [m for m in caplog.messages if "The run ends at" in m]
    assert len(said) == bool(told)


@pytest.mark.parametrize(("by_epoch", "end"), [(False, 0.5**5), (True, 0.5)])
def test_the_log_says_where_a_lambda_schedule_ends(
    by_epoch: bool, end: float, caplog: pytest.LogCaptureFixture
) -> None:
    train_two_epochs(lambda o: LambdaLR(o, lambda n: 0.5**n), by_epoch, caplog)
    (told,) = [text for text in caplog.messages if "LambdaLR ends" in text]
    assert told == f"LambdaLR ends at {end} times the rate"


def test_the_end_of_a_lambda_schedule_is_told_in_the_first_run_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = linear_trainer(lr=1.0)
    schedule = LambdaLR(trainer.optimizer, lambda n: 0.5**n)
    trainer.register_hooks([LRScheduler(scheduler=schedule)])
    with caplog.at_level(logging.INFO, "hooktrain"):
        trainer.train(0, 2)
        trainer.train(max_iter=4)
        trainer.train(0, 1)  # at whose end the schedule has made 5 steps
    told = [text for text in caplog.messages if "LambdaLR ends" in text]
    assert told == ["LambdaLR ends at 0.5 times the rate"]
    assert recorded(trainer) == [0.0625]


def test_the_end_of_a_lambda_schedule_is_right_in_the_middle_of_an_epoch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = linear_trainer(lr=1.0)
    trainer.epoch_length = 3
    schedule = LambdaLR(trainer.optimizer, lambda n: 0.5**n)
    trainer.register_hooks([LRScheduler(scheduler=schedule, by_epoch=True)])
    with caplog.at_level(logging.INFO, "hooktrain"):
        trainer.train(0, 4)
    assert "LambdaLR ends at 0.5 times" in caplog.text
    assert recorded(trainer) == [1.0, 1.0, 1.0, 0.5]


def test_a_lambda_schedule_of_epochs_that_is_stepped_in_iterations_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def schedule(optimizer: Any) -> LambdaLR:
        return LambdaLR(optimizer, lambda epoch: 1 - epoch / 4)

    with pytest.raises(ValueError, match=r"-0\.25 times.*by_epoch=True counts epochs"):
        train_two_epochs(schedule, False, caplog)
    train_two_epochs(schedule, True, caplog)
    assert "LambdaLR ends at 0.75 times" in caplog.text


def test_a_lambda_schedule_that_is_0_in_the_last_iteration_is_not_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    train_two_epochs(lambda o: LambdaLR(o, lambda n: 1 - n / 5), False, caplog)
    assert "LambdaLR ends at 0 times" in caplog.text


@pytest.mark.parametrize(
    ("length", "max_iter", "is_told"),
    [(2, 8, True), (4, 8, True), (5, 8, False), (8, 8, False), (1, 1, False)],
)
def test_a_lambda_schedule_that_is_over_long_before_the_run_is_told(
    length: int, max_iter: int, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = linear_trainer()
    schedule = LambdaLR(trainer.optimizer, lambda n: max(0.0, 1 - n / length))
    trainer.register_hooks([LRScheduler(scheduler=schedule)])
    trainer.train(0, max_iter)
    assert ("rate is 0 in the last third" in caplog.text) == is_told


def test_a_lambda_schedule_whose_warm_up_is_all_of_a_short_run_is_not_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = linear_trainer()
    schedule = LambdaLR(trainer.optimizer, lambda n: n / 10)
    trainer.register_hooks([LRScheduler(scheduler=schedule)])
    for max_iter in (1, 2):
        trainer.train(0, max_iter)
    assert "last third" not in caplog.text


@pytest.mark.parametrize("period", [0, 1])
def test_a_plateau_with_too_few_evaluations_is_told(
    period: int, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = linear_trainer(EvalHook(period, lambda: {"val": 1.0}))
    plateau = ReduceLROnPlateau(trainer.optimizer, patience=2)
    trainer.register_hooks([LRScheduler(scheduler=plateau, metric="val")])
    with caplog.at_level(logging.INFO, "hooktrain"):
        trainer.train(0, 4)
    told = "too few evaluations for LRScheduler, with its patience of 2, to act"
    assert (told in caplog.text) == (period == 0)


@pytest.mark.parametrize(
    ("make", "other", "changes"),
    [
        (
            lambda o: StepLR(o, 2, gamma=0.5),
            lambda o: StepLR(o, 3, gamma=0.5),
            ["step_size is 2, not 3"],
        ),
        (
            lambda o: CosineAnnealingLR(o, 4),
            lambda o: CosineAnnealingLR(o, 8, eta_min=0.01),
            ["T_max is 4, not 8", "eta_min is 0.0, not 0.01"],
        ),
        (lambda o: MultiStepLR(o, [1, 3]), lambda o: MultiStepLR(o, [1, 3]), None),
        (
            lambda o: LambdaLR(o, lambda n: 1.0),
            lambda o: LambdaLR(o, lambda n: 0.5),
            None,
        ),
        (ReduceLROnPlateau, ReduceLROnPlateau, None),
    ],
)
def test_settings_of_a_schedule_that_the_checkpoint_replaces_are_told(
    make: Any, other: Any, changes: list[str] | None, caplog: pytest.LogCaptureFixture
) -> None:
    def trainer_of(kind: Any) -> Any:
        trainer = linear_trainer(lr=1.0)
        schedule = kind(trainer.optimizer)
        trainer.register_hooks([LRScheduler(scheduler=schedule, metric="val")])
        return trainer

    first, second = trainer_of(make), trainer_of(other)
    first.train(0, 2)
    second.load_state_dict(first.state_dict())
    second.train(max_iter=3)
    told = [
        text for text in caplog.messages if "uses the checkpoint's settings" in text
    ]
    assert len(told) == (changes is not None)
    assert all(change in told[0] for change in changes or [])


def test_the_log_says_between_which_rates_each_run_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    schedule = WarmupParamScheduler(CosineParamScheduler(1.0, 0.25), 0.5, 0.25)
    trainer = linear_trainer(LRScheduler(scheduler=schedule), lr=8.0)
    with caplog.at_level(logging.INFO, "hooktrain"):
        trainer.train(0, 4)
        trainer.train(max_iter=8)  # where a cosine had ended, it is in its middle again
    told = [text for text in caplog.messages if text.startswith("lr goes")]
    highest = "; the schedule's highest is about 7.1"
    assert told == [f"lr goes from {both}{highest}" for both in ("4 to 2", "5 to 2")]


@pytest.mark.parametrize(("mode", "is_told"), [("min", True), ("max", False)])
def test_a_plateau_that_takes_the_worst_accuracy_for_the_best_is_told(
    mode: Any, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = linear_trainer(measure({1: 1.0}, "val/accuracy"), lr=1.0)
    plateau = ReduceLROnPlateau(trainer.optimizer, mode)
    trainer.register_hooks([LRScheduler(scheduler=plateau, metric="val/accuracy")])
    trainer.train(0, 2)
    assert ("mode='min' would take the worst 'val/accuracy'" in caplog.text) is is_told


def test_without_a_schedule_the_rates_of_the_default_hooks_are_only_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Two()
    wrappers = OptimWrapperDict(
        one=OptimWrapper(sgd(model.one, lr=0.5)), two=OptimWrapper(sgd(model.two))
    )
    trainer = StepTrainer(model, [torch.zeros(2, 4)], wrappers)
    saver = Checkpointer(model, tmp_path, trainer=trainer)
    trainer.register_hooks(default_hooks(checkpointer=saver, checkpoint_period=10))
    with caplog.at_level(logging.INFO, "hooktrain"):
        trainer.train(0, 2)
    assert recorded(trainer, "one.lr") == [0.5, 0.5]
    assert recorded(trainer, "two.lr") == [0.1, 0.1]
    told = [text for text in caplog.messages if "learning rate" in text]
    assert told == ["No schedule is given: the learning rate is only recorded"]


def measure(values: dict[int, float], name: str = "val") -> CallbackHook:
    return CallbackHook(
        after_step=lambda t: (
            t.iter in values and t.after_evaluation({name: values[t.iter]})
        )
    )


def test_a_plateau_steps_after_each_evaluation() -> None:
    trainer = linear_trainer(measure({1: 1.0, 3: 1.0, 5: 1.0}), lr=1.0)
    plateau = ReduceLROnPlateau(trainer.optimizer, factor=0.25, patience=0)
    trainer.register_hooks([LRScheduler(scheduler=plateau, metric="val")])
    trainer.train(0, 8)
    assert recorded(trainer) == [1.0] * 4 + [0.25] * 2 + [0.0625] * 2


def test_a_plateau_judges_results_and_no_metric_of_the_training() -> None:
    put = CallbackHook(after_step=lambda t: t.storage.put_scalar("val", 1.0 + t.iter))
    trainer = linear_trainer(put, measure({1: 1.0, 3: 1.0}), lr=1.0)
    plateau = ReduceLROnPlateau(trainer.optimizer, factor=0.25, patience=0)
    trainer.register_hooks([LRScheduler(scheduler=plateau, metric="val")])
    trainer.train(0, 6)
    assert recorded(trainer) == [1.0] * 4 + [0.25] * 2


def test_a_plateau_sees_the_last_evaluation_of_a_run_that_is_extended() -> None:
    def make() -> Any:
        trainer = linear_trainer(measure({1: 1.0, 3: 1.0, 5: 1.0}), lr=1.0)
        plateau = ReduceLROnPlateau(trainer.optimizer, factor=0.25, patience=0)
        trainer.register_hooks([LRScheduler(scheduler=plateau, metric="val")])
        return trainer

    whole, first, second = make(), make(), make()
    whole.train(0, 8)
    first.train(0, 4)
    second.load_state_dict(first.state_dict())
    second.train(max_iter=8)
    assert recorded(second) == recorded(whole)
    assert recorded(whole) == [1.0] * 4 + [0.25] * 2 + [0.0625] * 2


def test_several_optimizers_have_schedulers_by_name() -> None:
    model = Two()
    one = OptimWrapper(sgd(model.one, lr=0.5))
    wrappers = OptimWrapperDict(one=one, two=OptimWrapper(sgd(model.two, lr=2.0)))
    trainer = StepTrainer(model, [torch.zeros(2, 4)], wrappers)
    falling = StepLR(one.optimizer, 4, gamma=0.5)
    schedulers = {"one": falling, "two": LinearParamScheduler(1.0, 0.0)}
    trainer.register_hooks([LRScheduler(scheduler=schedulers)])
    trainer.train(0, 8)
    assert recorded(trainer, "one.lr") == [0.5] * 4 + [0.25] * 4
    assert recorded(trainer, "two.lr") == [2.0 * (1 - k / 8) for k in range(8)]


# State


def all_kinds(trainer: Any) -> list[Any]:
    optimizer = trainer.optimizer
    return [
        StepLR(optimizer, 3, gamma=0.5),
        ExponentialLR(optimizer, 0.9),
        ReduceLROnPlateau(optimizer, factor=0.5, patience=1),
    ]


def make() -> Any:
    trainer = linear_trainer(measure(dict.fromkeys(range(0, 20, 2), 1.0)), lr=0.5)
    trainer.epoch_length = 3
    trainer.register_hooks([LRScheduler(scheduler=all_kinds(trainer), metric="val")])
    return trainer


@pytest.mark.parametrize("at", [1, 5, 6, 13])
def test_a_list_of_all_kinds_goes_on_bit_for_bit(at: int) -> None:
    whole, first, second = make(), make(), make()
    whole.train(0, 20)
    first.train(0, at)
    second.load_state_dict(first.state_dict())
    second.train(max_iter=20)
    assert recorded(second)[-(20 - at) :] == recorded(whole)[at:]


@pytest.mark.parametrize(
    ("name", "schedulers", "there_are"),
    [("", slice(1), "{'': 1}"), ("", slice(2), "{'': 2}"), ("a", slice(3), "{'a': 3}")],
)
def test_the_state_of_other_schedulers_is_refused(
    name: str, schedulers: slice, there_are: str
) -> None:
    first, second = make(), linear_trainer()
    first.train(0, 2)
    given = {name: all_kinds(second)[schedulers]}
    second.epoch_length = 3
    second.register_hooks([LRScheduler({name: second.optimizer}, given, "val")])
    with pytest.raises(ValueError, match=re.escape(there_are)):
        second.load_state_dict(first.state_dict())
    assert second.done == 0


@pytest.mark.parametrize("left_out", [set(), {"optimizer"}, {"optimizer", "hooks"}])
def test_a_multiplier_continues_where_it_was_even_without_the_optimizers_state(
    left_out: Any,
) -> None:
    def make(*hooks: CallbackHook) -> Any:
        schedule = CosineParamScheduler(1.0, 0.0)
        return linear_trainer(LRScheduler(scheduler=schedule), *hooks)

    # The schedule is laid over max_iter, so the first part must know the whole length.
    stop = CallbackHook(after_step=lambda t: t.iter == 2 and t.request_stop("half way"))
    whole, first, second = make(), make(stop), make()
    whole.train(0, 8)
    first.train(0, 8)
    state = first.state_dict()
    second.load_state_dict({name: state[name] for name in state.keys() - left_out})
    second.train(max_iter=8)
    assert recorded(second)[-5:] == pytest.approx(recorded(whole)[3:], rel=1e-12)


@pytest.mark.parametrize("kind", [StepLR, None])
def test_without_the_state_of_the_hooks_a_schedule_begins_anew(kind: Any) -> None:
    def make() -> Any:
        trainer = linear_trainer(lr=8.0)
        optimizer = trainer.optimizer
        schedule = kind(optimizer, 2, 0.5) if kind else LinearParamScheduler(1.0, 0.5)
        trainer.register_hooks([LRScheduler(scheduler=schedule)])
        return trainer

    first, second = make(), make()
    first.train(0, 4)
    second.load_state_dict({"optimizer": first.state_dict()["optimizer"]})
    momenta = [
        trainer.optimizer.state[trainer.model.fc.bias]["momentum_buffer"]
        for trainer in (first, second)
    ]
    assert torch.equal(*momenta)
    second.train(max_iter=4)
    assert recorded(second) == recorded(first)


def test_a_new_rate_for_a_resumed_run_without_a_schedule_is_had_without_the_hooks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make(lr: float) -> tuple[SimpleTrainer, Checkpointer]:
        trainer = linear_trainer(lr=lr)
        saver = Checkpointer(trainer.model, tmp_path, trainer=trainer)
        trainer.register_hooks([PeriodicCheckpointer(saver, 2)])
        return trainer, saver

    first, _ = make(0.5)
    first.train(0, 2)
    second, saver = make(0.1)
    saver.resume_or_load("")
    assert second.optimizer.param_groups[0]["lr"] == 0.5
    assert "lr is 0.5, not 0.1. To use your lr, resume without the hooks" in caplog.text
    third, saver = make(0.1)
    parts = ["iteration", "optimizer", "data", "seed", "storage"]
    saver.resume_or_load("", checkpointables=[f"trainer.{part}" for part in parts])
    assert third.done == 2
    assert third.optimizer.param_groups[0]["lr"] == 0.1
    momenta = [
        trainer.optimizer.state[trainer.model.fc.bias]["momentum_buffer"]
        for trainer in (first, third)
    ]
    assert torch.equal(*momenta)


def test_a_scheduler_of_an_optimizer_that_was_replaced_is_refused() -> None:
    trainer = linear_trainer()
    trainer.register_hooks([LRScheduler(scheduler=StepLR(trainer.optimizer, 2))])
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=4.0)
    with pytest.raises(ValueError, match="another optimizer"):
        trainer.train(0, 2)


def test_a_multiplier_beside_another_schedule_is_refused() -> None:
    schedule = LinearParamScheduler(1.0, 0.0)
    for hooks in (
        [LRScheduler(scheduler=schedule), LRScheduler(scheduler=schedule)],
        [LRScheduler(scheduler=[schedule, ConstantParamScheduler(1.0)])],
    ):
        with pytest.raises(
            ValueError, match="a multiplier must be the only schedule of lr"
        ):
            linear_trainer(*hooks).train(0, 2)


def test_a_schedule_that_two_hooks_step_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = linear_trainer()
    schedule = StepLR(trainer.optimizer, 9)
    trainer.register_hooks([LRScheduler(scheduler=schedule) for _ in range(2)])
    trainer.train(0, 2)
    assert "step the scheduler too?" in caplog.text


@pytest.mark.parametrize("start", ["next run", "second stage"])
def test_a_rate_that_was_set_between_two_runs_is_told_with_the_one_that_counts(
    start: str, caplog: pytest.LogCaptureFixture
) -> None:
    schedule = LinearParamScheduler(1.0, 0.5)
    trainer = linear_trainer(LRScheduler(scheduler=schedule))
    trainer.train(0, 2)
    optimizer = trainer.optimizer
    if start == "second stage":
        hook = LRScheduler(scheduler=schedule)
        trainer = SimpleTrainer(trainer.model, trainer.data_loader, optimizer)
        trainer.register_hooks([hook])
    trainer.train(max_iter=4)
    assert caplog.text == ""  # the rate that a run has left is no mistake
    optimizer.param_groups[0]["lr"] = 0.001
    trainer.train(max_iter=8)
    assert "lr was set to [0.001]" in caplog.text
    assert caplog.text.count("initial_lr") == 1


def test_the_rate_that_a_checkpoint_loads_after_a_run_is_not_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = linear_trainer(LRScheduler(scheduler=LinearParamScheduler(1.0, 0.5)))
    states: list[Any] = []
    keep = CallbackHook(
        after_step=lambda t: (
            t.done == 2 and states.append(copy.deepcopy(t.state_dict()))
        )
    )
    trainer.register_hooks([keep])
    trainer.train(0, 4)
    trainer.load_state_dict(states[0])
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.075)
    trainer.train(max_iter=4)
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    assert "lr was set" not in caplog.text


def make_of_groups(split: bool) -> SimpleTrainer:
    model = LinearLoss()
    named = {"weight": model.fc.weight, "bias": model.fc.bias}
    names = [["weight"], ["bias"]] if split else [["weight", "bias"]]
    groups = [{"params": [named[n] for n in group]} for group in names]
    optimizer = torch.optim.SGD(groups, lr=8.0)
    trainer = SimpleTrainer(model, [torch.zeros(1, 4)], optimizer)
    trainer.register_hooks([LRScheduler(scheduler=LinearParamScheduler(1.0, 0.0))])
    return trainer


@pytest.mark.parametrize("split_first", [True, False])
@pytest.mark.parametrize("stop", [2, 6, 9])
def test_the_rates_go_on_when_a_group_is_split_or_two_are_merged(
    split_first: bool, stop: int, caplog: pytest.LogCaptureFixture
) -> None:
    whole = make_of_groups(split_first)
    whole.train(0, 12)
    first = make_of_groups(split_first)
    stop_there = CallbackHook(before_step=lambda t: 1 // (t.iter != stop))
    first.register_hooks([stop_there])
    with pytest.raises(ZeroDivisionError):
        first.train(0, 12)
    second = make_of_groups(not split_first)
    second.load_state_dict(first.state_dict())
    second.train(max_iter=12)
    rates = recorded(second)[-(12 - stop) :]
    assert rates == pytest.approx(recorded(whole)[stop:], rel=1e-12)
    # A multiplier has all that it needs from the optimizer.
    assert "groups" not in caplog.text


def test_a_rate_that_a_hook_sets_after_the_schedule_has_begun_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def set_rate(trainer: Any) -> None:
        trainer.optimizer.param_groups[0]["lr"] = 0.01

    trainer = linear_trainer(LRScheduler(scheduler=LinearParamScheduler(1.0, 0.0)))
    trainer.register_hooks([CallbackHook(before_train=set_rate)])
    trainer.train(0, 3)
    assert "changed outside LRScheduler: expected [0.1" in caplog.text


# What is refused


def test_a_scheduler_that_waits_for_its_first_step_is_not_told_as_idle(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = linear_trainer()
    scheduler = StepLR(trainer.optimizer, step_size=100)
    trainer.register_hooks([LRScheduler(scheduler=scheduler)])
    trainer.train(0, 3)
    assert "a scheduler that is not stepped" not in caplog.text


@pytest.mark.parametrize("steps", [True, False])
def test_a_scheduler_that_no_hook_of_the_trainer_steps_is_told(
    steps: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    trainer = linear_trainer()
    scheduler = StepLR(trainer.optimizer, step_size=1)
    step = CallbackHook(after_step=lambda _: scheduler.step() if steps else None)
    trainer.register_hooks([step])
    trainer.train(0, 3)
    [told] = [each for each in caplog.records if "a scheduler that" in each.message]
    assert told.levelno == (logging.INFO if steps else logging.WARNING)
    assert ("only your own hooks may save" in told.message) == steps


def test_of_groups_of_one_parameter_the_most_common_rate_is_recorded() -> None:
    groups = [{"params": [torch.zeros(1)], "lr": lr} for lr in (0.3, 0.1, 0.2, 0.1)]
    assert LRScheduler.get_best_param_group_id(torch.optim.SGD(groups)) == 1
    groups[2]["params"] = [torch.zeros(1), torch.zeros(1)]
    assert LRScheduler.get_best_param_group_id(torch.optim.SGD(groups)) == 2


def test_before_a_run_there_is_no_state() -> None:
    assert LRScheduler(scheduler=LinearParamScheduler(1.0, 0.0)).state_dict() == {}


def test_a_warm_up_and_a_fall_are_no_mistakes(caplog: pytest.LogCaptureFixture) -> None:
    falling = CosineParamScheduler(1.0, 0.0)
    for schedule in (
        WarmupParamScheduler(ConstantParamScheduler(1.0), 0.001, 0.1),
        WarmupParamScheduler(falling, 0.001, 0.1),
    ):
        linear_trainer(LRScheduler(scheduler=schedule)).train(0, 20)
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == []


def test_a_schedule_of_epochs_follows_another_loader() -> None:
    trainer = linear_trainer()  # of four batches

    def change(trainer: Any) -> None:
        if trainer.iter == 8:
            trainer.data_loader = batches(2)

    schedule = StepLR(trainer.optimizer, 1, gamma=0.5)
    hook = LRScheduler(scheduler=schedule, by_epoch=True)
    trainer.register_hooks([hook, CallbackHook(before_step=change)])
    trainer.train(0, 12)
    expected = [0.1] * 4 + [0.05] * 4 + [0.025] * 2 + [0.0125] * 2
    assert recorded(trainer) == pytest.approx(expected)


def test_epochs_without_a_length_are_refused_before_the_first_step() -> None:
    trainer = linear_trainer()
    trainer.data_loader = (batch for batch in batches(4))  # no length
    schedule = StepLR(trainer.optimizer, 2)
    trainer.register_hooks([LRScheduler(scheduler=schedule, by_epoch=True)])
    with pytest.raises(ValueError, match="epoch_length"):
        trainer.train(0, 1)
    assert "total_loss" not in trainer.storage.histories()
