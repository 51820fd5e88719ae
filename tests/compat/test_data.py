"""What detectron2's loaders are made of."""

import math
import pickle
from typing import Any

import torch
from torch.utils.data import IterableDataset

from hooktrain.compat.detectron2 import (
    DatasetFromList,
    InferenceSampler,
    MapDataset,
    ToIterableDataset,
    build_test_loader,
    trivial_batch_collator,
    worker_init_reset_seed,
)


class Squares(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter([0, 1, 4])


def test_a_test_loader_reads_a_stream_as_it_comes() -> None:
    loader = build_test_loader(
        Squares(), mapper=float, collate_fn=trivial_batch_collator
    )
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
