import copy
import doctest
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from hooktrain.solver import schedule
from hooktrain.solver.schedule import (
    CompositeParamScheduler,
    ConstantParamScheduler,
    CosineParamScheduler,
    ExponentialParamScheduler,
    LinearParamScheduler,
    LRMultiplier,
    MultiStepParamScheduler,
    ParamScheduler,
    PolynomialDecayParamScheduler,
    WarmupParamScheduler,
)
from scheduler_toys import rates, sgd

# Every schedule with its final value.
FINAL: list[tuple[ParamScheduler, float]] = [
    (ConstantParamScheduler(0.3), 0.3),
    (CosineParamScheduler(0.1, 0.001), 0.001),
    (ExponentialParamScheduler(2.0, 0.25), 0.5),
    (LinearParamScheduler(0.1, 0.7), 0.7),
    (PolynomialDecayParamScheduler(0.1, 0.9), 0.0),
    (MultiStepParamScheduler([0.1, 0.01, 0.001], milestones=[3, 6, 9]), 0.001),
    (
        CompositeParamScheduler(
            [ConstantParamScheduler(1.0), LinearParamScheduler(1.0, 0.3)],
            [0.3, 0.7],
            ["fixed", "rescaled"],
        ),
        0.3,
    ),
    (WarmupParamScheduler(CosineParamScheduler(1.0, 0.2), 0.001, 0.1), 0.2),
]


EVERY_SCHEDULE = pytest.mark.parametrize(
    ("scheduler", "final"), FINAL, ids=lambda v: type(v).__name__
)


def values(scheduler: ParamScheduler, steps: int) -> list[float]:
    """The values at each step of a run, as a trainer asks for them."""
    return [scheduler(step / steps) for step in range(steps)]


def test_the_examples_in_the_docstrings_are_right() -> None:
    failed, tried = doctest.testmod(schedule)
    assert failed == 0
    assert tried >= 16


@EVERY_SCHEDULE
def test_the_end_of_a_run_has_the_final_value(
    scheduler: ParamScheduler, final: float
) -> None:
    assert scheduler(1.0) == final


@EVERY_SCHEDULE
def test_schedules_can_be_pickled(scheduler: ParamScheduler, final: float) -> None:
    twin = pickle.loads(pickle.dumps(scheduler))
    assert twin == scheduler != LinearParamScheduler(0.25, 0.25)
    assert twin(0.37) == scheduler(0.37)


@pytest.mark.parametrize("steps", [90_000, 999_983, 20_000_000])
def test_a_milestone_takes_effect_at_exactly_its_iteration(steps: int) -> None:
    milestones = [steps // 3, steps // 2 + 1, steps - 1]
    scheduler = MultiStepParamScheduler(
        [3, 2, 1, 0], num_updates=steps, milestones=milestones
    )
    around = [scheduler((m + offset) / steps) for m in milestones for offset in (-1, 0)]
    assert around == [3, 2, 2, 1, 1, 0]
    # An uneven split rounds up all parts but the last.
    assert MultiStepParamScheduler([3, 2, 1], num_updates=8).milestones == [3, 6]


# Schedules made of others


def test_rescaled_parts_see_a_progress_of_their_own() -> None:
    parts = [LinearParamScheduler(0.0, 1.0), CosineParamScheduler(1.0, 0.0)]
    scheduler = CompositeParamScheduler(parts, [0.4, 0.6], ["rescaled"] * 2)
    cosine = [(1 + math.cos(math.pi * k / 6)) / 2 for k in range(6)]
    assert values(scheduler, 10) == pytest.approx([0, 0.25, 0.5, 0.75, *cosine])


def constants(count: int) -> list[ParamScheduler]:
    return [ConstantParamScheduler(k) for k in range(count)]


def test_parts_meet_where_their_lengths_say_despite_rounding() -> None:
    scheduler = CompositeParamScheduler(constants(10), [0.1] * 10, ["rescaled"] * 10)
    assert values(scheduler, 10) == list(range(10))
    parts = [ConstantParamScheduler(5), LinearParamScheduler(0.0, 1.0)]
    lengths = [0.9999, 0.0001]
    scheduler = CompositeParamScheduler(parts, lengths, ["rescaled"] * 2)
    assert (scheduler(0.9999 - 5e-10), scheduler(1.0)) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("lengths", "used"),
    [
        ([0.0, 1.0, 0.0], {1}),
        ([0.0, 1.0005, 0.0], {1}),
        ([0.1] * 10 + [0.0], {0, 5, 9}),  # which rounding would leave a little
    ],
)
def test_parts_of_length_zero_are_never_used(
    lengths: list[float], used: set[int]
) -> None:
    count = len(lengths)
    scheduler = CompositeParamScheduler(constants(count), lengths, ["rescaled"] * count)
    assert {scheduler(where) for where in (0.0, 0.55, 1.0)} == used


def test_of_lengths_that_nearly_sum_to_1_the_last_one_lasts_until_the_end() -> None:
    lengths = [0.3333, 0.6666]
    line = LinearParamScheduler(0.0, 1.0)
    scheduler = CompositeParamScheduler([line, line], lengths, ["fixed", "rescaled"])
    assert scheduler(0.3) == 0.3
    assert scheduler(0.9999) == (0.9999 - 0.3333) / (1 - 0.3333)
    assert scheduler(1.0) == 1.0
    assert lengths == [0.3333, 0.6666]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # It covers the beginning: from 0.1 * 1.0 to the value at 0.4, which is 0.6.
        ((0.1, 0.4), [0.1, 0.225, 0.35, 0.475, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
        # It comes before.
        (
            (0.2, 0.5, "linear", True),
            [0.2, 0.36, 0.52, 0.68, 0.84, 1.0, 0.8, 0.6, 0.4, 0.2],
        ),
        ((0.5, 0.2, "constant"), [0.5, 0.5, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
        # It may last the whole run.
        (
            (0.5, 1.0, "linear", True),
            [0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95],
        ),
        ((0.5, 1.0), [0.5 - 0.05 * step for step in range(10)]),
    ],
)
def test_a_warm_up_covers_the_beginning_or_comes_before_it(
    arguments: Any, expected: list[float]
) -> None:
    scheduler = WarmupParamScheduler(LinearParamScheduler(1.0, 0.0), *arguments)
    assert values(scheduler, 10) == pytest.approx(expected)


@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("method", ["linear", "constant"])
def test_a_warm_up_rounds_as_its_formula(method: str, rescale: bool) -> None:
    cosine = CosineParamScheduler(0.7, 0.01)
    length = 5 / 97
    scheduler = WarmupParamScheduler(cosine, 0.3, length, method, rescale)
    start = 0.3 * cosine(0.0)
    end = cosine(0.0 if rescale else length)
    expected = []
    for step in range(97):
        share = step / 97 / length
        if step <= 4 and method == "linear":
            expected.append(end * share + start * (1 - share))
        elif step <= 4:
            expected.append(start)
        elif rescale:
            expected.append(cosine((step / 97 - length) / (1 - length)))
        else:
            expected.append(cosine(step / 97))
    assert values(scheduler, 97) == expected


ONE = ConstantParamScheduler(1.0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: MultiStepParamScheduler([1, 2]), "milestones"),
        (lambda: MultiStepParamScheduler([1, 2], milestones=[3]), "1 milestones"),
        (
            lambda: MultiStepParamScheduler([1, 2, 3], milestones=[3, 6]),
            r"milestones=\[3, 6\].*num_updates",
        ),
        (lambda: MultiStepParamScheduler([1, 2, 3], 2), "num_updates=2"),
        (lambda: MultiStepParamScheduler([1, 2, 3], 9, [6, 3]), r"\[6, 3\]"),
        (lambda: CompositeParamScheduler([ONE], [1.0], []), r"\[\]"),
        (lambda: CompositeParamScheduler([ONE], [0.9], ["fixed"]), r"\[0.9"),
        (lambda: CompositeParamScheduler([ONE], [1.0], ["x"]), "'x'"),
        (lambda: WarmupParamScheduler(ONE, 0.1, 1000), "warmup_length=1000"),
        (lambda: WarmupParamScheduler(ONE, 0.1, 0.1, "exp"), "'exp'"),
    ],
)
def test_a_wrong_argument_is_refused_at_construction(
    build: Callable[[], ParamScheduler], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build()


# What multiplies a learning rate


LINE = LinearParamScheduler(1.0, 0.0)


def run(scheduler: LRMultiplier, steps: int) -> list[float]:
    """The rate of the first group at each step."""
    used = []
    for _ in range(steps):
        used.append(rates(scheduler.optimizer)[0])
        scheduler.step()
    return used


def test_each_group_gets_its_base_rate_times_the_schedule() -> None:
    optimizer = sgd(0.5, 2.0)
    step = optimizer.step.__func__  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of the order of steps
        scheduler = LRMultiplier(optimizer, LINE, max_iter=4)
        assert isinstance(scheduler, LRScheduler)
        seen = []
        for _ in range(4):
            seen.append(rates(optimizer))
            scheduler.step()
            state = copy.deepcopy(optimizer.state_dict())
            optimizer.load_state_dict(state)  # replaces its groups
    assert seen == [[0.5, 2.0], [0.375, 1.5], [0.25, 1.0], [0.125, 0.5]]
    assert optimizer.step.__func__ is step  # type: ignore[attr-defined]


def test_steps_after_the_last_iteration_keep_the_final_rate() -> None:
    scheduler = LRMultiplier(sgd(1.0), LINE, max_iter=5)
    assert run(scheduler, 9) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2] + [0.0] * 4)
    assert scheduler.last_epoch == 9


def test_a_rate_in_a_tensor_is_filled_in_place() -> None:
    lr = torch.tensor(0.5)
    optimizer = sgd(lr, 0.25)
    scheduler = LRMultiplier(optimizer, LINE, max_iter=4)
    scheduler.step(2)
    assert rates(optimizer) == [lr, 0.125]
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == 0.25
    assert scheduler.get_last_lr() == [0.25, 0.125]


def test_a_loaded_state_sets_the_rates_at_once() -> None:
    first = LRMultiplier(sgd(1.0, 2.0), LINE, max_iter=4)
    first.step(2)
    optimizer = sgd(1.0, 2.0)
    second = LRMultiplier(optimizer, LINE, max_iter=4)
    second.load_state_dict(first.state_dict())
    assert rates(optimizer) == second.get_last_lr() == [0.5, 1.0]
    second.step()
    assert rates(optimizer) == [0.25, 0.5]


def test_a_run_continues_from_its_last_iteration_without_any_saved_state() -> None:
    before, after = sgd(0.3), sgd(7.0)
    whole = run(LRMultiplier(before, LINE, max_iter=10), 10)
    after.load_state_dict(before.state_dict())  # has the base rate
    for optimizer in (sgd(0.3), after):
        assert (
            run(LRMultiplier(optimizer, LINE, max_iter=10, last_iter=5), 4) == whole[6:]
        )


def test_a_group_added_later_is_multiplied_too() -> None:
    optimizer = sgd(1.0)
    scheduler = LRMultiplier(optimizer, LINE, max_iter=4)
    scheduler.step()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 8.0})
    scheduler.step()
    assert rates(optimizer) == [0.5, 4.0]
