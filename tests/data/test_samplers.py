from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import SequentialSampler

from gloo import run_ranks
from hooktrain.data import (
    GroupedBatchSampler,
    InferenceSampler,
    RandomSubsetTrainingSampler,
    RepeatFactorTrainingSampler,
    StreamSampler,
    TrainingSampler,
)


def take(iterable: Any, count: int) -> list[Any]:
    return list(islice(iterable, count))


def test_each_epoch_is_a_permutation_of_its_own_or_in_the_data_sets_order() -> None:
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


SAMPLERS = [
    TrainingSampler(7, seed=3),
    RandomSubsetTrainingSampler(20, 0.35, seed_shuffle=3, seed_subset=4),
    RepeatFactorTrainingSampler([0.5, 1.0, 2.5, 0.0], seed=3),
]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("start", [0, 1, 6, 7, 8, 50])
def test_a_stream_from_a_position_is_the_rest_of_the_whole_stream(
    sampler: StreamSampler, start: int
) -> None:
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


def test_a_random_subset_is_fixed_and_of_the_asked_size() -> None:
    stream = take(
        RandomSubsetTrainingSampler(10, 0.35, seed_shuffle=1, seed_subset=2), 9
    )
    other = take(
        RandomSubsetTrainingSampler(10, 0.35, seed_shuffle=5, seed_subset=2), 9
    )
    assert len(set(stream)) == 3
    assert set(stream[:3]) == set(stream[3:6]) == set(other)
    with pytest.raises(ValueError, match=r"\(0, 1\], but got 1.5"):
        RandomSubsetTrainingSampler(10, 1.5)
    with pytest.raises(ValueError, match="at least 1, but got 0"):
        RandomSubsetTrainingSampler(10, 0.05)


def test_repeat_factors_repeat_in_proportion_and_whole_ones_exactly() -> None:
    stream = take(RepeatFactorTrainingSampler([1.0, 2.0, 0.5], seed=0), 3500)
    counts = [stream.count(i) for i in range(3)]
    assert counts == [pytest.approx(n, abs=60) for n in (1000, 2000, 500)]
    sampler = RepeatFactorTrainingSampler([1.0, 3.0], shuffle=False, seed=0)
    assert take(sampler, 8) == [0, 1, 1, 1, 0, 1, 1, 1]


def test_an_epoch_that_happens_to_be_empty_is_passed_over_and_many_such_are_refused() -> (
    None
):
    sampler = RepeatFactorTrainingSampler([0.5, 0.5], seed=0)
    assert 0 in [sampler.epoch_length(e) for e in range(20)]
    assert set(take(sampler, 20)) == {0, 1}
    with pytest.raises(ValueError, match=r"a sum >= 1, got \[0.1, 0.1\]"):
        RepeatFactorTrainingSampler([0.1, 0.1])
    with pytest.raises(ValueError, match="must be >= 0"):
        RepeatFactorTrainingSampler([1.0, -1.0])


def test_repeat_factors_follow_from_the_frequency_of_the_rarest_category() -> None:
    images = [
        {"annotations": [{"category_id": c} for c in cs]}
        for cs in ([0], [0, 1], [0], [])
    ]
    factors = RepeatFactorTrainingSampler.repeat_factors_from_category_frequency(
        images, 0.5
    )
    assert factors.tolist() == pytest.approx([1.0, 2**0.5, 1.0, 1.0])
    linear = RepeatFactorTrainingSampler.repeat_factors_from_category_frequency(
        images, 0.5, sqrt=False
    )
    assert linear.tolist() == pytest.approx([1.0, 2.0, 1.0, 1.0])


def test_inference_shards_are_contiguous_complete_and_nearly_equal() -> None:
    shards = [InferenceSampler._get_local_indices(42, 4, r) for r in range(4)]
    assert shards == [range(11), range(11, 22), range(22, 32), range(32, 42)]
    assert list(InferenceSampler(3)) == [0, 1, 2]
    assert len(InferenceSampler(0)) == 0


def test_grouped_batches_hold_one_group_each_and_leftovers_carry_over() -> None:
    sampler = GroupedBatchSampler(SequentialSampler(range(7)), [0, 1, 0, 1, 0, 0, 1], 2)
    assert list(sampler) == [[0, 2], [1, 3], [4, 5]]
    assert list(sampler) == [[6, 1], [0, 2], [4, 5], [3, 6]]
    with pytest.raises(ValueError, match=r"batch_size.*0"):
        GroupedBatchSampler(SequentialSampler(range(7)), [0], 0)


def shares() -> tuple[list[int], int, list[int]]:
    drawn = TrainingSampler(10)
    return take(TrainingSampler(10, seed=7), 6), drawn.seed, list(InferenceSampler(5))


def test_ranks_take_turns_in_one_stream_and_draw_one_seed() -> None:
    first, second = run_ranks(shares, 2)
    merged = [i for pair in zip(first[0], second[0], strict=True) for i in pair]
    assert merged == take(TrainingSampler(10, seed=7), 12)
    assert first[1] == second[1]
    assert (first[2], second[2]) == ([0, 1, 2], [3, 4])
