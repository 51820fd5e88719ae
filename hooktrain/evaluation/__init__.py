"""Evaluation: running a model over a data set, metrics of its outputs, and expected results."""

from hooktrain.evaluation.evaluator import (
    DatasetEvaluator as DatasetEvaluator,
    DatasetEvaluators as DatasetEvaluators,
    MetricEvaluator as MetricEvaluator,
    inference_context as inference_context,
    inference_on_dataset as inference_on_dataset,
)
from hooktrain.evaluation.testing import (
    flatten_results_dict as flatten_results_dict,
    print_csv_format as print_csv_format,
    verify_results as verify_results,
)
