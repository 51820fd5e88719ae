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


def test_a_worker_is_seeded_by_torchs_seed_of_it() -> None:
    for number in (0, 2):
        torch.manual_seed(7)  # torch adds the number by itself
        worker_init_reset_seed(number)
        drawn = torch.rand(3)
        torch.manual_seed(7)
        assert torch.equal(drawn, torch.rand(3))


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
