"""Data sets made of other data sets."""

import copy
import logging
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from hooktrain.data.samplers import mix

# After so many samples in a row that the function filtered out, something is wrong with it.
MAX_ATTEMPTS = 1000

logger = logging.getLogger(__name__)


class MapDataset(Dataset[Any]):
    """Applies a function to each sample of a data set.

    If the function returns None, another sample is taken; which one depends only on the index.

    Args:
        dataset: with ``__len__`` and ``__getitem__``. For an ``IterableDataset`` the result is a
            :class:`MapIterableDataset`, which leaves such samples out.
        map_func: takes a sample; returns what to use, or None. Workers that are not forked
            import it by its name: no lambda then.
    """

    def __new__(cls, dataset: Any, map_func: Callable[[Any], Any]) -> Any:
        """Choose the class by the kind of the data set."""
        if isinstance(dataset, IterableDataset):
            cls = MapIterableDataset
        return super().__new__(cls)

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
                text = "%d samples in place of number %d were filtered out"
                logger.warning(text, attempt, index)
            current = mix(index, attempt) % len(self)
        raise ValueError(
            f"map_func returned None for {MAX_ATTEMPTS} samples, first for {index!r}"
        )


class MapIterableDataset(MapDataset, IterableDataset[Any]):
    """Applies a function to each sample of a stream, and leaves out those that become None."""

    def __iter__(self) -> Iterator[Any]:
        for sample in self.dataset:
            data = self.map_func(sample)
            if data is not None:
                yield data


class DatasetFromList(Dataset[Any]):
    """A list as a data set.

    Args:
        lst: the samples.
        copy: return deep copies, so that a sample can be changed in place. Serialised samples
            are new objects anyhow.
        serialize: keep the samples as one array of bytes, which worker processes share instead of
            copying it, object by object, as reference counts change.
    """

    def __init__(
        self, lst: Sequence[Any], copy: bool = True, serialize: bool = True
    ) -> None:
        self._copy = copy
        self._serialize = serialize
        if not serialize:
            self._lst = lst
            return
        parts = [pickle.dumps(item, protocol=-1) for item in lst]
        # With a byte at the end, since torch takes no empty buffer.
        whole = bytearray(b"".join(parts) + b"\0")
        lengths = [0, *map(len, parts)]
        self._bytes = torch.frombuffer(whole, dtype=torch.uint8)
        self._ends = np.cumsum(lengths, dtype=np.int64)

    def __len__(self) -> int:
        if self._serialize:
            return len(self._ends) - 1
        return len(self._lst)

    def __getitem__(self, index: int) -> Any:
        # Also for negative ones, with an IndexError beyond the end.
        index = range(len(self))[index]
        if self._serialize:
            begin = self._ends[index]
            end = self._ends[index + 1]
            part = self._bytes[begin:end]
            return pickle.loads(part.numpy().data)
        item = self._lst[index]
        if self._copy:
            return copy.deepcopy(item)
        return item


@dataclass(eq=False)
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
