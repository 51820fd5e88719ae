import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from gloo import run_ranks
from hooktrain.demos import ClassificationEvaluator

NAMES = ["cat", "dog", "007"]


def evaluate(
    *batches: tuple[Any, Tensor], names: list[str] = NAMES
) -> dict[str, float]:
    evaluator = ClassificationEvaluator(names, topk=(2,))
    for labels, logits in batches:
        evaluator.process({"label": labels}, logits)
    return evaluator.evaluate()["classification"]


def random_samples(count: int, classes: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(classes, (count,), generator=generator)
    return labels, 3 * torch.randn(count, classes, generator=generator)


def logits_for(predictions: list[int], classes: int = 3) -> Tensor:
    return F.one_hot(torch.tensor(predictions), classes).float()


@pytest.mark.parametrize("size", [101, 1, 7, 64])
def test_the_loss_is_the_mean_cross_entropy_whatever_the_size_of_the_batches(
    size: int,
) -> None:
    labels, logits = random_samples(101)
    results = evaluate(*zip(labels.split(size), logits.split(size), strict=True))
    expected = F.cross_entropy(logits.double(), labels).item()
    assert results["val_loss"] == pytest.approx(expected, rel=1e-14)
    assert results["accuracy"] == (logits.argmax(1) == labels).sum().item() / 1.01


def test_huge_logits_keep_the_loss_exact() -> None:
    # exp(200) overflows in float32, and bfloat16 has eight bits for the sum.
    logits = torch.tensor([[200.0, 0.0, 0.0], [0.0, 1.0, 0.0]], dtype=torch.bfloat16)
    expected = F.cross_entropy(logits.double(), torch.tensor([1, 1])).item()
    assert evaluate((torch.tensor([1, 1]), logits))["val_loss"] == expected


def test_accuracies_are_in_percent(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        results = evaluate((torch.tensor([0, 0, 0, 2]), logits_for([0, 0, 1, 2])))
    assert caplog.messages == [
        "Accuracy by class:\n"
        "class      images    correct    accuracy\n"
        "-------  --------  ---------  ----------\n"
        "cat             3          2       66.67\n"
        "dog             0          0      nan\n"
        "007             1          1      100.00"
    ]
    assert results["accuracy"] == 75.0
    assert results["mean_class_accuracy"] == pytest.approx((200 / 3 + 100) / 2)


def test_a_label_may_be_among_the_highest_logits() -> None:
    labels, logits = random_samples(101, classes=8)
    evaluator = ClassificationEvaluator([*"abcdefgh"], topk=(1, 5))
    for own, outputs in zip(labels.split(40), logits.split(40), strict=True):
        evaluator.process([torch.zeros(1), own], outputs)
    results = evaluator.evaluate()["classification"]
    places = [int((row > row[i]).sum()) for row, i in zip(logits, labels, strict=True)]
    assert results["accuracy_top1"] == results["accuracy"]
    assert results["accuracy_top5"] == 100 * sum(place < 5 for place in places) / 101
    assert 20 < results["accuracy_top5"] < 80


@pytest.mark.parametrize(
    ("labels", "shape", "message"),
    [
        ([], (0, 3), "no rank has a sample"),
        ([0, 0], (3,), r"\(N, 3\)"),
        ([0, 0], (2, 4), r"\(N, 3\)"),
        ([0, 0, 0], (2, 3), "batch_size"),
        ([0.0, 0.0], (2, 3), "float32"),
    ],
)
def test_labels_and_outputs_that_do_not_fit_are_refused(
    labels: list[Any], shape: tuple[int, ...], message: str
) -> None:
    kind = None if labels else torch.int64
    with pytest.raises((ValueError, RuntimeError), match=message):
        evaluate((torch.tensor(labels, dtype=kind), torch.zeros(shape)))


# The samples of each of two ranks, and what they get: a result, or all of them the same error.
SHARES: list[tuple[list[list[int]], str]] = [
    ([list(range(7)), list(range(7, 30))], ""),
    ([[], list(range(30))], ""),
    ([[], []], "no rank has a sample to evaluate"),
]


def evaluate_shares() -> list[Any]:
    """The results, and how many tables this rank has logged for each."""
    labels, logits = random_samples(32)
    tables: list[str] = []
    logger = logging.getLogger("hooktrain.demos.classification")
    logger.debug = lambda *args: tables.append(args[0])  # type: ignore[method-assign, assignment]
    found: list[Any] = []
    for shares, _ in SHARES:
        evaluator = ClassificationEvaluator(NAMES, topk=(2,))
        tables.clear()
        for index in shares[dist.get_rank()]:
            evaluator.process({"label": labels[index, None]}, logits[index, None])
        try:
            found.append((evaluator.evaluate(), len(tables)))
        except ValueError as error:
            found.append(str(error))
    return found


def test_ranks_get_the_same_results_or_errors_from_uneven_shares() -> None:
    labels, logits = random_samples(32)
    whole = evaluate((labels[:30], logits[:30]))
    for (_, error), *outcomes in zip(
        SHARES, *run_ranks(evaluate_shares, 2), strict=True
    ):
        if error:
            assert outcomes == [error, error]
        else:
            (first, tables), (second, other_tables) = outcomes
            assert first == second
            assert (tables, other_tables) == (1, 0)
            assert first["classification"] == pytest.approx(whole, rel=1e-14)
