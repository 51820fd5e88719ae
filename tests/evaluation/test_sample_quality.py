import logging
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gloo import run_ranks
from hooktrain.evaluation import SampleQualityEvaluator, print_csv_format

NAMES = ("cat", "dog", "007")


class Shown(nn.Module):
    """Takes an "image" of shape (1, 1, 3) for logits; drops most of it in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.9)

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        return self.dropout(batch["image"].flatten(1))


def samples(*probabilities: list[float]) -> Tensor:
    return torch.tensor(probabilities).log().view(-1, 1, 1, 3)


def evaluate(*batches: Tensor, **options: Any) -> dict[str, float]:
    evaluator = SampleQualityEvaluator(Shown(), NAMES, **options)
    for batch in batches:
        evaluator.process(None, batch)
    return evaluator.evaluate()["samples"]


def test_classes_confidence_and_entropy() -> None:
    quality = evaluate(
        samples([0.8, 0.1, 0.1], [0.6, 0.3, 0.1], [0.7, 0.2, 0.1]), samples([0.2, 0.3, 0.5])
    )
    assert list(quality) == ["classes", "confidence", "entropy", "count"]
    assert quality["classes"] == 2
    assert quality["confidence"] == pytest.approx((0.8 + 0.6 + 0.7 + 0.5) / 4)
    assert quality["entropy"] == pytest.approx(0.75 * math.log(4 / 3) + 0.25 * math.log(4))
    assert quality["count"] == 4


def test_one_image_again_and_again_has_one_class_and_no_entropy() -> None:
    quality = evaluate(samples(*[[0.0, 1.0, 0.0]] * 5))
    assert (quality["classes"], quality["confidence"], quality["entropy"]) == (1, 1.0, 0.0)
    assert math.copysign(1, quality["entropy"]) == 1


def test_equal_shares_have_the_largest_entropy() -> None:
    quality = evaluate(samples([0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.1, 0.8]))
    assert quality["entropy"] == pytest.approx(math.log(3))


def test_the_classifier_is_judged_on_real_images() -> None:
    logits = samples([0.8, 0.1, 0.1], [0.6, 0.3, 0.1], [0.7, 0.2, 0.1], [0.2, 0.3, 0.5])
    labels = torch.tensor([0, 1, 0, 2])
    real = [{"image": x, "label": y} for x, y in zip(logits.split(3), labels.split(3), strict=True)]
    assert evaluate(samples([1.0, 0.0, 0.0]), real=real)["classifier_accuracy"] == 0.75


def test_a_reset_forgets_the_samples() -> None:
    evaluator = SampleQualityEvaluator(Shown(), NAMES)
    evaluator.process(None, samples([0.8, 0.1, 0.1]))
    evaluator.reset()
    evaluator.process(None, samples([0.1, 0.1, 0.8]))
    quality = evaluator.evaluate()["samples"]
    assert (quality["classes"], quality["count"]) == (1, 1)


def test_the_classifier_judges_in_evaluation_mode_and_keeps_its_own() -> None:
    classifier = Shown().train()
    evaluator = SampleQualityEvaluator(classifier, NAMES)
    evaluator.process(None, samples([0.5, 0.25, 0.25]))
    assert evaluator.evaluate()["samples"]["confidence"] == pytest.approx(0.5)
    assert classifier.training


def test_the_log_has_the_classes_and_a_line_to_copy(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    print_csv_format({"samples": evaluate(samples([0.0, 1.0, 0.0]))})
    assert "| dog     |         1 |" in caplog.text
    assert "copypaste: classes,confidence,entropy,count" in caplog.text
    assert "copypaste: 1.0000,1.0000,0.0000,1.0000" in caplog.text


def evaluate_as_rank() -> dict[str, float]:
    parts = [samples([0.8, 0.1, 0.1], [0.6, 0.3, 0.1]), samples([0.2, 0.3, 0.5])]
    image, label = samples([0.8, 0.1, 0.1]), torch.tensor([dist.get_rank()])
    return evaluate(parts[dist.get_rank()], real=[{"image": image, "label": label}])


def test_the_samples_of_all_ranks_count() -> None:
    first, second = run_ranks(evaluate_as_rank, 2)
    assert first == second
    assert first["classes"] == 2
    assert first["confidence"] == pytest.approx((0.8 + 0.6 + 0.5) / 3)
    assert (first["count"], first["classifier_accuracy"]) == (3, 0.5)


def test_no_sample_no_real_image_and_other_classes_are_refused() -> None:
    with pytest.raises(ValueError, match="no sample to evaluate"):
        evaluate()
    with pytest.raises(ValueError, match="real gave no image"):
        evaluate(samples([1.0, 0.0, 0.0]), real=[])
    with pytest.raises(ValueError, match=r"logits of shape \(N, 3\).*but gave \(1, 2\)"):
        evaluate(torch.zeros(1, 1, 1, 2))
    with pytest.raises(ValueError, match="class_names must be a list of names, but got 'abc'"):
        SampleQualityEvaluator(Shown(), "abc")
