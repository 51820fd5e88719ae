"""What detectron2's loaders are made of."""

import math
import pickle
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, SequentialSampler

from gloo import run_ranks
from hooktrain.compat.detectron2 import (
    DatasetFromList,
    InferenceSampler,
    MapDataset,
    RepeatFactorTrainingSampler,
    ToIterableDataset,
    TrainingSampler,
    build_test_loader,
    trivial_batch_collator,
    worker_init_reset_seed,
)


def take(iterable: Any, count: int) -> list[Any]:
    return list(islice(iterable, count))


def test_a_test_loader_may_leave_its_samples_as_they_are() -> None:
    stream = ToIterableDataset([0, 1, 4], InferenceSampler(3))
    loader = build_test_loader(stream, mapper=float, collate_fn=trivial_batch_collator)
    assert list(loader) == [[0.0], [1.0], [4.0]]


def test_mapped_data_is_pickled_into_workers_that_are_spawned() -> None:
    data = MapDataset(DatasetFromList([1, 4]), math.sqrt)
    stream = MapDataset(ToIterableDataset(data, InferenceSampler(2)), math.sqrt)
    assert list(pickle.loads(pickle.dumps(data))) == [1.0, 2.0]
    assert list(pickle.loads(pickle.dumps(stream))) == [1.0, math.sqrt(2.0)]


class TwoViews(MapDataset):
    """As projects that train with two views of a sample write it."""

    def __getitem__(self, idx: int) -> Any:
        data = self._map_func(self._dataset[idx])
        self._fallback_candidates.add(self._rng.randrange(idx + 1))
        return data, -data


def test_an_item_of_ones_own_is_read_by_detectron2s_names() -> None:
    assert pickle.loads(pickle.dumps(TwoViews([4.0], math.sqrt)))[0] == (2.0, -2.0)


def test_a_worker_is_seeded_by_its_number() -> None:
    torch.manual_seed(5)
    worker_init_reset_seed(2)
    drawn = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(3))


def test_repeat_factors_repeat_in_proportion() -> None:
    stream = take(RepeatFactorTrainingSampler([1.0, 2.0, 0.5], seed=0), 3500)
    counts = [stream.count(i) for i in range(3)]
    assert counts == [pytest.approx(n, abs=60) for n in (1000, 2000, 500)]
    sampler = RepeatFactorTrainingSampler([1.0, 3.0], shuffle=False, seed=0)
    assert take(sampler, 8) == [0, 1, 1, 1, 0, 1, 1, 1]
    assert take(sampler.stream(6), 6) == take(sampler, 12)[6:]


def test_an_epoch_that_happens_to_be_empty_is_passed_over() -> None:
    sampler = RepeatFactorTrainingSampler([0.5, 0.5], seed=0)
    assert 0 in [sampler.epoch_length(epoch) for epoch in range(20)]
    assert set(take(sampler, 20)) == {0, 1}


@pytest.mark.parametrize("factors", [[0.1, 0.1], [3.0, -1.0], [math.inf]])
def test_factors_that_make_no_stream_are_refused(factors: list[float]) -> None:
    with pytest.raises(ValueError, match="must be >= 0 with a sum >= 1, got"):
        RepeatFactorTrainingSampler(factors)


def test_repeat_factors_follow_from_the_frequency_of_the_rarest_category() -> None:
    frequent, rare = {"category_id": 0}, {"category_id": 1}
    images = [{"annotations": [frequent]} for _ in range(4)]
    images[1]["annotations"] = [frequent, rare]
    images[3]["annotations"] = []
    factors = RepeatFactorTrainingSampler.repeat_factors_from_category_frequency
    assert factors(images, 0.5).tolist() == pytest.approx([1.0, 2**0.5, 1.0, 1.0])
    linear = factors(images, 0.5, sqrt=False)
    assert linear.tolist() == pytest.approx([1.0, 2.0, 1.0, 1.0])


@pytest.mark.parametrize("start", [0, 1, 6, 7, 8, 50])
def test_a_stream_from_a_position_is_the_rest_of_it(start: int) -> None:
    sampler = RepeatFactorTrainingSampler([0.5, 1.0, 2.5, 0.0], seed=3)
    assert take(sampler.stream(start), 20) == take(sampler.stream(), start + 20)[start:]


@pytest.mark.parametrize("serialize", [True, False])
def test_dataset_from_list_gives_copies(serialize: bool) -> None:
    items: list[Any] = [{"a": [1]}, "b", None]
    dataset = DatasetFromList(items, serialize=serialize)
    dataset[0]["a"].append(2)
    assert [dataset[i] for i in range(3)] == [{"a": [1]}, "b", None]
    assert dataset[-1] is None
    with pytest.raises(IndexError):
        dataset[3]
    assert len(DatasetFromList([], serialize=serialize)) == 0
    assert DatasetFromList(items, copy=False, serialize=False)[0] is items[0]


def test_workers_read_each_sample_once() -> None:
    order = SequentialSampler(range(10))
    for dataset, workers in (
        (ToIterableDataset(list(range(10)), order), 0),
        (ToIterableDataset(list(range(10)), order, shard_chunk_size=2), 2),
    ):
        loader = DataLoader(dataset, batch_size=2, num_workers=workers)
        assert [batch.tolist() for batch in loader] == [
            [0, 1],
            [2, 3],
            [4, 5],
            [6, 7],
            [8, 9],
        ]
    whole = ToIterableDataset([0, 1], SequentialSampler(range(2)), shard_sampler=False)
    read = [int(x) for x in DataLoader(whole, batch_size=None, num_workers=2)]
    assert sorted(read) == [0, 0, 1, 1]


def first_of_a_spawned_worker() -> Any:
    data = ToIterableDataset(
        DatasetFromList(list(range(100))),
        TrainingSampler(100, shuffle=False, seed=0),
        shard_chunk_size=2,
    )
    # Of rank 1 only: a new interpreter takes seconds.
    spawn = (
        {"num_workers": 1, "multiprocessing_context": "spawn"}
        if dist.get_rank() == 1
        else {}
    )
    return next(iter(DataLoader(data, batch_size=2, **spawn))).tolist()  # type: ignore[arg-type]


def test_workers_that_are_spawned_read_the_share_of_their_rank() -> None:
    assert run_ranks(first_of_a_spawned_worker, 2) == [[0, 2], [1, 3]]
