"""Data sets made of other data sets."""

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from hooktrain.data.samplers import mix

# A function of each sample.
Mapper = Callable[[Any], Any]

# A function that leaves out this many samples in a row is probably wrong.
MAX_ATTEMPTS = 1000


class MapDataset(Dataset[Any]):
    """Applies a function to each sample of a data set.

    If the function returns None, another sample is used instead, which depends only on the index.

    Args:
        dataset: a data set with ``__len__`` and ``__getitem__``. For an ``IterableDataset`` the
            result is a :class:`MapIterableDataset`, which leaves out samples that become None.
        map_func: takes a sample and returns the sample to use, or None. Worker processes that are
            not forked import it by its name, so it cannot be a lambda there.
    """

    def __new__(cls, dataset: Any = None, map_func: Any = None) -> Any:
        """Choose the class by the kind of data set; a pickle is loaded without arguments."""
        if isinstance(dataset, IterableDataset) and cls is not MapIterableDataset:
            return MapIterableDataset(dataset, map_func)
        return super().__new__(cls)

    def __init__(self, dataset: Any, map_func: Mapper) -> None:
        self.dataset = dataset
        self.map_func = map_func

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        current = index
        for attempt in range(1, MAX_ATTEMPTS + 1):
            data = self.map_func(self.dataset[current])
            if data is not None:
                return data
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
