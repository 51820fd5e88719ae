import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gloo import run_ranks
from hooktrain.evaluation.language import BitsPerCharacterEvaluator


def samples(count: int, length: int = 5, classes: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    targets = torch.randint(classes, (count, length), generator=generator)
    return targets, 3 * torch.randn(count, length, classes, generator=generator)


def evaluate(*batches: tuple[Tensor, Tensor]) -> dict[str, float]:
    evaluator = BitsPerCharacterEvaluator()
    for targets, logits in batches:
        evaluator.process({"targets": targets}, logits)
    return evaluator.evaluate()["text"]


def test_a_model_that_knows_nothing_needs_the_logarithm_of_the_number_of_characters() -> None:
    results = evaluate((torch.zeros(2, 3).long(), torch.zeros(2, 3, 8)))
    assert results["bits_per_character"] == pytest.approx(3.0, rel=1e-15)
    assert results["val_loss"] == pytest.approx(3 * math.log(2), rel=1e-15)


def test_each_character_counts_alike_however_the_text_is_cut_into_batches() -> None:
    targets, logits = samples(10)
    expected = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten()).item()
    whole = evaluate((targets, logits))
    pieces = evaluate(*zip(targets.split([1, 7, 2]), logits.split([1, 7, 2]), strict=True))
    assert whole["val_loss"] == pytest.approx(expected, rel=1e-14)
    assert pieces["val_loss"] == pytest.approx(expected, rel=1e-14)
    assert pieces["bits_per_character"] == pytest.approx(expected / math.log(2), rel=1e-14)


def test_negative_targets_are_not_predicted() -> None:
    targets, logits = samples(2)
    masked = targets.clone()
    masked[1, 2:] = torch.tensor([-1, -100, -1])
    expected = evaluate((targets[:1], logits[:1]), (targets[1:, :2], logits[1:, :2]))
    assert evaluate((masked, logits)) == pytest.approx(expected, rel=1e-14)


def test_a_batch_with_nothing_to_predict_counts_nothing() -> None:
    targets, logits = samples(2)
    nothing = torch.full_like(targets, -1), logits
    assert evaluate((targets, logits), nothing) == evaluate((targets, logits))


def test_losses_of_coarse_logits_are_summed_finely() -> None:
    targets, logits = samples(64)
    coarse = logits.bfloat16()
    assert evaluate((targets, coarse)) == evaluate((targets, coarse.double()))


def test_a_new_evaluation_forgets_the_last() -> None:
    evaluator, (targets, logits) = BitsPerCharacterEvaluator(), samples(2)
    evaluator.process({"targets": targets}, logits)
    expected = evaluator.evaluate()
    evaluator.reset()
    evaluator.process({"targets": targets}, logits)
    assert evaluator.evaluate() == expected


def test_nothing_to_predict_at_all_is_an_error() -> None:
    with pytest.raises(ValueError, match="no character"):
        BitsPerCharacterEvaluator().evaluate()


def test_a_batch_without_targets_and_wrong_shapes_are_refused() -> None:
    targets, logits = samples(2)
    with pytest.raises(KeyError, match=r"'targets' is not in the batch.*'target'"):
        BitsPerCharacterEvaluator().process({"target": targets}, logits)
    for outputs in (logits[0], logits[:, :4]):
        with pytest.raises(ValueError, match=r"\(N, T, C\)"):
            BitsPerCharacterEvaluator().process({"targets": targets}, outputs)


def test_targets_may_have_another_name() -> None:
    evaluator, (targets, logits) = BitsPerCharacterEvaluator(target_key="next"), samples(2)
    evaluator.process({"next": targets}, logits)
    assert evaluator.evaluate()["text"] == evaluate((targets, logits))


def evaluate_share(share: list[Any]) -> dict[str, float]:
    rank = torch.distributed.get_rank()
    return evaluate(share[rank]) if share[rank] is not None else evaluate()


def test_ranks_with_unequal_shares_agree_to_the_last_bit_on_the_whole() -> None:
    targets, logits = samples(7)
    shares = [(targets[:6], logits[:6]), (targets[6:], logits[6:]), None]
    results = run_ranks(evaluate_share, 3, shares)
    assert results[0] == results[1] == results[2]
    assert results[0] == pytest.approx(evaluate((targets, logits)), rel=1e-14)
