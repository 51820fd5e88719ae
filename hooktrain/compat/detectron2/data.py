"""Classes and functions of detectron2's data loading that hooktrain.data does not have."""

import copy
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from hooktrain import data as core
from hooktrain.utils.env import seed_all_rng


class DatasetFromList(Dataset[Any]):
    """A list as a data set.

    Args:
        lst: the samples.
        copy: whether samples are returned as deep copies, so that they can be changed in place.
            Serialised samples are new objects in any case.
        serialize: whether the samples are kept as one array of bytes, which worker processes
            share. Each worker would get a copy of a list over time, since reading an object
            changes its reference count.
    """

    def __init__(
        self, lst: Sequence[Any], copy: bool = True, serialize: bool = True
    ) -> None:
        self._copy = copy
        self._serialize = serialize
        self._len = len(lst)
        if not serialize:
            self._lst = lst
            return
        parts = [pickle.dumps(item, protocol=-1) for item in lst]
        self._bounds = np.cumsum([0, *map(len, parts)])
        # One extra byte at the end, since torch refuses an empty buffer.
        self._bytes = torch.frombuffer(
            bytearray(b"".join(parts) + b"\0"), dtype=torch.uint8
        )

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, index: int) -> Any:
        if self._serialize:
            place = range(self._len)[index]  # index may be negative
            part = self._bytes[self._bounds[place] : self._bounds[place + 1]]
            return pickle.loads(part.numpy().data)
        item = self._lst[index]
        if self._copy:
            return copy.deepcopy(item)
        return item


@dataclass(eq=False)
class ToIterableDataset(IterableDataset[Any]):
    """Reads a data set in the order of a sampler.

    Args:
        dataset: the data set, with ``__getitem__``.
        sampler: the sampler, which yields the indices of this rank.
        shard_sampler: whether the indices are divided among the workers of a DataLoader, so that
            each is read once. Otherwise every worker reads all of them.
        shard_chunk_size: the number of consecutive indices that go to one worker. If it is the
            batch size, batches are the same for any number of workers.
    """

    dataset: Any
    sampler: Sampler[int]
    shard_sampler: bool = True
    shard_chunk_size: int = 1

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info() if self.shard_sampler else None
        for number, index in enumerate(self.sampler):
            chunk = number // self.shard_chunk_size
            if worker is None or chunk % worker.num_workers == worker.id:
                yield self.dataset[index]

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]


class MapDataset(core.MapDataset):
    """A :class:`hooktrain.data.MapDataset` with the attributes of detectron2's class."""

    def __init__(self, dataset: Any, map_func: Callable[[Any], Any]) -> None:
        super().__init__(dataset, map_func)
        self._dataset = dataset
        self._map_func = map_func
        self._rng = random.Random(42)
        self._fallback_candidates = set(range(len(dataset)))


def trivial_batch_collator(batch: Any) -> Any:
    """Return the samples of a batch unchanged."""
    return batch


def worker_init_reset_seed(worker_id: int) -> None:
    """Seed the generators of a worker process of a torch ``DataLoader``."""
    # torch has already added the worker's number to the seed.
    seed_all_rng(torch.initial_seed() % 2**31)
