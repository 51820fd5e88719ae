"""Which sample comes when: streams of indices that depend on a seed and a position alone.

A training stream is endless: one epoch after the other, each in an order that depends on the seed
and the epoch's number. All ranks see the same stream and take turns in it. So neither the number of
ranks nor of workers changes what is in a global batch, and skipping to a position is arithmetic.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from math import isqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

from hooktrain.utils import comm

# Above this size, an order is computed place by place: a permutation takes 8 bytes a sample.
LARGEST_PERMUTATION = 2**24
# So many indices at a time become Python's numbers, which take five times the memory.
_CHUNK = 4096
_64_BITS = 2**64 - 1


def draw_seed() -> int:
    """A number in [0, 2^31) from torch's global generator of rank 0. Collective."""
    return comm.broadcast(int(torch.randint(2**31, (), device="cpu")))


class StreamSampler(Sampler[int]):
    """Base of the training samplers: an endless stream of indices, made of epochs.

    Iterating gives this rank's share, every world-size-th index from the start of the stream.
    A subclass defines the order of each epoch.

    Args:
        seed: of the stream; the same on all ranks. None draws one from torch's global
            generator of rank 0 (a collective).

    Attributes:
        seed: the seed in use.
        adopt_seed: the seed was drawn, so a resumed run takes the saved one.
        endless: True, for those who would wait for the end.
    """

    endless = True

    def __init__(self, seed: int | None) -> None:
        self.adopt_seed = seed is None
        if seed is None:
            seed = draw_seed()
        self.seed = int(seed)
        # Kept, since a worker process that is spawned does not know its rank.
        self._rank = comm.data_parallel_rank()
        self._world_size = comm.data_parallel_size()

    def epoch_indices(self, epoch: int) -> Any:
        """The indices of one epoch, in order: an int64 vector, or what gives slices of it."""
        raise NotImplementedError

    def epoch_length(self, epoch: int) -> int:
        """The number of indices in one epoch."""
        return len(self.epoch_indices(epoch))

    def stream(self, start: int = 0, step: int = 1) -> Iterator[int]:
        """The stream of all ranks together, or every ``step``-th index of it.

        Args:
            start: how many indices to skip, at least 0. Whole epochs are not generated.
            step: with the number of ranks, one rank's share from its first place on.
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
        """A generator for one epoch; those of two seeds or epochs have nothing in common."""
        return torch.Generator().manual_seed(mix(self.seed, epoch))


def mix(*numbers: Any) -> Any:
    """A 63-bit hash of small integers (the finaliser of SplitMix64, Steele et al. 2014).

    Some of them may be vectors of uint64, of one length; then so is the hash.
    """
    state: Any = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _64_BITS
        state = state ^ (state >> 30)
        state = (state * 0xBF58476D1CE4E5B9) & _64_BITS
        state = state ^ (state >> 27)
        state = (state * 0x94D049BB133111EB) & _64_BITS
        state = state ^ (state >> 31)
    return state >> 1


@dataclass
class ComputedOrder:
    """A permutation of the numbers below ``size`` that computes any place at once.

    It takes no memory. A place is two digits to the base of the root of ``size``. Each round of a
    Feistel network adds a hash of one digit to the other. Who comes out above ``size`` goes through
    again (cycle walking; Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains"; of
    shuffles, Mitchell et al. 2022, "Bandwidth-Optimal Random Shuffling for GPUs").

    Attributes:
        size: how many numbers, at least 1.
        key: of this permutation.
        rounds: 0 keeps the numbers in order.
    """

    size: int
    key: int = 0
    rounds: int = 6

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, places: slice) -> Tensor:
        start, stop, step = places.indices(self.size)
        numbers = np.arange(start, stop, step, dtype=np.uint64)
        numbers = self._permute(numbers)
        outside = numbers >= self.size
        while outside.any():
            numbers[outside] = self._permute(numbers[outside])
            outside = numbers >= self.size
        return torch.from_numpy(numbers.astype(np.int64))

    def _permute(self, numbers: Any) -> Any:
        base = isqrt(self.size - 1) + 1
        left, right = np.divmod(numbers, base)
        for number in range(self.rounds):
            hashed = mix(self.key, number, right)
            added = (left + hashed) % base
            left = right
            right = added
        return left * base + right


class TrainingSampler(StreamSampler):
    """All of a data set, again and again.

    Above 16 million samples (:data:`LARGEST_PERMUTATION`) a shuffled order is computed place by
    place, and takes no memory. Up to there it is torch's permutation, of 128 MiB at most, which
    draws from all orders alike; a computed order only looks as if.

    Args:
        size: the length of the data set, at least 1.
        shuffle: whether each epoch has a random order, or the data set's.
        seed: see :class:`StreamSampler`.

    Raises:
        ValueError: for a size below 1.
    """

    def __init__(
        self, size: int, shuffle: bool = True, seed: int | None = None
    ) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1, but got {size!r}")
        super().__init__(seed)
        self.size = size
        self.shuffle = shuffle

    def epoch_indices(self, epoch: int) -> Tensor | ComputedOrder:
        """A permutation, or the data set's order."""
        if not self.shuffle:
            return ComputedOrder(self.size, rounds=0)
        if self.size > LARGEST_PERMUTATION:
            key = mix(self.seed, epoch)
            return ComputedOrder(self.size, key)
        generator = self.generator(epoch)
        return torch.randperm(self.size, generator=generator)

    def epoch_length(self, epoch: int) -> int:
        """The length of the data set."""
        return self.size


class InferenceSampler(Sampler[int]):
    """Each sample exactly once: every rank has a contiguous part, of nearly equal size.

    Args:
        size: the length of the data set; may be 0.
    """

    def __init__(self, size: int) -> None:
        world = comm.data_parallel_size()
        rank = comm.data_parallel_rank()
        share, left = divmod(size, world)  # the first ranks have one more
        begin = rank * share + min(rank, left)
        if rank < left:
            share += 1
        self._local = range(begin, begin + share)

    def __iter__(self) -> Iterator[int]:
        return iter(self._local)

    def __len__(self) -> int:
        return len(self._local)
