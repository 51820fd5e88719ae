"""The order of the samples: streams of indices that depend only on a seed and a position.

A training stream is endless: one epoch after the other, each in an order that depends on the seed
and the epoch's number. All ranks see the same stream and take turns in it. So the samples of a
global batch do not depend on the number of ranks or workers, and skipping to a position is
arithmetic.
"""

from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import RandomSampler, Sampler

from hooktrain.utils import comm
from hooktrain.utils.names import check_count

# How many indices are converted at a time to Python's integers, which take five times the memory.
_CHUNK = 4096
_64_BITS = 2**64 - 1


def is_undivided(sampler: Any) -> bool:
    """Whether a sampler yields all indices on each rank, as torch's single-process samplers do."""
    order = getattr(type(sampler), "__iter__", None)
    return getattr(order, "__module__", "") == RandomSampler.__module__


def with_epochs(part: Any) -> list[Any]:
    """The sampler or data set and those that it wraps, if they have a ``set_epoch``."""
    found = []
    while part is not None:
        if hasattr(part, "set_epoch"):
            found.append(part)
        part = getattr(part, "sampler", getattr(part, "dataset", None))
    return found


class StreamSampler(Sampler[int]):
    """The base class of training samplers: an endless stream of indices, made of epochs.

    Iterating yields this rank's share from the start of the stream: with N ranks, every N-th index.
    A subclass defines :meth:`epoch_indices`, the order of each epoch.

    Args:
        seed: the seed of the stream, the same on all ranks. None draws one from torch's global
            generator of rank 0 (a collective).

    Attributes:
        seed: the seed in use.
        adopt_seed: whether the seed was drawn, so that a resumed run takes the saved one.
    """

    def __init__(self, seed: int | None) -> None:
        self.adopt_seed = seed is None
        if seed is None:
            seed = comm.shared_random_seed()
        self.seed = int(seed)
        # Stored, since a spawned worker process does not know its rank.
        self._rank = comm.data_parallel_rank()
        self._world_size = comm.data_parallel_size()

    def epoch_indices(self, epoch: int) -> Any:
        """The indices of one epoch in order: an int64 vector, or an object that slices like one."""
        raise NotImplementedError

    def epoch_length(self, epoch: int) -> int:
        """The number of indices in one epoch."""
        return len(self.epoch_indices(epoch))

    def stream(self, start: int = 0, step: int = 1) -> Iterator[int]:
        """The indices of all ranks' common stream from a position on.

        Args:
            start: the position to start at, at least 0. Epochs before it are not generated.
            step: the distance between two indices. The number of ranks gives one rank's share, if
                ``start`` is a position of that rank.
        """
        place = start
        for epoch in count():
            length = self.epoch_length(epoch)
            if place < length:
                indices = self.epoch_indices(epoch)
            while place < length:
                end = place + _CHUNK * step
                chunk = indices[place:end:step]
                yield from chunk.tolist()
                place += len(chunk) * step
            place -= length

    def __iter__(self) -> Iterator[int]:
        return self.stream(self._rank, self._world_size)

    def generator(self, epoch: int) -> torch.Generator:
        """A generator for one epoch. Those of other seeds or epochs draw unrelated numbers."""
        return torch.Generator().manual_seed(mix(self.seed, epoch))


def mix(*numbers: int) -> int:
    """A 63-bit hash of integers modulo 2^64 (the finaliser of SplitMix64, Steele et al. 2014)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _64_BITS
        state = state ^ (state >> 30)
        state = (state * 0xBF58476D1CE4E5B9) & _64_BITS
        state = state ^ (state >> 27)
        state = (state * 0x94D049BB133111EB) & _64_BITS
        state = state ^ (state >> 31)
    return state >> 1


class TrainingSampler(StreamSampler):
    """All indices of a data set, in a different order in each epoch.

    The order is torch's random permutation, which takes 8 bytes per sample on each rank. For
    billions of samples docs/guide/data.md has a sampler that takes no memory.

    Args:
        size: the length of the data set, at least 1.
        shuffle: whether to shuffle. False keeps the order of the data set.
        seed: see :class:`StreamSampler`.

    Raises:
        ValueError: if ``size`` is below 1.
    """

    def __init__(
        self, size: int, shuffle: bool = True, seed: int | None = None
    ) -> None:
        check_count("the size of the data set", size)
        super().__init__(seed)
        self.size = size
        self.shuffle = shuffle

    def epoch_indices(self, epoch: int) -> Tensor:
        """The order of one epoch: a permutation, or the data set's order without shuffling."""
        if not self.shuffle:
            return torch.arange(self.size)
        return torch.randperm(self.size, generator=self.generator(epoch))

    def epoch_length(self, epoch: int) -> int:
        """The length of the data set."""
        return self.size


class InferenceSampler(Sampler[int]):
    """Each index exactly once: the ranks have contiguous parts of nearly equal size.

    Args:
        size: the length of the data set, at least 0.
    """

    def __init__(self, size: int) -> None:
        parts = torch.arange(size).tensor_split(comm.data_parallel_size())
        self._local: list[int] = parts[comm.data_parallel_rank()].tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(self._local)

    def __len__(self) -> int:
        return len(self._local)
