"""What detectron2's loaders are made of beside data sets and samplers."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import IterableDataset

from hooktrain import data as core
from hooktrain.utils.env import seed_all_rng


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
