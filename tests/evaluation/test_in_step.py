"""Evaluation of models whose ranks can only compute together."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gloo import run_ranks
from hooktrain.evaluation import DatasetEvaluator, inference_on_dataset
from hooktrain.evaluation.in_step import computes_together, in_step
from hooktrain.utils import comm
from sharding_toys import batches, make_model, make_sharded


class Logits(DatasetEvaluator):
    """Brings what all ranks got together, in the order of ranks."""

    def reset(self) -> None:
        self.seen: list[Tensor] = []

    def process(self, inputs: Any, outputs: Any) -> None:
        self.seen.append(outputs)

    def evaluate(self) -> dict[str, Any]:
        return {"logits": [t for seen in comm.all_gather(self.seen) for t in seen]}


def own_share(shares: list[int]) -> Any:
    """Consecutive batches, so many for each rank, from a loader without a length."""
    start = sum(shares[: comm.get_rank()])
    return iter(batches(sum(shares), 4)[start : start + shares[comm.get_rank()]])


def evaluate_sharded(shares: list[int]) -> tuple[list[Tensor], bool]:
    model = make_sharded()
    logits = inference_on_dataset(model, own_share(shares), Logits())["logits"]
    return logits, computes_together(model)


@pytest.mark.parametrize("shares", [[1, 3], [2, 0], [0, 2]])
def test_ranks_of_a_sharded_model_may_have_different_numbers_of_batches(shares: list[int]) -> None:
    expected = inference_on_dataset(make_model(), batches(sum(shares), 4), Logits())["logits"]
    for logits, together in run_ranks(evaluate_sharded, 2, shares):
        assert together
        assert len(logits) == len(expected)
        assert all(map(torch.equal, logits, expected))


def stand_ins(shares: list[int]) -> list[tuple[int, bool]]:
    first = 10 * comm.get_rank()
    return list(in_step(range(first, first + shares[comm.get_rank()])))


def test_stand_ins_are_the_last_batch_of_a_rank_or_the_first_of_another() -> None:
    assert run_ranks(stand_ins, 2, [1, 3]) == [
        [(0, True), (0, False), (0, False)],
        [(10, True), (11, True), (12, True)],
    ]
    assert run_ranks(stand_ins, 2, [0, 2]) == [
        [(10, False), (10, False)],
        [(10, True), (11, True)],
    ]
    assert run_ranks(stand_ins, 2, [0, 0]) == [[], []]


def test_one_process_and_plain_models_compute_alone() -> None:
    assert not computes_together(nn.Linear(1, 1))
    assert not computes_together(abs)
    assert run_ranks(computes_together, 2, nn.Linear(1, 1)) == [False, False]
