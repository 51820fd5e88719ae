"""Metrics for MMEngine."""

from typing import Any

import torch

from gloo import run_ranks
from hooktrain.compat.mmengine import BaseMetric
from hooktrain.evaluation import inference_on_dataset
from hooktrain.utils import comm


class Spread(BaseMetric):
    default_prefix = "spread"

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.extend(data_samples)

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        return {"all": [float(result) for result in results]}


def evaluate(data: list[list[float]]) -> dict[str, Any]:
    batches = [torch.tensor(data[comm.get_rank()])]
    return inference_on_dataset(lambda batch: batch + 1, batches, Spread())


def test_a_metric_gets_the_results_of_all_ranks_in_order() -> None:
    of_ranks = run_ranks(evaluate, 2, [[1.0, 2.0], [3.0]])
    assert of_ranks == [{"spread/all": [2.0, 3.0, 4.0]}] * 2
    metric = Spread(prefix="")  # which takes the default
    metric.process(None, torch.ones(3))
    assert metric.evaluate(size=2) == {"spread/all": [1.0, 1.0]}


class Classes(Spread):
    """A metric that works out what it needs of the data set, as some for keypoints."""

    @BaseMetric.dataset_meta.setter
    def dataset_meta(self, dataset_meta: Any) -> None:
        self._dataset_meta = dataset_meta
        self.count = len(dataset_meta["classes"])


def test_a_metric_takes_what_it_is_told_of_the_data_set_in_its_own_way() -> None:
    metric, plain = Classes(), Spread()
    assert metric.dataset_meta is plain.dataset_meta is None
    plain.dataset_meta = metric.dataset_meta = {"classes": ("a", "b")}
    assert metric.dataset_meta is plain.dataset_meta
    assert metric.count == 2


class OfAll(Spread):
    def evaluate(self, size: int) -> dict[str, Any]:
        return super().evaluate(size) | {"asked": size}


def test_an_evaluate_that_wants_the_size_is_given_none() -> None:
    batches = [torch.tensor([1.0, 2.0])]
    metrics = inference_on_dataset(lambda batch: batch, batches, OfAll())
    assert metrics == {"spread/all": [1.0, 2.0], "asked": None}
