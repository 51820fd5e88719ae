"""Shows the results of an evaluation and compares them with expected ones."""

import logging
import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

logger = logging.getLogger(__name__)


def print_csv_format(results: Mapping[str, Any]) -> None:
    """Log results so that they can be pasted into a spreadsheet.

    Each task gives three lines: its name, the names of its metrics, and their values. Numbers have
    four decimals, other values are shown as text.

    Args:
        results: what an evaluation returned: tasks with their metrics, or single values.
    """
    for task, metrics in results.items():
        if not isinstance(metrics, Mapping):
            logger.info("copypaste: %s=%s", task, _text(metrics))
            continue
        flat = flatten_results_dict(metrics)
        names = ",".join(flat)
        values = ",".join(map(_text, flat.values()))
        logger.info("copypaste: Task: %s", task)
        logger.info("copypaste: %s", names)
        logger.info("copypaste: %s", values)


def verify_results(
    expected: Iterable[tuple[str, str, float, float]], results: Mapping[str, Any]
) -> bool:
    """Check that an evaluation came out as expected.

    Example:
        >>> verify_results([("classification", "accuracy", 99.0, 0.5)],
        ...                {"classification": {"accuracy": 99.2}})
        True

    Args:
        expected: tuples (task, metric, value, tolerance). The metric must be finite and differ from
            the value by at most the tolerance. Levels of nested results are joined by "/", as in
            ("ema/classification", "accuracy", 99.0, 0.5).
        results: what the evaluation returned.

    Returns:
        True.

    Raises:
        ValueError: if an expectation is not met or its metric is missing. The message lists all
            such expectations, and the results.
    """
    flat = flatten_results_dict(results)
    failures = []
    for task, metric, value, tolerance in expected:
        name = f"{task}/{metric}"
        if name not in flat:
            failures.append(f"{name} is missing")
            continue
        found = flat[name]
        difference = abs(float(found) - value)
        # Written in this form, a NaN or infinity on either side is a failure.
        if not difference <= tolerance < math.inf:
            wanted = f"expected {value!r} with a tolerance of {tolerance!r}"
            failures.append(f"{name} is {found!r}, {wanted}")
    if failures:
        failures.insert(0, "results are not as expected:")
        lines = "\n- ".join(failures)
        raise ValueError(f"{lines}\nThe results are {flat}")
    logger.info("Results are as expected.")
    return True


def flatten_results_dict(results: Mapping[str, Any]) -> dict[str, Any]:
    """Turn nested dictionaries into a flat one, whose keys are the nested keys joined by "/".

    Example:
        >>> flatten_results_dict({"bbox": {"AP": 40.0}, "seconds": 3})
        {'bbox/AP': 40.0, 'seconds': 3}
    """
    flat: dict[str, Any] = {}
    for key, value in results.items():
        if not isinstance(value, Mapping):
            flat[str(key)] = value
            continue
        inner = flatten_results_dict(value)
        for name, leaf in inner.items():
            flat[f"{key}/{name}"] = leaf
    return flat


def as_numbers(results: Mapping[str, Any]) -> dict[str, float]:
    """The results that are numbers, in a flat dictionary. A warning names the others.

    Raises:
        TypeError: if the results are not a dictionary.
    """
    if not isinstance(results, Mapping):
        raise TypeError(
            f"eval_function must return a dict of results, but got {results!r}"
        )
    numbers = {}
    left_out = []
    for name, value in flatten_results_dict(results).items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError, RuntimeError):  # the last is a tensor's
            left_out.append(name)
    if left_out:
        logger.warning("Results that are not a number are left out: %s", left_out)
    return numbers


def _text(value: Any) -> str:
    if isinstance(value, Real):
        return f"{float(value):.4f}"
    return str(value)
