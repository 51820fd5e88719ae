"""Which sample comes when: streams of indices that depend on a seed and a position alone.

A training stream is endless: one epoch after the other, each in an order that depends on the seed
and the epoch's number. All ranks see the same stream and take turns in it. So neither the number of
ranks nor of workers changes what is in a global batch, and skipping to a position is arithmetic.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Any

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
        drawn: the seeds that were drawn, not given: from their names in :meth:`identity` to those
            of the attributes. A resumed run takes the saved ones.
        endless: True, for those who would wait for the end.
    """

    endless = True

    def __init__(self, seed: int | None) -> None:
        self.drawn = {"sampler_seed": "seed"} if seed is None else {}
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
        epoch = 0
        while start >= (length := self.epoch_length(epoch)):
            start -= length
            epoch += 1
        yield from self.epoch_indices(epoch)[start:].tolist()
        for later in count(epoch + 1):
            yield from self.epoch_indices(later).tolist()

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
        ValueError: for a size below 1.
    """

    def __init__(
        self, size: int, shuffle: bool = True, seed: int | None = None
    ) -> None:
        if size < 1:
            raise ValueError(
                f"size, that of the data set, must be at least 1, but got {size!r}"
            )
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
        if not 0 < subset_ratio <= 1:
            raise ValueError(
                f"subset_ratio must be in (0, 1], but got {subset_ratio!r}"
            )
        super().__init__(int(size * subset_ratio), shuffle, seed_shuffle)
        if seed_subset is None:
            self.drawn["seed_subset"] = "seed_subset"
        self.seed_subset = (
            comm.shared_random_seed() if seed_subset is None else int(seed_subset)
        )
        self._whole_size = size

    @property
    def indices(self) -> Tensor:
        """The chosen part."""
        generator = torch.Generator().manual_seed(self.seed_subset)
        return torch.randperm(self._whole_size, generator=generator)[: self.size]

    def identity(self) -> dict[str, int]:
        """The seeds, and the size of the part."""
        return {
            **super().identity(),
            "seed_subset": self.seed_subset,
            "subset_size": self.size,
        }

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
        if not (1.0 <= factors.sum() < math.inf and (factors >= 0).all()):
            raise ValueError(
                f"repeat_factors must be >= 0 with a sum >= 1, got {repeat_factors!r}"
            )
        super().__init__(seed)
        self.shuffle = shuffle
        self.repeat_factors = factors

    @staticmethod
    def repeat_factors_from_category_frequency(
        dataset_dicts: Sequence[Mapping[str, Any]],
        repeat_thresh: float,
        sqrt: bool = True,
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
        counts = Counter(category for categories in images for category in categories)
        ratio = {c: repeat_thresh * len(images) / count for c, count in counts.items()}
        factor = {c: max(1.0, math.sqrt(r) if sqrt else r) for c, r in ratio.items()}
        return torch.tensor(
            [max((factor[c] for c in cs), default=1.0) for cs in images]
        )

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
        self._local = self._get_local_indices(
            size, comm.get_world_size(), comm.get_rank()
        )

    @staticmethod
    def _get_local_indices(total_size: int, world_size: int, rank: int) -> range:
        share, left = divmod(total_size, world_size)
        begin = rank * share + min(rank, left)
        return range(begin, begin + share + (rank < left))

    def __iter__(self) -> Iterator[int]:
        return iter(self._local)

    def __len__(self) -> int:
        return len(self._local)


class GroupedBatchSampler(Sampler[list[int]]):
    """Batches whose samples belong to one group each, such as one aspect ratio.

    Batches come in the order in which they fill up. What is left in a group at the end of a finite
    sampler stays for the next iteration over this object.

    Args:
        sampler: gives the indices.
        group_ids: a group for each index.
        batch_size: samples in a batch, at least 1.

    Raises:
        ValueError: for a batch size below 1.
    """

    def __init__(
        self, sampler: Sampler[int], group_ids: Sequence[int], batch_size: int
    ) -> None:
        if batch_size < 1:  # no batch would ever be full
            raise ValueError(f"batch_size must be at least 1, but got {batch_size!r}")
        self.sampler = sampler
        self.group_ids = [int(group) for group in group_ids]
        self.batch_size = batch_size
        self._open: defaultdict[int, list[int]] = defaultdict(list)

    def __iter__(self) -> Iterator[list[int]]:
        for index in self.sampler:
            batch = self._open[self.group_ids[index]]
            batch.append(index)
            if len(batch) == self.batch_size:
                yield self._open.pop(self.group_ids[index])
