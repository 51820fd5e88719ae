import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from hooktrain.solver import param_scheduler
from hooktrain.solver.composite import WarmupParamScheduler
from hooktrain.solver.lr_multiplier import LRMultiplier
from hooktrain.solver.schedule import (
    ConstantParamScheduler,
    CosineParamScheduler,
    LinearParamScheduler,
    MultiStepParamScheduler,
    ParamScheduler,
    StepParamScheduler,
    StepWithFixedGammaParamScheduler,
)

LINE = LinearParamScheduler(1.0, 0.0)


def sgd(*lrs: float | torch.Tensor) -> torch.optim.SGD:
    groups = [{"params": [nn.Parameter(torch.zeros(2))], "lr": lr} for lr in lrs]
    return torch.optim.SGD(groups, lr=1.0)


def rates(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [group["lr"] for group in optimizer.param_groups]


def run(scheduler: LRMultiplier, steps: int) -> list[float]:
    """The rate of the first group at each step."""
    used = []
    for _ in range(steps):
        used.append(rates(scheduler.optimizer)[0])
        scheduler.step()
    return used


def test_each_group_gets_its_base_rate_times_the_schedule() -> None:
    optimizer = sgd(0.5, 2.0)
    scheduler = LRMultiplier(optimizer, LINE, max_iter=4)
    assert isinstance(scheduler, LRScheduler)
    seen = []
    for _ in range(4):
        seen.append(rates(optimizer))
        scheduler.step()
    assert seen == [[0.5, 2.0], [0.375, 1.5], [0.25, 1.0], [0.125, 0.5]]


def test_the_rates_are_those_of_a_lambda_of_torch() -> None:
    schedule = WarmupParamScheduler(CosineParamScheduler(1.0, 0.01), 0.001, 0.1)
    ours, theirs = sgd(0.3), sgd(0.3)
    reference = LambdaLR(theirs, lambda step: schedule(step / 50))
    expected = []
    for _ in range(50):
        expected += rates(theirs)
        theirs.step()
        reference.step()
    assert run(LRMultiplier(ours, schedule, max_iter=50), 50) == expected


def test_the_warm_up_applies_to_the_first_step() -> None:
    optimizer = sgd(1.0)
    LRMultiplier(optimizer, WarmupParamScheduler(LINE, 0.25, 0.5), max_iter=10)
    assert rates(optimizer) == [0.25]


def test_milestones_in_iterations_change_the_rate_at_these_iterations() -> None:
    schedule = MultiStepParamScheduler([1, 0.5, 0.25], milestones=[10, 15, 20])
    used = run(LRMultiplier(sgd(4.0), schedule, max_iter=20), 20)
    assert used == [4.0] * 10 + [2.0] * 5 + [1.0] * 5


@pytest.mark.parametrize(
    ("schedule", "final"),
    [
        (ConstantParamScheduler(0.5), 0.5),
        (StepParamScheduler(5, [1.0, 0.25]), 0.25),
        (StepWithFixedGammaParamScheduler(1.0, 2, 0.5, 5), 0.25),
        (LINE, 0.0),
    ],
)
def test_steps_after_the_last_iteration_keep_the_final_rate(
    schedule: ParamScheduler, final: float
) -> None:
    scheduler = LRMultiplier(sgd(1.0), schedule, max_iter=5)
    assert run(scheduler, 9)[5:] == [final] * 4
    assert scheduler.last_epoch == 9


def test_no_warning_about_the_order_of_steps() -> None:
    optimizer = sgd(1.0)
    step = optimizer.step.__func__  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LRMultiplier(optimizer, LINE, max_iter=5).step()
    assert optimizer.step.__func__ is step  # type: ignore[attr-defined]


def test_a_step_can_jump_to_an_iteration() -> None:
    scheduler = LRMultiplier(sgd(1.0), LINE, max_iter=4)
    scheduler.step(3)
    assert scheduler.get_last_lr() == [0.25]
    scheduler.step()
    assert scheduler.last_epoch == 4


def test_a_rate_in_a_tensor_is_filled_in_place_and_read_as_a_float() -> None:
    lr = torch.tensor(0.5)
    optimizer = sgd(lr, 0.25)
    scheduler = LRMultiplier(optimizer, LINE, max_iter=4)
    scheduler.step()
    scheduler.step()
    assert rates(optimizer) == [lr, 0.125]
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == 0.25
    assert [type(value) for value in scheduler.get_last_lr()] == [float, float]
    assert scheduler.get_last_lr() == [0.25, 0.125]
    assert scheduler.state_dict()["base_lrs"] == [0.5, 0.25]


def test_the_rates_given_out_are_a_copy() -> None:
    scheduler = LRMultiplier(sgd(1.0), LINE, max_iter=4)
    scheduler.get_last_lr().clear()
    assert scheduler.get_last_lr() == [1.0]
    scheduler.state_dict()["base_lrs"].clear()
    scheduler.step()
    assert scheduler.get_last_lr() == [0.75]


def test_the_state_holds_base_rates_and_the_step_only() -> None:
    scheduler = LRMultiplier(sgd(0.5, 2.0), LINE, max_iter=4)
    scheduler.step()
    assert scheduler.state_dict() == {"base_lrs": [0.5, 2.0], "last_epoch": 1}


def test_loading_a_state_sets_the_rates_at_once() -> None:
    first = LRMultiplier(sgd(1.0, 2.0), LINE, max_iter=4)
    first.step()
    first.step()
    optimizer = sgd(8.0, 8.0)
    second = LRMultiplier(optimizer, LINE, max_iter=4)
    second.load_state_dict(first.state_dict())
    assert rates(optimizer) == second.get_last_lr() == [0.5, 1.0]
    second.step()
    assert rates(optimizer) == [0.25, 0.5]


def test_a_loaded_optimizer_is_still_scheduled() -> None:
    optimizer = sgd(1.0)
    scheduler = LRMultiplier(optimizer, LINE, max_iter=4)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # replaces its groups
    scheduler.step()
    assert rates(optimizer) == [0.75]


def test_a_run_continues_from_its_last_iteration_without_any_saved_state() -> None:
    whole = run(LRMultiplier(sgd(0.3), LINE, max_iter=10), 10)
    rest = run(LRMultiplier(sgd(0.3), LINE, max_iter=10, last_iter=5), 4)
    assert rest == whole[6:]


def test_a_run_continues_from_the_base_rate_in_the_optimizer_state() -> None:
    before = sgd(0.3)
    whole = run(LRMultiplier(before, LINE, max_iter=10), 6)
    after = sgd(7.0)
    after.load_state_dict(before.state_dict())
    scheduler = LRMultiplier(after, LINE, max_iter=10, last_iter=5)
    assert scheduler.base_lrs == [0.3]
    assert scheduler.get_last_lr()[0] == 0.3 * LINE(0.6) != whole[5]


def test_a_group_added_later_is_an_error() -> None:
    optimizer = sgd(1.0)
    scheduler = LRMultiplier(optimizer, LINE, max_iter=4)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ValueError, match=r"now has 2 parameter groups.*made for 1"):
        scheduler.step()


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ({"base_lrs": [1.0]}, KeyError, "no 'last_epoch'"),
        ({"last_epoch": 3}, KeyError, "no 'base_lrs'"),
    ],
)
def test_a_foreign_state_is_refused_and_changes_nothing(
    state: dict[str, Any], error: type[Exception], message: str
) -> None:
    scheduler = LRMultiplier(sgd(1.0), LINE, max_iter=4)
    with pytest.raises(error, match=message):
        scheduler.load_state_dict(state)
    assert scheduler.state_dict() == {"base_lrs": [1.0], "last_epoch": 0}


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"multiplier": lambda where: where}, TypeError, "multiplier must be a ParamScheduler"),
        ({"multiplier": 0.5}, TypeError, "multiplier must be a ParamScheduler.*: 0.5"),
        ({"optimizer": nn.Linear(1, 1)}, TypeError, "optimizer must be a torch.optim.Optimizer"),
        ({"max_iter": 0}, ValueError, "max_iter must be at least 1: 0"),
        ({"max_iter": -3}, ValueError, "max_iter must be at least 1: -3"),
        ({"last_iter": -2}, ValueError, "last_iter must be at least -1: -2"),
    ],
)
def test_a_wrong_argument_is_refused(
    kwargs: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {"optimizer": sgd(1.0), "multiplier": LINE, "max_iter": 4}
    with pytest.raises(error, match=message):
        LRMultiplier(**(arguments | kwargs))


def test_it_can_be_imported_from_where_it_was_first() -> None:
    assert param_scheduler.LRMultiplier is LRMultiplier
