"""What detectron2's loaders are made of beside data sets and samplers."""

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

from hooktrain import data as core
from hooktrain.utils.env import seed_all_rng


class AspectRatioGroupedDataset(IterableDataset[list[Any]]):
    """Batches of samples that are all wider than high, or all not.

    Args:
        dataset: of dicts with ``width`` and ``height``.
        batch_size: samples in a batch.
    """

    def __init__(self, dataset: Iterable[Any], batch_size: int) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self._buckets: list[list[Any]] = [[], []]

    def __iter__(self) -> Iterator[list[Any]]:
        for sample in self.dataset:
            bucket = self._buckets[sample["width"] <= sample["height"]]
            bucket.append(sample)
            if len(bucket) == self.batch_size:
                batch = bucket[:]
                bucket.clear()
                yield batch


class MapDataset(core.MapDataset):
    """:class:`hooktrain.data.MapDataset`, with what a ``__getitem__`` of detectron2's reads."""

    def __new__(cls, dataset: Any, map_func: Callable[[Any], Any]) -> Any:
        """One that is no subclass of this for an ``IterableDataset``."""
        if isinstance(dataset, IterableDataset):
            return core.MapDataset(dataset, map_func)
        return super().__new__(cls, dataset, map_func)

    def __init__(self, dataset: Any, map_func: Callable[[Any], Any]) -> None:
        super().__init__(dataset, map_func)
        self._dataset, self._map_func, self._rng = dataset, map_func, random.Random(42)
        self._fallback_candidates = set(range(len(dataset)))


def trivial_batch_collator(batch: Any) -> Any:
    """The samples of a batch, as they are."""
    return batch


def worker_init_reset_seed(worker_id: int) -> None:
    """Seed the generators of a worker process of a torch ``DataLoader``."""
    seed_all_rng(torch.initial_seed() % 2**31 + worker_id)
