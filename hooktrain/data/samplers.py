"""Which sample comes when: streams of indices that depend on a seed and a position alone.

A training stream is endless: one epoch after the other, each in an order that depends on the seed
and the epoch's number. All ranks see the same stream and take turns in it. So neither the number of
ranks nor of workers changes what is in a global batch, and skipping to a position is arithmetic.
"""

from collections.abc import Iterator
from itertools import count, islice

import torch
from torch import Tensor
from torch.utils.data import Sampler

from hooktrain.utils import comm


class StreamSampler(Sampler[int]):
    """Base of the training samplers: an endless stream of indices, made of epochs.

    Iterating gives this rank's share, every world-size-th index from the start of the stream.
    A subclass defines the order of each epoch.

    Args:
        seed: of the stream; the same on all ranks. None draws one that all ranks share (a
            collective).

    Attributes:
        seed: the seed in use.
        adopt_seed: the seed was drawn, so a resumed run takes the saved one.
        endless: True, for those who would wait for the end.
    """

    endless = True

    def __init__(self, seed: int | None) -> None:
        self.adopt_seed = seed is None
        if seed is None:
            seed = comm.shared_random_seed()
        self.seed = int(seed)
        # Kept, since a worker process that is spawned does not know its rank.
        self._rank = comm.get_rank()
        self._world_size = comm.get_world_size()

    def epoch_indices(self, epoch: int) -> Tensor:
        """The indices of one epoch, in order: an int64 vector."""
        raise NotImplementedError

    def identity(self) -> dict[str, int]:
        """What makes the stream the one it is; a saved position is refused in another."""
        return {"sampler_seed": self.seed}

    def epoch_length(self, epoch: int) -> int:
        """The number of indices in one epoch."""
        return len(self.epoch_indices(epoch))

    def stream(self, start: int = 0) -> Iterator[int]:
        """The stream of all ranks together, from a position on.

        Args:
            start: how many indices to skip, at least 0. Whole epochs are not generated.
        """
        epoch = 0
        length = self.epoch_length(epoch)
        while start >= length:
            start -= length
            epoch += 1
            length = self.epoch_length(epoch)
        rest = self.epoch_indices(epoch)[start:]
        yield from rest.tolist()
        for later in count(epoch + 1):
            yield from self.epoch_indices(later).tolist()

    def __iter__(self) -> Iterator[int]:
        return islice(self.stream(), self._rank, None, self._world_size)

    def generator(self, epoch: int) -> torch.Generator:
        """A generator for one epoch; those of two seeds or epochs have nothing in common."""
        return torch.Generator().manual_seed(mix(self.seed, epoch))


def mix(*numbers: int) -> int:
    """A 63-bit hash of small integers (the finaliser of SplitMix64, Steele et al. 2014)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


class TrainingSampler(StreamSampler):
    """All of a data set, again and again.

    Args:
        size: the length of the data set, at least 1.
        shuffle: whether each epoch has a random order, or the data set's.
        seed: see :class:`StreamSampler`.

    Raises:
        ValueError: for a size below 1.
    """

    def __init__(
        self,
        size: int,
        shuffle: bool = True,
        seed: int | None = None,
    ) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1, but got {size!r}")
        super().__init__(seed)
        self.size = size
        self.shuffle = shuffle

    def epoch_indices(self, epoch: int) -> Tensor:
        """A permutation, or the data set's order."""
        if self.shuffle:
            return torch.randperm(self.size, generator=self.generator(epoch))
        return torch.arange(self.size)

    def epoch_length(self, epoch: int) -> int:
        """The length of the data set."""
        return self.size


class InferenceSampler(Sampler[int]):
    """Each sample exactly once: every rank has a contiguous part, of nearly equal size.

    Args:
        size: the length of the data set; may be 0.
    """

    def __init__(self, size: int) -> None:
        world = comm.get_world_size()
        rank = comm.get_rank()
        self._local = self._get_local_indices(size, world, rank)

    @staticmethod
    def _get_local_indices(total_size: int, world_size: int, rank: int) -> range:
        share, left = divmod(total_size, world_size)
        begin = rank * share + min(rank, left)
        end = begin + share
        if rank < left:
            end += 1
        return range(begin, end)

    def __iter__(self) -> Iterator[int]:
        return iter(self._local)

    def __len__(self) -> int:
        return len(self._local)
