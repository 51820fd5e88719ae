"""Judges models: running them over a data set, metrics of what they say, and expected results."""

from hooktrain.evaluation.evaluator import (
    DatasetEvaluator,
    DatasetEvaluators,
    inference_context,
    inference_on_dataset,
)
from hooktrain.evaluation.metrics import ClassificationEvaluator
from hooktrain.evaluation.testing import flatten_results_dict, print_csv_format, verify_results

__all__ = [
    "ClassificationEvaluator",
    "DatasetEvaluator",
    "DatasetEvaluators",
    "flatten_results_dict",
    "inference_context",
    "inference_on_dataset",
    "print_csv_format",
    "verify_results",
]
