import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from gloo import run_ranks
from hooktrain.evaluation import ClassificationEvaluator

NAMES = ["cat", "dog", "007"]


def evaluate(*batches: tuple[Any, Tensor], names: list[str] = NAMES) -> dict[str, float]:
    evaluator = ClassificationEvaluator(names)
    for labels, logits in batches:
        evaluator.process({"label": labels}, logits)
    return evaluator.evaluate()["classification"]


def random_samples(count: int, classes: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(classes, (count,), generator=generator)
    return labels, 3 * torch.randn(count, classes, generator=generator)


def logits_for(predictions: list[int], classes: int = 3) -> Tensor:
    return F.one_hot(torch.tensor(predictions), classes).float()


def test_accuracies_are_in_percent() -> None:
    # cat: 1 of 2 right, dog: 0 of 1, 007: 5 of 5
    labels = torch.tensor([0, 0, 1, 2, 2, 2, 2, 2])
    results = evaluate((labels, logits_for([0, 1, 0, 2, 2, 2, 2, 2])))
    assert results["accuracy"] == 75.0
    assert results["mean_class_accuracy"] == 50.0


def test_the_loss_is_the_mean_cross_entropy() -> None:
    labels, logits = random_samples(50)
    expected = F.cross_entropy(logits.double(), labels).item()
    assert evaluate((labels, logits))["val_loss"] == pytest.approx(expected, rel=1e-14)


def test_the_size_of_the_batches_changes_nothing_but_rounding_in_float64() -> None:
    labels, logits = random_samples(101)
    whole = evaluate((labels, logits))
    for size in (1, 7, 64):
        cut = evaluate(*zip(labels.split(size), logits.split(size), strict=True))
        assert cut["val_loss"] == pytest.approx(whole["val_loss"], rel=1e-14)
        assert cut["accuracy"] == whole["accuracy"]


def test_huge_logits_keep_the_loss_exact() -> None:
    # exp(200) overflows in float32, and bfloat16 has eight bits for the sum.
    logits = torch.tensor([[200.0, 0.0, 0.0], [0.0, 1.0, 0.0]], dtype=torch.bfloat16)
    expected = F.cross_entropy(logits.double(), torch.tensor([1, 1])).item()
    assert evaluate((torch.tensor([1, 1]), logits))["val_loss"] == expected


@pytest.mark.parametrize("kind", [torch.uint8, torch.int32, list])
def test_labels_may_be_integers_of_any_kind(kind: Any) -> None:
    labels, logits = random_samples(40, classes=200)
    names = [str(i) for i in range(200)]
    given = labels.tolist() if kind is list else labels.to(kind)
    assert evaluate((given, logits), names=names) == evaluate((labels, logits), names=names)


def test_a_table_of_the_classes_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        results = evaluate((torch.tensor([0, 0, 0, 2]), logits_for([0, 0, 1, 2])))
    assert caplog.messages == [
        "Accuracy by class:\n"
        "class      images    correct    accuracy\n"
        "-------  --------  ---------  ----------\n"
        "cat             3          2       66.67\n"
        "dog             0          0         n/a\n"
        "007             1          1      100.00"
    ]
    assert results["mean_class_accuracy"] == pytest.approx((200 / 3 + 100) / 2)


def test_the_evaluator_starts_anew_after_a_reset() -> None:
    evaluator = ClassificationEvaluator(NAMES)
    evaluator.process({"label": torch.tensor([0])}, logits_for([1]))
    evaluator.reset()
    evaluator.process({"label": torch.tensor([0])}, logits_for([0]))
    assert evaluator.evaluate()["classification"]["accuracy"] == 100.0


def test_evaluating_twice_gives_the_same() -> None:
    evaluator = ClassificationEvaluator(NAMES)
    evaluator.process({"label": torch.tensor([0, 1])}, logits_for([1, 1]))
    assert evaluator.evaluate() == evaluator.evaluate()


def test_logits_with_gradients_leave_no_graph_behind() -> None:
    evaluator = ClassificationEvaluator(NAMES)
    logits = logits_for([0]).requires_grad_()
    evaluator.process({"label": torch.tensor([0])}, logits)
    assert not evaluator._loss_sum.requires_grad


def test_labels_may_stand_under_another_key() -> None:
    evaluator = ClassificationEvaluator(NAMES, label_key="target")
    evaluator.process({"target": torch.tensor([0])}, logits_for([0]))
    assert evaluator.evaluate()["classification"]["accuracy"] == 100.0


def test_no_sample_at_all_is_an_error() -> None:
    with pytest.raises(ValueError, match="no sample"):
        evaluate()
    with pytest.raises(ValueError, match="no sample"):
        evaluate((torch.zeros(0, dtype=torch.int64), torch.zeros(0, 3)))


@pytest.mark.parametrize("label", [-1, 3])
def test_a_label_out_of_range_is_an_error(label: int) -> None:
    with pytest.raises(ValueError, match=r"1 labels are out of range: not in \[0, 3\)"):
        evaluate((torch.tensor([0, label]), logits_for([0, 0])))


@pytest.mark.parametrize("shape", [(3,), (2, 4), (2, 3, 1)])
def test_outputs_of_a_wrong_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"shape \(N, 3\).*got \(" + str(shape[0])):
        evaluate((torch.tensor([0, 0]), torch.zeros(shape)))


@pytest.mark.parametrize("labels", [torch.zeros(3).long(), torch.zeros(2, 1).long()])
def test_labels_of_a_wrong_shape_are_refused(labels: Tensor) -> None:
    with pytest.raises(ValueError, match=r"integers of shape \(N,\).*int64 of shape"):
        evaluate((labels, logits_for([0, 0])))


def test_labels_that_are_no_integers_are_refused() -> None:
    with pytest.raises(ValueError, match="float32"):
        evaluate((torch.zeros(2), logits_for([0, 0])))


def _evaluate_share(shares: list[list[int]], with_bad_label: bool) -> Any:
    labels, logits = random_samples(30)
    if with_bad_label and dist.get_rank() == 1:
        labels += 3
    evaluator = ClassificationEvaluator(NAMES)
    tables: list[str] = []
    logger = logging.getLogger("hooktrain.evaluation.metrics")
    logger.info = lambda *args: tables.append(args[0])  # type: ignore[method-assign, assignment]
    for index in shares[dist.get_rank()]:
        evaluator.process({"label": labels[index, None]}, logits[index, None])
    try:
        return evaluator.evaluate(), len(tables)
    except ValueError as error:
        return str(error)


def test_ranks_get_the_same_results_from_uneven_shares() -> None:
    labels, logits = random_samples(30)
    whole = evaluate((labels, logits))
    shares = [list(range(7)), list(range(7, 30))]
    (first, tables), (second, other_tables) = run_ranks(_evaluate_share, 2, shares, False)
    assert first == second
    assert (tables, other_tables) == (1, 0)
    assert first["classification"]["accuracy"] == whole["accuracy"]
    assert first["classification"]["mean_class_accuracy"] == whole["mean_class_accuracy"]
    assert first["classification"]["val_loss"] == pytest.approx(whole["val_loss"], rel=1e-14)


def test_a_rank_without_samples_gets_the_results_of_the_others() -> None:
    labels, logits = random_samples(30)
    shares = [[], list(range(30))]
    (first, _), (second, _) = run_ranks(_evaluate_share, 2, shares, False)
    assert first == second
    assert first["classification"]["accuracy"] == evaluate((labels, logits))["accuracy"]


def test_all_ranks_fail_together() -> None:
    empty = run_ranks(_evaluate_share, 2, [[], []], False)
    assert empty == ["there is no sample to evaluate, on any rank"] * 2
    bad = run_ranks(_evaluate_share, 2, [[0], [1]], True)
    assert bad == ["1 labels are out of range: not in [0, 3)"] * 2
