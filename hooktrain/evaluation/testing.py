"""Logs the results of an evaluation, and compares them with expected ones."""

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hooktrain.utils.logger import log_once
from hooktrain.utils.names import Numbers

logger = logging.getLogger(__name__)

# The results of an evaluation: metrics by name, or by task and name.
Results = dict[str, Any]
EvalFunction = Callable[[], Results | None]


def print_csv_format(results: Mapping[str, Any]) -> None:
    """Log results in a form that can be pasted into a spreadsheet.

    Each task has three lines: its name, the names of its metrics, and their values, with four
    decimals.

    Args:
        results: the results of an evaluation: tasks with their metrics, or single values.
    """
    for task, metrics in results.items():
        if isinstance(metrics, Mapping):
            numbers = as_numbers(metrics)
            logger.info("copypaste: Task: %s", task)
            logger.info("copypaste: %s", ",".join(numbers))
            values = [f"{value:.4f}" for value in numbers.values()]
            logger.info("copypaste: %s", ",".join(values))
        else:
            logger.info("copypaste: %s=%s", task, metrics)


def verify_results(
    expected: Iterable[tuple[str, str, float, float]], results: Mapping[str, Any]
) -> bool:
    """Check that an evaluation came out as expected.

    Example:
        >>> verify_results([("classification", "accuracy", 99.0, 0.5)],
        ...                {"classification": {"accuracy": 99.2}})
        True

    Args:
        expected: tuples (task, metric, value, tolerance). The metric must differ from the value by
            at most the tolerance. Levels of nested results are joined by "/", as in
            ("ema/classification", "accuracy", 99.0, 0.5).
        results: the results of the evaluation.

    Returns:
        True.

    Raises:
        ValueError: if an expectation is not met, or its metric is missing.
    """
    numbers = as_numbers(results)
    for task, metric, value, tolerance in expected:
        name = f"{task}/{metric}"
        found = numbers.get(name, math.nan)
        # In this form of the comparison, NaN is a failure.
        if not abs(found - value) <= tolerance:
            raise ValueError(
                f"{name} is {found!r}, expected {value!r} within {tolerance!r}: the results are "
                f"{numbers}"
            )
    logger.info("Results are as expected.")
    return True


def flatten_results_dict(results: Mapping[str, Any]) -> Results:
    """Flatten nested dicts into one, whose keys are the nested keys joined by "/".

    Example:
        >>> flatten_results_dict({"bbox": {"AP": 40.0}, "seconds": 3})
        {'bbox/AP': 40.0, 'seconds': 3}
    """
    flat = {}
    for key, value in results.items():
        if isinstance(value, Mapping):
            for name, leaf in flatten_results_dict(value).items():
                flat[f"{key}/{name}"] = leaf
        else:
            flat[str(key)] = value
    return flat


def as_numbers(results: Mapping[str, Any]) -> Numbers:
    """The results that are numbers, in a flat dictionary. A warning names the others, once a run.

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
        log_once(
            logger.warning,
            f"Results that are not a number are skipped: {left_out}. For several numbers return "
            "the mean, or each under its own name (torchmetrics' ClasswiseWrapper)",
        )
    return numbers
