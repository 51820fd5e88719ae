import logging
import math
from typing import Any

import pytest
import torch

from hooktrain.evaluation import flatten_results_dict, print_csv_format, verify_results

RESULTS = {"classification": {"accuracy": 99.25, "val_loss": 0.031}}


def printed(caplog: pytest.LogCaptureFixture, results: dict[str, Any]) -> list[str]:
    with caplog.at_level(logging.INFO):
        print_csv_format(results)
    return caplog.messages


def test_nested_results_get_keys_with_slashes() -> None:
    nested = {"a": {"b": {"c": 1}, "d": 2.5}, "e": "text", 7: {8: None}, "f": {}}
    assert flatten_results_dict(nested) == {
        "a/b/c": 1,
        "a/d": 2.5,
        "e": "text",
        "7/8": None,
    }
    assert nested["a"] == {"b": {"c": 1}, "d": 2.5}  # left as it was


def test_results_are_printed_as_rows_to_paste(caplog: pytest.LogCaptureFixture) -> None:
    box = {
        "AP-person": 40.123456,
        "AR": torch.tensor(7),
        "note": "n/a",
        "deep": {"er": 1},
    }
    left_out, *rows = printed(caplog, {"bbox": box, "seconds": 3})
    assert "['note']" in left_out
    assert rows == [
        "copypaste: Task: bbox",
        "copypaste: AP-person,AR,deep/er",
        "copypaste: 40.1235,7.0000,1.0000",
        "copypaste: seconds=3",
    ]


@pytest.mark.parametrize(
    "expected",
    [
        [],
        [("classification", "accuracy", 99.0, 0.25)],
        [
            ("classification", "accuracy", 99.5, 0.25),
            ("ema/classification", "val_loss", 0.0, 0.1),
        ],
    ],
)
def test_results_within_the_tolerance_are_verified_nested_ones_by_slashes(
    expected: Any,
) -> None:
    assert verify_results(expected, {**RESULTS, "ema": RESULTS}) is True


@pytest.mark.parametrize(
    ("metric", "value", "tolerance", "found"),
    [
        *(("x", 2.0, 0.5, "1.0"), ("x", 1.0, -0.5, "1.0"), ("nan", 1.0, 100.0, "nan")),
        *(("inf", 1.0, 100.0, "inf"), ("inf", math.inf, math.inf, "inf")),
        ("na", 1.0, 1.0, "nan"),
    ],
)
def test_what_is_not_as_expected_or_missing_is_an_error(
    metric: str, value: float, tolerance: float, found: str
) -> None:
    results = {"a": {"x": 1.0, "nan": math.nan, "inf": math.inf}}
    fine = ("a", "x", 1.0, 0.0)
    with pytest.raises(ValueError, match=f"^a/{metric} is {found}, .*{value}") as error:
        verify_results([fine, ("a", metric, value, tolerance)], results)
    assert "{'a/x': 1.0, 'a/nan': nan, 'a/inf': inf}" in str(error.value)
