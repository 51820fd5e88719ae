"""An evaluator that a configuration can name, whose results depend on random numbers."""

from typing import Any

import torch

from hooktrain.demos import ClassificationEvaluator


class NoisyEvaluator(ClassificationEvaluator):
    """Adds to its results a random number of the evaluation."""

    def evaluate(self) -> Any:
        results = super().evaluate()
        results["classification"]["noise"] = torch.rand(()).item()
        return results
