"""Data sets made of other data sets."""

import copy
import logging
import pickle
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from hooktrain.data.samplers import mix

__all__ = ["DatasetFromList", "MapDataset", "ToIterableDataset"]

# After so many samples in a row that the function filtered out, something is wrong with it.
MAX_ATTEMPTS = 1000

logger = logging.getLogger(__name__)


class MapDataset(Dataset[Any]):
    """Applies a function to each sample of a data set.

    Where the function returns None, another sample takes the place; which one follows from the
    index alone.

    Args:
        dataset: with ``__len__`` and ``__getitem__``. Its ``IterableDataset`` kin give a
            :class:`MapIterableDataset`, which leaves such samples out.
        map_func: takes a sample; returns what to use, or None.
    """

    def __new__(cls, dataset: Any, map_func: Callable[[Any], Any]) -> Any:
        """Choose the class by the kind of the data set."""
        return super().__new__(MapIterableDataset if isinstance(dataset, IterableDataset) else cls)

    def __init__(self, dataset: Any, map_func: Callable[[Any], Any]) -> None:
        self.dataset = dataset
        self.map_func = map_func

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.dataset, self.map_func

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        current = index
        for attempt in range(1, MAX_ATTEMPTS + 1):
            data = self.map_func(self.dataset[current])
            if data is not None:
                return data
            if attempt == 3:
                logger.warning("%d samples in place of number %d were filtered out", attempt, index)
            current = mix(index, attempt) % len(self)
        raise ValueError(
            f"the map function returned None for {MAX_ATTEMPTS} samples in a row, "
            f"starting from number {index!r}"
        )


class MapIterableDataset(MapDataset, IterableDataset[Any]):
    """Applies a function to each sample of a stream, and leaves out those that become None."""

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[Any]:
        return (data for data in map(self.map_func, self.dataset) if data is not None)


class DatasetFromList(Dataset[Any]):
    """A list as a data set.

    Args:
        lst: the samples.
        copy: return deep copies, so that a sample can be changed in place. Serialised samples
            are new objects anyhow.
        serialize: keep the samples as one array of bytes, which worker processes share instead of
            copying it, object by object, as reference counts change.
    """

    def __init__(self, lst: Sequence[Any], copy: bool = True, serialize: bool = True) -> None:
        self._copy = copy
        self._serialize = serialize
        self._lst: Sequence[Any] = lst
        if serialize:
            parts = [np.frombuffer(pickle.dumps(item, protocol=-1), dtype=np.uint8) for item in lst]
            self._ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
            self._bytes = torch.from_numpy(
                np.concatenate(parts) if parts else np.zeros(0, np.uint8)
            )
            self._lst = ()

    def __len__(self) -> int:
        return len(self._ends) if self._serialize else len(self._lst)

    def __getitem__(self, index: int) -> Any:
        if not self._serialize:
            item = self._lst[index]
            return copy.deepcopy(item) if self._copy else item
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index!r} is out of range for {len(self)} samples")
        index %= len(self)
        begin = 0 if index == 0 else int(self._ends[index - 1])
        return pickle.loads(self._bytes[begin : int(self._ends[index])].numpy().data)


class ToIterableDataset(IterableDataset[Any]):
    """A data set read in the order of a sampler.

    Args:
        dataset: with ``__getitem__``.
        sampler: gives the indices of this rank.
        shard_sampler: divide the indices among the workers of a DataLoader, so that each is read
            once. Without it every worker reads all.
        shard_chunk_size: so many indices in a row go to one worker. With the batch size, batches
            are the same for any number of workers.
    """

    def __init__(
        self,
        dataset: Any,
        sampler: Sampler[int],
        shard_sampler: bool = True,
        shard_chunk_size: int = 1,
    ) -> None:
        if shard_chunk_size < 1:
            raise ValueError(f"shard_chunk_size must be at least 1, but got {shard_chunk_size!r}")
        self.dataset = dataset
        self.sampler = sampler
        self.shard_sampler = shard_sampler
        self.shard_chunk_size = shard_chunk_size

    def __iter__(self) -> Iterator[Any]:
        indices = iter(self.sampler)
        worker = get_worker_info()
        if self.shard_sampler and worker is not None:
            indices = _shard(indices, worker.id, worker.num_workers, self.shard_chunk_size)
        return (self.dataset[index] for index in indices)

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]


def _shard(indices: Iterator[int], shard: int, shards: int, chunk: int) -> Iterator[int]:
    """Every ``shards``-th chunk of the indices, from number ``shard`` on."""
    turn = 0
    while part := list(islice(indices, chunk)):
        if turn % shards == shard:
            yield from part
        turn += 1
