import dataclasses
import doctest
import math
import pickle
from typing import Any

import pytest

from hooktrain.solver import composite, schedule
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

# Every schedule with its final value.
FINAL: list[tuple[ParamScheduler, float]] = [
    (ConstantParamScheduler(0.3), 0.3),
    (CosineParamScheduler(0.1, 0.001), 0.001),
    (ExponentialParamScheduler(2.0, 0.25), 0.5),
    (LinearParamScheduler(0.1, 0.7), 0.7),
    (PolynomialDecayParamScheduler(0.1, 0.9), 0.0),
    (MultiStepParamScheduler([0.1, 0.01, 0.001], milestones=[3, 6, 9]), 0.001),
    (StepParamScheduler(9, [0.1, 0.01, 0.001]), 0.001),
    (StepWithFixedGammaParamScheduler(0.5, 2, 0.5, 9), 0.125),
    (
        CompositeParamScheduler(
            [ConstantParamScheduler(1.0), LinearParamScheduler(1.0, 0.3)],
            [0.3, 0.7],
            ["fixed", "rescaled"],
        ),
        0.3,
    ),
    (WarmupParamScheduler(CosineParamScheduler(1.0, 0.2), 0.001, 0.1), 0.2),
    (WarmupParamScheduler(StepParamScheduler(9, [1.0, 0.5]), 0.0, 0.1, "constant", True), 0.5),
]


EVERY_SCHEDULE = pytest.mark.parametrize(
    ("scheduler", "final"), FINAL, ids=lambda v: type(v).__name__
)


def values(scheduler: ParamScheduler, steps: int) -> list[float]:
    """The values at each step of a run, as a trainer asks for them."""
    return [scheduler(step / steps) for step in range(steps)]


@pytest.mark.parametrize("module", [schedule, composite])
def test_the_examples_in_the_docstrings_are_right(module: Any) -> None:
    failed, tried = doctest.testmod(module)
    assert failed == 0
    assert tried >= 6


@EVERY_SCHEDULE
def test_the_end_of_the_run_gives_the_final_value(scheduler: ParamScheduler, final: float) -> None:
    assert scheduler(1.0) == final
    assert scheduler(1.0 + 1e-7) == final


@EVERY_SCHEDULE
def test_a_hair_before_the_start_counts_as_the_start(
    scheduler: ParamScheduler, final: float
) -> None:
    assert scheduler(-1e-7) == scheduler(0.0) == scheduler(0)


@EVERY_SCHEDULE
@pytest.mark.parametrize("where", [-0.01, 1.00001, 2, math.nan, math.inf])
def test_progress_outside_of_the_run_is_refused_with_its_value(
    scheduler: ParamScheduler, final: float, where: float
) -> None:
    with pytest.raises(ValueError, match=rf"where must be in \[0, 1\].*{where!r}"):
        scheduler(where)


@EVERY_SCHEDULE
def test_schedules_can_be_pickled_and_compared(scheduler: ParamScheduler, final: float) -> None:
    copy = pickle.loads(pickle.dumps(scheduler))
    assert copy == scheduler
    assert hash(copy) == hash(scheduler)
    assert copy(0.37) == scheduler(0.37)
    assert copy != LinearParamScheduler(0.25, 0.25)


@EVERY_SCHEDULE
def test_a_repr_can_be_evaluated(scheduler: ParamScheduler, final: float) -> None:
    assert eval(repr(scheduler)) == scheduler


@EVERY_SCHEDULE
def test_schedules_cannot_be_changed(scheduler: ParamScheduler, final: float) -> None:
    name = dataclasses.fields(scheduler)[0].name  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(scheduler, name, 1.0)


def test_cosine_follows_half_a_period() -> None:
    expected = [0.1, 0.0975528, 0.0904508, 0.0793893, 0.0654508]
    expected += [0.05, 0.0345492, 0.0206107, 0.0095492, 0.0024472]
    assert values(CosineParamScheduler(0.1, 0.0), 10) == pytest.approx(expected, abs=1e-6)


def test_exponential_multiplies_by_the_same_factor_each_step() -> None:
    assert values(ExponentialParamScheduler(start_value=1.0, decay=1 / 16), 4) == [
        1,
        0.5,
        0.25,
        1 / 8,
    ]


def test_linear_goes_straight() -> None:
    expected = [0.01, 0.01225, 0.0145, 0.01675]
    assert values(LinearParamScheduler(0.01, 0.019), 4) == pytest.approx(expected)


def test_polynomial_decay_follows_its_power() -> None:
    scheduler = PolynomialDecayParamScheduler(base_value=0.1, power=1)
    assert values(scheduler, 5) == pytest.approx([0.1, 0.08, 0.06, 0.04, 0.02])
    assert PolynomialDecayParamScheduler(4.0, power=0.5)(0.75) == 2.0


def test_a_power_of_zero_keeps_the_base_value_to_the_end() -> None:
    assert PolynomialDecayParamScheduler(0.1, power=0)(1.0) == 0.1


@pytest.mark.parametrize(
    "kwargs",
    [
        {"num_updates": 9, "milestones": [3, 6]},
        {"num_updates": 9},
        {"milestones": [3, 6, 9]},
        {"milestones": [30, 60, 90]},
    ],
)
def test_multi_step_changes_at_its_milestones(kwargs: dict[str, Any]) -> None:
    scheduler = MultiStepParamScheduler(values=[0.3, 0.2, 0.1], **kwargs)
    assert values(scheduler, 9) == [0.3] * 3 + [0.2] * 3 + [0.1] * 3


def test_an_uneven_split_rounds_up_all_parts_but_the_last() -> None:
    assert MultiStepParamScheduler([3, 2, 1], num_updates=8).milestones == (3, 6)


@pytest.mark.parametrize("steps", [90_000, 999_983, 20_000_000])
def test_a_milestone_takes_effect_at_exactly_its_iteration(steps: int) -> None:
    milestones = [steps // 3, steps // 2 + 1, steps - 1]
    scheduler = MultiStepParamScheduler([3, 2, 1, 0], num_updates=steps, milestones=milestones)
    around = [scheduler((m + offset) / steps) for m in milestones for offset in (-1, 0)]
    assert around == [3, 2, 2, 1, 1, 0]


def test_step_gives_each_value_an_equal_share() -> None:
    scheduler = StepParamScheduler(values=[0.1, 0.01, 0.001], num_updates=12)
    assert values(scheduler, 12) == [0.1] * 4 + [0.01] * 4 + [0.001] * 4


def test_step_with_fixed_gamma_decays_as_often_as_told() -> None:
    scheduler = StepWithFixedGammaParamScheduler(
        base_value=1, num_decays=3, gamma=0.1, num_updates=8
    )
    expected = [1, 1, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001]
    assert values(scheduler, 8) == pytest.approx(expected)
