"""Schedules made of others."""

import math
from collections.abc import Callable

import pytest

from hooktrain.solver.composite import CompositeParamScheduler, WarmupParamScheduler
from hooktrain.solver.schedule import (
    ConstantParamScheduler,
    CosineParamScheduler,
    ExponentialParamScheduler,
    LinearParamScheduler,
    MultiStepParamScheduler,
    ParamScheduler,
    PolynomialDecayParamScheduler,
    StepParamScheduler,
    StepWithFixedGammaParamScheduler,
)


def values(scheduler: ParamScheduler, steps: int) -> list[float]:
    """The values at each step of a run, as a trainer asks for them."""
    return [scheduler(step / steps) for step in range(steps)]


def test_rescaled_parts_run_from_their_start_to_their_end() -> None:
    scheduler = CompositeParamScheduler(
        schedulers=[LinearParamScheduler(0.0, 1.0), CosineParamScheduler(1.0, 0.0)],
        lengths=[0.4, 0.6],
        interval_scaling=["rescaled", "rescaled"],
    )
    cosine = [(1 + math.cos(math.pi * k / 6)) / 2 for k in range(6)]
    assert values(scheduler, 10) == pytest.approx([0, 0.25, 0.5, 0.75, *cosine])


def test_fixed_parts_see_the_progress_of_the_whole_run() -> None:
    line, constant = LinearParamScheduler(0.0, 1.0), ConstantParamScheduler(0.42)
    scheduler = CompositeParamScheduler([line, constant, line], [0.2, 0.3, 0.5], ["fixed"] * 3)
    expected = [0, 0.1, 0.42, 0.42, 0.42, 0.5, 0.6, 0.7, 0.8, 0.9]
    assert values(scheduler, 10) == pytest.approx(expected)


def test_parts_meet_where_their_lengths_say_despite_rounding() -> None:
    parts = [ConstantParamScheduler(k) for k in range(10)]
    scheduler = CompositeParamScheduler(parts, [0.1] * 10, ["rescaled"] * 10)
    assert values(scheduler, 10) == list(range(10))


@pytest.mark.parametrize("lengths", [[0.0, 1.0, 0.0], [0.0, 1.0005, 0.0]])
def test_parts_of_length_zero_are_never_used(lengths: list[float]) -> None:
    line = LinearParamScheduler(0.0, 1.0)
    parts = [ConstantParamScheduler(7), line, ConstantParamScheduler(8)]
    scheduler = CompositeParamScheduler(parts, lengths, ["rescaled"] * 3)
    assert [scheduler(w) for w in (0.0, 0.5, 1.0)] == pytest.approx([0.0, 0.5, 1.0], abs=1e-3)


def test_a_last_part_of_length_zero_is_not_used_for_the_rounding_of_the_others() -> None:
    parts = [*[ConstantParamScheduler(k) for k in range(10)], ConstantParamScheduler(99)]
    lengths = [0.1] * 10 + [0.0]
    assert sum(lengths) != 1.0
    assert CompositeParamScheduler(parts, lengths, ["rescaled"] * 11)(1.0) == 9


def test_a_short_part_starts_at_its_start_despite_rounding() -> None:
    line = LinearParamScheduler(0.0, 1.0)
    scheduler = CompositeParamScheduler(
        [ConstantParamScheduler(5.0), line], [0.9999, 0.0001], ["rescaled"] * 2
    )
    assert scheduler(0.9999 - 5e-10) == 0.0
    assert scheduler(1.0) == 1.0


def test_composite_leaves_the_lists_of_its_caller_alone() -> None:
    parts: list[ParamScheduler] = [ConstantParamScheduler(1), ConstantParamScheduler(2)]
    lengths, scalings = [0.3333, 0.6666], ["fixed", "rescaled"]
    scheduler = CompositeParamScheduler(parts, lengths, scalings)
    assert lengths == [0.3333, 0.6666]
    assert scheduler.lengths == (0.3333, 1 - 0.3333)
    lengths[0] = 0.9
    parts.reverse()
    assert scheduler(0.0) == 1


def test_a_fixed_warm_up_covers_the_beginning_of_the_schedule() -> None:
    line = LinearParamScheduler(1.0, 0.0)
    scheduler = WarmupParamScheduler(line, warmup_factor=0.1, warmup_length=0.4)
    # From 0.1 * 1.0 to the value at 0.4, which is 0.6.
    expected = [0.1, 0.225, 0.35, 0.475, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]
    assert values(scheduler, 10) == pytest.approx(expected)


def test_a_rescaled_warm_up_comes_before_the_schedule() -> None:
    line = LinearParamScheduler(1.0, 0.0)
    scheduler = WarmupParamScheduler(line, 0.2, 0.5, rescale_interval=True)
    expected = [0.2, 0.36, 0.52, 0.68, 0.84, 1.0, 0.8, 0.6, 0.4, 0.2]
    assert values(scheduler, 10) == pytest.approx(expected)


def test_a_constant_warm_up_holds_its_value() -> None:
    line = LinearParamScheduler(1.0, 0.0)
    scheduler = WarmupParamScheduler(line, 0.5, 0.2, "constant")
    assert values(scheduler, 5) == pytest.approx([0.5, 0.8, 0.6, 0.4, 0.2])


@pytest.mark.parametrize("rescale", [False, True])
def test_a_warm_up_of_no_length_is_no_warm_up(rescale: bool) -> None:
    cosine = CosineParamScheduler(1.0, 0.0)
    scheduler = WarmupParamScheduler(cosine, 0.001, 0.0, rescale_interval=rescale)
    assert values(scheduler, 7) == values(cosine, 7)


@pytest.mark.parametrize(("rescale", "end"), [(False, 0.5), (True, 1.0)])
def test_a_warm_up_may_last_the_whole_run(rescale: bool, end: float) -> None:
    line = LinearParamScheduler(1.0, 0.5)
    scheduler = WarmupParamScheduler(line, 0.0, 1.0, rescale_interval=rescale)
    assert [scheduler(w) for w in (0.0, 0.5, 1.0)] == [0.0, end / 2, end]


def test_a_schedule_of_ones_own_needs_one_method_only() -> None:
    class Triangle(ParamScheduler):
        def __call__(self, where: float) -> float:
            return 1 - abs(2 * where - 1)

    scheduler = WarmupParamScheduler(Triangle(), 1.0, 0.25)
    assert [scheduler(w) for w in (0.25, 0.5, 1.0)] == [0.5, 1.0, 0.0]
    with pytest.raises(NotImplementedError, match="ParamScheduler must define"):
        ParamScheduler()(0.5)


ONE = ConstantParamScheduler(1.0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ExponentialParamScheduler(1.0, -0.5), "decay must not be negative: -0.5"),
        (lambda: PolynomialDecayParamScheduler(1.0, -1), "power must not be negative: -1"),
        (lambda: MultiStepParamScheduler([1, 2]), "one of num_updates and milestones"),
        (lambda: MultiStepParamScheduler([1, 2], milestones=[3]), r"2 values need 2 milestones"),
        (lambda: MultiStepParamScheduler([1, 2], 9, [3, 6]), r"2 values need 1 milestones"),
        (lambda: MultiStepParamScheduler([1, 2], 9, 3), "must be a list of numbers: 3"),  # type: ignore[arg-type]
        (lambda: MultiStepParamScheduler([1, 2, 3], num_updates=2), "at least 3.*: 2"),
        (lambda: MultiStepParamScheduler([1, 2], 9, [9]), r"num_updates=9: \[9\]"),
        (lambda: MultiStepParamScheduler([1, 2], 9, [0]), r"must increase.*\[0\]"),
        (lambda: MultiStepParamScheduler([1, 2, 3], 9, [6, 3]), r"must increase.*\[6, 3\]"),
        (lambda: MultiStepParamScheduler([], 9), r"values must be a list of at least one.*\[\]"),
        (lambda: StepParamScheduler(0, [1.0]), "num_updates must be positive: 0"),
        (lambda: StepParamScheduler(9, []), r"values must be a list of at least one.*\[\]"),
        (lambda: StepParamScheduler(9, None), "values must be a list.*None"),  # type: ignore[arg-type]
        (lambda: StepWithFixedGammaParamScheduler(-1, 1, 0.1, 9), "base_value.*number: -1"),
        (lambda: StepWithFixedGammaParamScheduler(1, 1, 0, 9), "gamma.*number: 0"),
        (lambda: StepWithFixedGammaParamScheduler(1, 0, 0.1, 9), "num_decays.*integer: 0"),
        (lambda: StepWithFixedGammaParamScheduler(1, 1.5, 0.1, 9), "num_decays.*1.5"),  # type: ignore[arg-type]
        (lambda: StepWithFixedGammaParamScheduler(1, 1, 0.1, -9), "num_updates.*integer: -9"),
        (lambda: CompositeParamScheduler([], [], []), "at least 1: 0, 0 and 0 entries"),
        (lambda: CompositeParamScheduler([ONE], [0.5, 0.5], ["fixed"]), "1, 2 and 1 entries"),
        (lambda: CompositeParamScheduler([ONE], [1.0], ["fixed"] * 2), "1, 1 and 2 entries"),
        (lambda: CompositeParamScheduler([ONE], [1.0], []), "1, 1 and 0 entries"),
        (lambda: CompositeParamScheduler([ONE] * 2, [0.5, 0.4], ["fixed"] * 2), r"sum to 1: \[0.5"),
        (lambda: CompositeParamScheduler([ONE] * 2, [1.5, -0.5], ["fixed"] * 2), "not be negative"),
        (lambda: CompositeParamScheduler([ONE], [1.0], ["linear"]), "interval_scaling.*'linear'"),
        (lambda: WarmupParamScheduler(ONE, -0.1, 0.1), "warmup_factor must not be negative: -0.1"),
        (lambda: WarmupParamScheduler(ONE, 0.1, 1000), r"in \[0, 1\].*max_iter.*: 1000"),
        (lambda: WarmupParamScheduler(ONE, 0.1, 0.1, "exp"), "'linear' or 'constant': 'exp'"),
    ],
)
def test_a_wrong_argument_is_refused_at_construction(
    build: Callable[[], ParamScheduler], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    "build",
    [
        lambda: CompositeParamScheduler([max], [1.0], ["fixed"]),  # type: ignore[list-item]
        lambda: WarmupParamScheduler(0.1, 0.1, 0.1),  # type: ignore[arg-type]
    ],
)
def test_what_is_made_of_schedules_takes_nothing_else(build: Callable[[], ParamScheduler]) -> None:
    with pytest.raises(TypeError, match="must be a ParamScheduler"):
        build()
