"""The parts of detectron2's loaders that hooktrain.data does not have."""

import copy
import math
import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from hooktrain import data as core
from hooktrain.data import StreamSampler
from hooktrain.utils.env import seed_all_rng


class RepeatFactorTrainingSampler(StreamSampler):
    """Gives each sample as often as its factor says, for data whose classes are rare and frequent.

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
        images = [
            {annotation["category_id"] for annotation in image["annotations"]}
            for image in dataset_dicts
        ]
        counts = Counter(chain.from_iterable(images))
        power = 0.5 if sqrt else 1.0
        factors = []
        for image in images:
            rarest = min((counts[category] for category in image), default=math.inf)
            ratio = repeat_thresh * len(images) / rarest
            factors.append(max(ratio**power, 1.0))
        return torch.tensor(factors)

    def epoch_indices(self, epoch: int) -> Tensor:
        """The samples of this epoch, each repeated; the number differs between epochs."""
        generator = self.generator(epoch)
        factors = self.repeat_factors
        chance = torch.rand(len(factors), generator=generator, dtype=factors.dtype)
        # One more than the whole factor, if the chance is below the fraction.
        repeats = (factors - chance).ceil().long()
        indices = torch.repeat_interleave(repeats)
        if self.shuffle:
            order = torch.randperm(len(indices), generator=generator)
            indices = indices[order]
        return indices


class DatasetFromList(Dataset[Any]):
    """A list as a data set.

    Args:
        lst: the samples.
        copy: whether samples are returned as deep copies, so that they can be changed in place.
            Serialised samples are new objects in any case.
        serialize: whether the samples are kept as one array of bytes. Worker processes share it;
            of a list each worker comes to have a copy, since reading an object changes its
            reference count.
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
        lengths = np.array([len(part) for part in parts], dtype=np.int64)
        self._ends = lengths.cumsum()
        self._begins = self._ends - lengths
        # It has a byte more at the end, since torch takes no empty buffer.
        self._bytes = torch.frombuffer(
            bytearray(b"".join(parts) + b"\0"), dtype=torch.uint8
        )

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, index: int) -> Any:
        if self._serialize:
            part = self._bytes[self._begins[index] : self._ends[index]]
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
        shard_sampler: whether the indices are divided among the workers of a DataLoader, so that
            each is read once. Else every worker reads all of them.
        shard_chunk_size: the number of indices in a row that go to one worker. If it is the batch
            size, batches are the same for any number of workers.
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
    """A :class:`hooktrain.data.MapDataset` with the names that copies of detectron2's read."""

    def __new__(cls, dataset: Any, map_func: Callable[[Any], Any]) -> Any:
        """Make the core's data set for an ``IterableDataset``."""
        if isinstance(dataset, IterableDataset):
            return core.MapDataset(dataset, map_func)
        return super().__new__(cls, dataset, map_func)

    def __init__(self, dataset: Any, map_func: Callable[[Any], Any]) -> None:
        super().__init__(dataset, map_func)
        self._dataset = dataset
        self._map_func = map_func
        self._rng = random.Random(42)
        self._fallback_candidates = set(range(len(dataset)))


def trivial_batch_collator(batch: Any) -> Any:
    """Return the samples of a batch as they are."""
    return batch


def worker_init_reset_seed(worker_id: int) -> None:
    """Seed the generators of a worker process of a torch ``DataLoader``."""
    seed = torch.initial_seed() % 2**31
    seed_all_rng(seed + worker_id)
