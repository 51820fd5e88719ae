"""The curves are pure functions."""

import doctest
from collections.abc import Callable
from typing import Any

import pytest

from hooktrain.solver import param_curves
from hooktrain.solver.param_curves import (
    CURVES,
    at_maximum,
    constant,
    cosine_annealing,
    cosine_restart,
    each_period,
    linear,
    one_cycle,
    poly,
)


def test_the_examples_of_the_curves_are_right() -> None:
    result = doctest.testmod(param_curves)
    assert result.attempted >= len(CURVES)
    assert result.failed == 0


@pytest.mark.parametrize(
    ("curve", "value"), [(constant, 1 / 3), (linear, 1 / 3), (cosine_annealing, 1.0), (poly, 1.0)]
)
def test_a_range_of_one_step_has_the_first_value(curve: Callable[..., float], value: float) -> None:
    assert curve(0, 1) == value


@pytest.mark.parametrize(
    ("curve", "ends"),
    [
        (linear, (1 / 3, 1.0)),
        (poly, (1.0, 0.0)),
        (lambda k, n: one_cycle(k, n, final_div_factor=5.0), (0.04, 0.008)),
    ],
)
def test_the_last_step_has_exactly_the_final_value(curve: Any, ends: tuple[float, float]) -> None:
    assert (curve(0, 30), curve(29, 30)) == ends


def test_a_period_begins_with_its_weight_and_after_the_last_one_the_value_stays() -> None:
    args = {"periods": [2, 3], "restart_weights": [1.0, 0.5]}
    assert [each_period(k, 0, 8.0, **args) for k in range(6)] == [8.0, None, 4.0, None, None, None]
    assert cosine_restart(9, 100, periods=[2, 3]) == cosine_restart(4, 100, periods=[2, 3]) > 0


def test_a_maximum_may_be_that_of_each_group() -> None:
    assert [at_maximum(3, i, 0.1, eta_max=[1.0, 3.0]) for i in range(3)] == [1.0, 3.0, 3.0]
    assert at_maximum(3, 1, 0.1, eta_max=2.0) == 2.0
