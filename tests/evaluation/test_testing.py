import logging
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
    assert printed(caplog, {"bbox": box, "seconds": 3}) == [
        "Results that are not a number are left out: ['note']",
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


def test_all_failures_are_listed_in_one_error() -> None:
    results = {"a": {"x": 1.0, "nan": float("nan"), "inf": float("inf")}}
    expected = [
        ("a", "x", 2.0, 0.5),
        ("a", "nan", 1.0, 100.0),
        ("a", "inf", float("inf"), float("inf")),
        ("a", "na", 1.0, 1.0),
        ("zzz", "metric", 1.0, 1.0),
        ("a", "x", 1.0, 0.0),
    ]
    with pytest.raises(ValueError, match="a/x") as error:
        verify_results(expected, results)
    failures = [
        "a/x is not 2.0 within 0.5",
        "a/nan is not 1.0 within 100.0",
        "a/inf is not inf within inf",
        "a/na is not 1.0 within 1.0",
        "zzz/metric is not 1.0 within 1.0",
    ]
    assert str(failures) in str(error.value)
    assert "{'a/x': 1.0, 'a/nan': nan, 'a/inf': inf}" in str(error.value)
