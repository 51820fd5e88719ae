import logging
from typing import Any

import pytest

from hooktrain.evaluation import flatten_results_dict, print_csv_format, verify_results

RESULTS = {"classification": {"accuracy": 99.25, "val_loss": 0.031}}


def printed(caplog: pytest.LogCaptureFixture, results: dict[str, Any]) -> list[str]:
    with caplog.at_level(logging.INFO):
        print_csv_format(results)
    return caplog.messages


def test_nested_results_get_keys_with_slashes() -> None:
    nested = {"a": {"b": {"c": 1}, "d": 2.5}, "e": "text", 7: {8: None}}
    assert flatten_results_dict(nested) == {"a/b/c": 1, "a/d": 2.5, "e": "text", "7/8": None}
    assert nested["a"] == {"b": {"c": 1}, "d": 2.5}  # left as it was


def test_an_empty_task_has_no_keys() -> None:
    assert flatten_results_dict({"a": {}}) == {}


def test_results_are_printed_as_rows_to_paste(caplog: pytest.LogCaptureFixture) -> None:
    assert printed(caplog, {"bbox": {"AP": 40.123456, "AR": 7}, "seconds": 3}) == [
        "copypaste: Task: bbox",
        "copypaste: AP,AR",
        "copypaste: 40.1235,7.0000",
        "copypaste: seconds=3.0000",
    ]


def test_values_that_are_no_numbers_and_names_with_a_dash_are_printed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert printed(caplog, {"t": {"AP-person": 1.5, "note": "n/a", "none": None}}) == [
        "copypaste: Task: t",
        "copypaste: AP-person,note,none",
        "copypaste: 1.5000,n/a,None",
    ]


def test_deeper_levels_are_printed_with_slashes(caplog: pytest.LogCaptureFixture) -> None:
    assert printed(caplog, {"ema": {"classification": {"accuracy": 99.0}}}) == [
        "copypaste: Task: ema",
        "copypaste: classification/accuracy",
        "copypaste: 99.0000",
    ]


@pytest.mark.parametrize(
    "expected",
    [
        [],
        [("classification", "accuracy", 99.0, 0.25)],
        [("classification", "accuracy", 99.5, 0.25), ("classification", "val_loss", 0.0, 0.1)],
    ],
)
def test_results_within_the_tolerance_are_verified(expected: Any) -> None:
    assert verify_results(expected, RESULTS) is True


def test_nested_results_are_verified_by_slashes() -> None:
    assert verify_results([("ema/classification", "accuracy", 99.0, 1)], {"ema": RESULTS})


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
    with pytest.raises(ValueError, match="not as expected") as error:
        verify_results(expected, results)
    assert str(error.value).splitlines()[1:-1] == [
        "- a/x is 1.0, expected 2.0 with a tolerance of 0.5",
        "- a/nan is nan, expected 1.0 with a tolerance of 100.0",
        "- a/inf is inf, expected inf with a tolerance of inf",
        "- a/na is missing; did you mean 'a/nan'?",
        "- zzz/metric is missing; there is 'a/x', 'a/nan', 'a/inf'",
    ]


def test_an_infinite_value_fails_whatever_the_tolerance() -> None:
    with pytest.raises(ValueError, match="a/x is inf"):
        verify_results([("a", "x", 1.0, float("inf"))], {"a": {"x": float("inf")}})
