from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from gloo import run_ranks
from hooktrain.data import InferenceSampler, StreamSampler, TrainingSampler
from hooktrain.utils import comm
from toys import Repeated


def take(iterable: Any, count: int) -> list[Any]:
    return list(islice(iterable, count))


def test_each_epoch_is_a_permutation_of_its_own() -> None:
    stream = take(TrainingSampler(10, seed=0), 30)
    epochs = [stream[:10], stream[10:20], stream[20:]]
    assert epochs[0] == [2, 1, 7, 8, 6, 0, 3, 5, 9, 4]
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


def test_a_seed_of_numpy_is_kept_as_a_number_of_python() -> None:
    sampler = TrainingSampler(10, seed=np.int64(0))  # type: ignore[arg-type]
    assert take(sampler, 10) == [2, 1, 7, 8, 6, 0, 3, 5, 9, 4]
    assert type(sampler.seed) is int  # as a checkpoint needs it


@pytest.fixture(params=["drawn", "in order", "repeated"])
def sampler(request: pytest.FixtureRequest) -> StreamSampler:
    """Of each kind one with short epochs."""
    if request.param == "repeated":
        return Repeated(8, most=2, seed=3)
    return TrainingSampler(7, shuffle=request.param == "drawn", seed=3)


@pytest.mark.parametrize("start", [0, 1, 6, 7, 8, 50])
def test_a_stream_from_a_position_is_the_rest_of_the_whole_stream(
    sampler: StreamSampler, start: int
) -> None:
    whole = take(sampler.stream(), start + 20)
    assert take(sampler.stream(start), 20) == whole[start:]
    # Steps of one epoch, of several, and of more than one chunk.
    for step in (2, 7, 30):
        share = take(sampler.stream(start, step), 20)
        assert share == take(sampler.stream(), start + 20 * step)[start::step]


def test_an_epoch_that_happens_to_be_empty_is_passed_over() -> None:
    sampler = Repeated(2, most=1, seed=0)
    assert 0 in [sampler.epoch_length(epoch) for epoch in range(20)]
    assert set(take(sampler, 20)) == {0, 1}


def test_orders_longer_than_a_chunk_are_read_to_their_end() -> None:
    whole = take(TrainingSampler(10_000, seed=0), 10_001)
    assert sorted(whole[:-1]) == list(range(10_000))
    assert take(TrainingSampler(10_000, seed=0).stream(1, 2), 5000) == whole[1::2]


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


def test_inference_shards_are_nearly_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm, "data_parallel_size", lambda: 4)
    shards = []
    for rank in range(4):
        monkeypatch.setattr(comm, "data_parallel_rank", lambda rank=rank: rank)
        shards.append([*InferenceSampler(42)])
    parts = [range(11), range(11, 22), range(22, 32), range(32, 42)]
    assert shards == [list(part) for part in parts]
    monkeypatch.undo()
    assert list(InferenceSampler(3)) == [0, 1, 2]
    assert len(InferenceSampler(0)) == 0


def shares() -> tuple[list[int], int, list[int]]:
    torch.manual_seed(comm.get_rank())
    drawn = TrainingSampler(10)
    return take(TrainingSampler(10, seed=7), 6), drawn.seed, list(InferenceSampler(5))


def test_ranks_take_turns_in_one_stream() -> None:
    first, second = run_ranks(shares, 2)
    merged = [i for pair in zip(first[0], second[0], strict=True) for i in pair]
    assert merged == take(TrainingSampler(10, seed=7), 12)
    torch.manual_seed(0)  # as on rank 0
    assert first[1] == second[1] == int(torch.randint(2**31, ()))
    assert (first[2], second[2]) == ([0, 1, 2], [3, 4])
