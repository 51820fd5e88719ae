"""Which sample comes when: streams of indices that depend on a seed and a position alone.

A training stream is endless: one epoch after the other, each in an order of its own that follows
from the seed and the epoch's number. All ranks see the same stream and take turns in it, so that
neither the number of ranks nor of workers changes what is in a global batch, and skipping to a
position is arithmetic.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from hooktrain.data.grouped_batch_sampler import GroupedBatchSampler
from hooktrain.utils import comm

__all__ = [
    "GroupedBatchSampler",
    "InferenceSampler",
    "RandomSubsetTrainingSampler",
    "RepeatFactorTrainingSampler",
    "StreamSampler",
    "TrainingSampler",
]


class StreamSampler(Sampler[int]):
    """Base of the training samplers: an endless stream of indices, made of epochs.

    Iterating gives this rank's share, every world-size-th index from the start of the stream.
    A subclass defines the order of each epoch.

    Args:
        seed: of the stream; the same on all ranks. None draws one that all ranks share (a
            collective).

    Attributes:
        seed: the seed in use.
    """

    def __init__(self, seed: int | None) -> None:
        self.seed = comm.shared_random_seed() if seed is None else int(seed)
        # Kept, since a worker process that is spawned does not know its rank.
        self._rank, self._world_size = comm.get_rank(), comm.get_world_size()

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
        if start < 0:
            raise ValueError(f"start must not be negative, but got {start!r}")
        epoch = 0
        while start >= (length := self.epoch_length(epoch)):
            start -= length
            epoch += 1
        while True:
            yield from self.epoch_indices(epoch)[start:].tolist()
            start = 0
            epoch += 1

    def __iter__(self) -> Iterator[int]:
        return islice(self.stream(), self._rank, None, self._world_size)

    def generator(self, epoch: int) -> torch.Generator:
        """A generator for one epoch; neighbouring seeds and epochs have nothing in common."""
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
        TypeError: if ``size`` is not an integer.
        ValueError: if it is below 1.
    """

    def __init__(self, size: int, shuffle: bool = True, seed: int | None = None) -> None:
        _check_size(size)
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


class RandomSubsetTrainingSampler(TrainingSampler):
    """A fixed random part of a data set, again and again.

    Args:
        size: the length of the data set, at least 1.
        subset_ratio: how much of it to take, in (0, 1].
        shuffle: see :class:`TrainingSampler`.
        seed_shuffle: the seed of the order; see :class:`StreamSampler`.
        seed_subset: the seed of the choice; None draws one that all ranks share.

    Attributes:
        indices: the chosen part.

    Raises:
        ValueError: for a ratio out of range, or one that leaves nothing.
    """

    def __init__(
        self,
        size: int,
        subset_ratio: float,
        shuffle: bool = True,
        seed_shuffle: int | None = None,
        seed_subset: int | None = None,
    ) -> None:
        _check_size(size)
        if not 0.0 < subset_ratio <= 1.0:
            raise ValueError(f"subset_ratio must be in (0, 1], but got {subset_ratio!r}")
        chosen = int(size * subset_ratio)
        if chosen == 0:
            raise ValueError(f"subset_ratio={subset_ratio!r} leaves nothing of {size} samples")
        super().__init__(chosen, shuffle, seed_shuffle)
        self.seed_subset = comm.shared_random_seed() if seed_subset is None else int(seed_subset)
        generator = torch.Generator().manual_seed(self.seed_subset)
        self.indices = torch.randperm(size, generator=generator)[:chosen]

    def identity(self) -> dict[str, int]:
        """The seeds, and the size of the part."""
        return {**super().identity(), "seed_subset": self.seed_subset, "subset_size": self.size}

    def epoch_indices(self, epoch: int) -> Tensor:
        """The chosen part in this epoch's order."""
        return self.indices[super().epoch_indices(epoch)]


class RepeatFactorTrainingSampler(StreamSampler):
    """Each sample as often as its factor says, for data whose classes are rare and frequent.

    In each epoch a fractional factor is rounded up or down at random, in proportion (LVIS, Gupta
    et al. 2019).

    Args:
        repeat_factors: a float for each sample, not negative.
        shuffle: whether each epoch has a random order.
        seed: see :class:`StreamSampler`.

    Raises:
        ValueError: for factors that are negative, not finite, or so small that most epochs would
            be empty.
    """

    def __init__(
        self,
        repeat_factors: Sequence[float] | Tensor,
        *,
        shuffle: bool = True,
        seed: int | None = None,
    ) -> None:
        factors = torch.as_tensor(repeat_factors, dtype=torch.float64)
        if factors.ndim != 1 or not factors.isfinite().all() or (factors < 0).any():
            raise ValueError("repeat_factors must be a vector of finite numbers, none negative")
        if factors.sum() < 1.0:
            raise ValueError(
                f"repeat_factors must add up to at least 1, or epochs would have no samples; "
                f"{len(factors)} factors add up to {float(factors.sum())!r}"
            )
        super().__init__(seed)
        self.shuffle = shuffle
        self.repeat_factors = factors

    @staticmethod
    def repeat_factors_from_category_frequency(
        dataset_dicts: Sequence[Mapping[str, Any]], repeat_thresh: float, sqrt: bool = True
    ) -> Tensor:
        """Factors by the rarest category in each image.

        A category in a fraction ``f`` of the images has the factor ``max(1, sqrt(t / f))``; an
        image has the largest factor of its categories.

        Args:
            dataset_dicts: each with ``annotations``, a list of dicts with ``category_id``.
            repeat_thresh: ``t``, the fraction below which a category is repeated.
            sqrt: whether to take the root.

        Returns:
            A float32 vector as long as ``dataset_dicts``.
        """
        images = [{a["category_id"] for a in d["annotations"]} for d in dataset_dicts]
        counts: defaultdict[Any, int] = defaultdict(int)
        for categories in images:
            for category in categories:
                counts[category] += 1
        ratio = {c: repeat_thresh * len(images) / count for c, count in counts.items()}
        factor = {c: max(1.0, math.sqrt(r) if sqrt else r) for c, r in ratio.items()}
        return torch.tensor([max((factor[c] for c in cs), default=1.0) for cs in images])

    def epoch_indices(self, epoch: int) -> Tensor:
        """The samples of this epoch, each repeated; the number differs between epochs."""
        generator = self.generator(epoch)
        whole = self.repeat_factors.floor()
        chance = torch.rand(len(whole), generator=generator, dtype=torch.float64)
        repeats = (whole + (chance < self.repeat_factors - whole)).long()
        indices = torch.repeat_interleave(torch.arange(len(whole)), repeats)
        if self.shuffle:
            indices = indices[torch.randperm(len(indices), generator=generator)]
        return indices


class InferenceSampler(Sampler[int]):
    """Each sample exactly once: every rank has a contiguous part, of nearly equal size.

    Args:
        size: the length of the data set; may be 0.
    """

    def __init__(self, size: int) -> None:
        if size < 0:
            raise ValueError(f"size must not be negative, but got {size!r}")
        self._local = self._get_local_indices(size, comm.get_world_size(), comm.get_rank())

    @staticmethod
    def _get_local_indices(total_size: int, world_size: int, rank: int) -> range:
        share, left = divmod(total_size, world_size)
        begin = rank * share + min(rank, left)
        return range(begin, begin + share + (rank < left))

    def __iter__(self) -> Iterator[int]:
        return iter(self._local)

    def __len__(self) -> int:
        return len(self._local)


def _check_size(size: int) -> None:
    if not isinstance(size, int):
        raise TypeError(f"size must be an integer, but got {size!r}")
    if size < 1:
        raise ValueError(f"size must be at least 1, but got {size!r}")
