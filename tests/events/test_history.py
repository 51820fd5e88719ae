import math
from pathlib import Path

import numpy as np
import pytest
import torch

from hooktrain.utils.events import HistoryBuffer


def filled(*values: float, max_length: int = 10_000) -> HistoryBuffer:
    history = HistoryBuffer(max_length)
    for value in values:
        history.update(value)
    return history


def test_the_iteration_of_a_value_is_its_number_unless_given() -> None:
    history = filled(5.0, 6.0)
    history.update(7.0, iteration=40)
    history.update(8.0)
    assert history.values() == [(5.0, 0), (6.0, 1), (7.0, 40), (8.0, 3)]
    assert history.latest() == 8.0
    assert len(history) == 4


def test_median_and_avg_agree_with_numpy_over_every_window() -> None:
    values = np.random.default_rng(0).normal(size=11).tolist()
    history = filled(*values)
    for window in range(1, 14):
        assert history.median(window) == np.median(values[-window:])
        assert history.avg(window) == pytest.approx(
            np.mean(values[-window:]), rel=1e-14
        )
    assert history.global_avg() == pytest.approx(np.mean(values), rel=1e-14)


def test_the_global_average_recovers_from_a_nan_and_an_infinity() -> None:
    assert filled(1.0, math.nan, math.inf, -math.inf, 3.0).global_avg() == 2.0
    assert math.isnan(filled(math.nan).global_avg())


def test_a_nan_shows_as_long_as_it_is_in_the_window() -> None:
    history = filled(1.0, 9.0, math.nan, 2.0, 3.0)
    assert math.isnan(history.median(3))
    assert math.isnan(history.avg(3))
    assert history.median(2) == 2.5
    assert history.avg(2) == 2.5


def test_windows_of_iterations_end_at_the_last_value_and_a_late_one_has_its_own() -> (
    None
):
    history = HistoryBuffer()
    for iteration in (0, 10, 10, 29):
        history.update(float(iteration), iteration)
    assert [len(history.recent(w)) for w in (1, 19, 20, 29, 30)] == [1, 1, 3, 3, 4]
    assert history.since(10) == [(10.0, 10), (10.0, 10), (29.0, 29)]
    assert history.since(30) == []
    assert history.since(-1) == history.values()
    history.update(7.0, 12)
    assert history.recent(20) == [7.0]


def test_a_state_goes_through_a_file_without_pickled_code(tmp_path: Path) -> None:
    history = filled(0.1, math.nan, *map(float, range(2, 1030)), max_length=1025)
    torch.save(history.state_dict(), tmp_path / "state.pth")
    state = torch.load(tmp_path / "state.pth", weights_only=True)
    assert state["values"].dtype == torch.float64
    assert state["iterations"].dtype == torch.int64
    loaded = filled(77.0)
    loaded.load_state_dict(state)
    assert loaded.values() == history.values()[-1000:]
    assert loaded.global_avg() == history.global_avg()
    for one in (history, loaded):
        one.update(5.0)
    assert loaded.latest() == history.latest()
    assert loaded.tail(1001) == history.tail(1001)
    assert loaded.global_avg() == history.global_avg()
