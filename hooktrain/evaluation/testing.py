"""Shows the results of an evaluation and compares them with expected ones."""

import logging
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from numbers import Real
from typing import Any

logger = logging.getLogger(__name__)


def print_csv_format(results: Mapping[str, Any]) -> None:
    """Log results so that they can be pasted into a spreadsheet.

    Each task gives three lines: its name, the names of its metrics, and their values. Numbers have
    four decimals; whatever else is there is shown as it is.

    Args:
        results: what an evaluation returned: tasks with their metrics, or single values.
    """
    if not isinstance(results, Mapping):
        raise TypeError(f"results must be a dict, but got {results!r}")
    for task, metrics in results.items():
        if isinstance(metrics, Mapping):
            flat = flatten_results_dict(metrics)
            logger.info("copypaste: Task: %s", task)
            logger.info("copypaste: %s", ",".join(flat))
            logger.info("copypaste: %s", ",".join(_text(value) for value in flat.values()))
        else:
            logger.info("copypaste: %s=%s", task, _text(metrics))


def verify_results(
    expected: Iterable[tuple[str, str, float, float]], results: Mapping[str, Any]
) -> bool:
    """Check that an evaluation came out as expected.

    Example:
        >>> verify_results([("classification", "accuracy", 99.0, 0.5)],
        ...                {"classification": {"accuracy": 99.2}})
        True

    Args:
        expected: (task, metric, value, tolerance): the metric must be finite and differ from the
            value by no more than the tolerance. Levels of nested results are joined by "/", as in
            ("ema/classification", "accuracy", 99.0, 0.5).
        results: what the evaluation returned.

    Returns:
        True.

    Raises:
        ValueError: an expectation is not met, or its metric is missing; lists all such, and shows
            the results. Also for an entry that is no group of four.
    """
    flat = flatten_results_dict(results)
    failures = []
    for entry in expected:
        if isinstance(entry, str) or len(entry) != 4:
            raise ValueError(
                f"expected results must be (task, metric, value, tolerance), but got {entry!r}"
            )
        failures += _failure(*entry, flat)
    if failures:
        raise ValueError(
            "results are not as expected:\n"
            + "\n".join(f"- {failure}" for failure in failures)
            + f"\nThe results are {flat}"
        )
    logger.info("Results are as expected.")
    return True


def flatten_results_dict(results: Mapping[str, Any]) -> dict[str, Any]:
    """Turn nested dictionaries into one, whose keys join those of the levels by "/".

    Example:
        >>> flatten_results_dict({"bbox": {"AP": 40.0}, "seconds": 3})
        {'bbox/AP': 40.0, 'seconds': 3}

    Raises:
        ValueError: two values would get the same key.
    """
    flat: dict[str, Any] = {}
    for key, value in results.items():
        below = {"": value} if not isinstance(value, Mapping) else flatten_results_dict(value)
        for name, leaf in below.items():
            full = f"{key}/{name}" if isinstance(value, Mapping) else str(key)
            if full in flat:
                raise ValueError(f"results hold {full!r} twice, on different levels")
            flat[full] = leaf
    return flat


def _failure(
    task: str, metric: str, value: float, tolerance: float, flat: Mapping[str, Any]
) -> list[str]:
    """What is wrong with one metric; nothing if it is as expected."""
    name = f"{task}/{metric}"
    if name not in flat:
        close = get_close_matches(name, flat, n=1)
        return [f"{name} is missing" + (f"; did you mean {close[0]!r}?" if close else "")]
    try:
        # Written so that anything not finite, on either side, fails.
        if abs(float(flat[name]) - value) <= tolerance < float("inf"):
            return []
    except (TypeError, ValueError):
        return [f"{name} is {flat[name]!r}, which is no number"]
    return [f"{name} is {flat[name]!r}, expected {value!r} with a tolerance of {tolerance!r}"]


def _text(value: Any) -> str:
    return f"{float(value):.4f}" if isinstance(value, Real) else str(value)
