from itertools import islice
from typing import Any

import pytest
import torch

from gloo import run_ranks
from hooktrain.data import (
    InferenceSampler,
    TrainingSampler,
)


def take(iterable: Any, count: int) -> list[Any]:
    return list(islice(iterable, count))


def test_each_epoch_is_a_permutation_of_its_own() -> None:
    stream = take(TrainingSampler(10, seed=0), 30)
    epochs = [stream[:10], stream[10:20], stream[20:]]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    torch.manual_seed(123)  # the order depends on the seed alone
    assert (
        take(TrainingSampler(10, seed=0), 30)
        == stream
        != take(TrainingSampler(10, seed=2), 30)
    )
    assert take(TrainingSampler(3, shuffle=False, seed=0), 7) == [0, 1, 2, 0, 1, 2, 0]
    with pytest.raises(ValueError, match="at least 1, but got 0"):
        TrainingSampler(0)


@pytest.mark.parametrize("start", [0, 1, 6, 7, 8, 50])
def test_a_stream_from_a_position_is_the_rest_of_the_whole_stream(start: int) -> None:
    sampler = TrainingSampler(7, seed=3)
    assert take(sampler.stream(start), 20) == take(sampler.stream(), start + 20)[start:]


def test_skipping_far_generates_no_epoch_on_the_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampler = TrainingSampler(4, seed=0)
    made = []
    original = TrainingSampler.epoch_indices
    monkeypatch.setattr(
        TrainingSampler, "epoch_indices", lambda s, e: made.append(e) or original(s, e)
    )
    take(sampler.stream(40_002), 4)
    assert made == [10_000, 10_001]


def test_inference_shards_are_nearly_equal() -> None:
    shards = [InferenceSampler._get_local_indices(42, 4, r) for r in range(4)]
    assert shards == [range(11), range(11, 22), range(22, 32), range(32, 42)]
    assert list(InferenceSampler(3)) == [0, 1, 2]
    assert len(InferenceSampler(0)) == 0


def shares() -> tuple[list[int], int, list[int]]:
    drawn = TrainingSampler(10)
    return take(TrainingSampler(10, seed=7), 6), drawn.seed, list(InferenceSampler(5))


def test_ranks_take_turns_in_one_stream() -> None:
    first, second = run_ranks(shares, 2)
    merged = [i for pair in zip(first[0], second[0], strict=True) for i in pair]
    assert merged == take(TrainingSampler(10, seed=7), 12)
    assert first[1] == second[1]
    assert (first[2], second[2]) == ([0, 1, 2], [3, 4])
