"""Loaders of batches. The training loader continues exactly where a run stopped."""

import logging
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain, count, islice
from operator import length_hint
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

from hooktrain.data.dataset import MapDataset, Mapper
from hooktrain.data.samplers import (
    InferenceSampler,
    StreamSampler,
    TrainingSampler,
    is_undivided,
    with_epochs,
)
from hooktrain.utils import comm
from hooktrain.utils.env import seed_on_host
from hooktrain.utils.names import State, call, check_count
from hooktrain.utils.workers import start_workers

logger = logging.getLogger(__name__)

_DECIDED = (
    "(mapper is a function of each sample; total_batch_size, seed and sampler determine the "
    "batches; shuffle=False keeps the order)"
)

# torch's DataLoader refuses changes of such attributes too.
_FIXED = ("dataset", "sampler", "total_batch_size", "batch_size")

# Their samples draw no random numbers; those of a subclass may.
_PLAIN = (list, range, Tensor, np.ndarray, TensorDataset)

# A position in the stream of all ranks, and the index of the sample there.
Key = tuple[int, int]


@dataclass(eq=False)
class TrainLoader:
    """An endless stream of batches that knows its position.

    Iterating continues at the current position, which counts the batches handed out, not those
    that workers have prepared. Once a trainer has the loader, only the batches that the trainer
    takes are counted, and any other iterator leaves the position unchanged. Everything random
    inside a sample is seeded by the seed and the sample's position in the stream, if it comes from
    the global generators of torch, numpy or Python. So the batches depend neither on the number of
    ranks and workers nor on interruptions, and skipping reads no sample.

    :func:`build_train_loader` builds it. Its data set, sampler and batch size cannot be replaced,
    since a running iterator would keep the old ones.

    Attributes:
        dataset: the data set.
        sampler: the sampler, which yields the indices.
        total_batch_size: the number of samples in a batch of all ranks together.
        seed: the seed of the stream, and of the sampler if it is a StreamSampler.
        adopt_seed: whether the seed was drawn, so that the seed of a loaded state replaces it.
        options: the options of torch's ``DataLoader``.
        batches: how many batches were handed out so far.
        is_counted: whether iterating counts the batches. A trainer counts its own.
    """

    dataset: Dataset[Any]
    sampler: Sampler[int]
    total_batch_size: int
    seed: int
    adopt_seed: bool
    options: Mapping[str, Any]
    batches: int = 0
    is_counted: bool = True

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute.

        Raises:
            ValueError: if a running iterator would not notice the change.
        """
        if name in _FIXED and hasattr(self, "options"):
            raise ValueError(
                f"{name} of a loader cannot be set, since its iterator would keep the old one: "
                "build another loader, and assign it to trainer.data_loader"
            )
        super().__setattr__(name, value)

    def __len__(self) -> int:
        """The number of batches in an epoch of the sampler. The stream does not end there."""
        if isinstance(self.sampler, StreamSampler):
            size = self.sampler.epoch_length(0)
        else:
            size = length_hint(self.sampler)
            if not is_undivided(self.sampler):
                size *= comm.data_parallel_size()
        size = size or len(self.dataset)  # type: ignore[arg-type]
        return -(-size // self.total_batch_size)

    def __iter__(self) -> Iterator[Any]:
        loader = DataLoader(
            SeededDataset(self.dataset, self.seed),
            batch_sampler=self._keys(),
            # Its own generator, since DataLoader would otherwise draw from the trainer's.
            generator=torch.Generator().manual_seed(self.seed),
            **self.options,
        )
        # The workers start now, not at the first batch.
        batches = start_workers(loader)
        return self._count(batches, in_process=loader.num_workers == 0)

    def _count(self, batches: Iterator[Any], in_process: bool) -> Iterator[Any]:
        spare = np.random.MT19937()
        while True:
            # Reading a sample in this process must not change the random numbers of the step.
            with preserved_rng_state(spare) if in_process else nullcontext():
                batch = next(batches)
            if self.is_counted:
                self.batches += 1
            yield batch

    def _keys(self) -> Iterator[list[Key]]:
        """The keys of this rank's part of each global batch, from the current one on.

        Global batch ``i`` holds ``total_batch_size`` positions of the stream from
        ``i * total_batch_size`` on, which the ranks take in turns.
        """
        rank = comm.data_parallel_rank()
        world = comm.data_parallel_size()
        first = self.batches * self.total_batch_size
        if isinstance(self.sampler, StreamSampler):
            indices = self.sampler.stream(first + rank, world)
        else:
            drawn = _endless(self.sampler, self.seed)  # skipping reads no sample
            if is_undivided(self.sampler):
                indices = islice(drawn, first + rank, None, world)
            else:
                indices = islice(drawn, first // world, None)
        positions = count(first + rank, world)
        mine = zip(positions, indices, strict=False)
        share = self.total_batch_size // world
        while True:
            yield list(islice(mine, share))

    def state_dict(self) -> State:
        """The position, and the values that identify the stream."""
        return {"batches": self.batches, **self._identity()}

    def check_state_dict(self, state_dict: State) -> None:
        """Raise the errors that :meth:`load_state_dict` would raise, and change nothing.

        Raises:
            ValueError: if the seed, the size of the data set or the batch size differs from the
                saved one, so that the position belongs to another stream.
        """
        for name, value in self._identity().items():
            saved = state_dict.get(name)
            is_adopted = name == "seed" and self.adopt_seed
            if saved != value and not is_adopted:
                raise ValueError(
                    f"the position in the data belongs to a stream with {name}={saved!r}, "
                    f"but now {name}={value!r}: use the saved value, resume without the data "
                    "(train.resume_parts, or checkpointables=[...]), or load only the weights by "
                    "load_checkpoint()"
                )

    def load_state_dict(self, state_dict: State) -> None:
        """Continue at a saved position, with any number of ranks and workers.

        A seed that was drawn, not given, is replaced by the saved one.

        Raises:
            ValueError: see :meth:`check_state_dict`.
        """
        self.check_state_dict(state_dict)
        self.seed = state_dict["seed"]  # the same, if it was given
        if isinstance(self.sampler, StreamSampler):
            self.sampler.seed = self.seed
        self.batches = state_dict["batches"]

    def _identity(self) -> State:
        return {
            "seed": self.seed,
            "dataset_size": len(self.dataset),  # type: ignore[arg-type]
            "total_batch_size": self.total_batch_size,
        }


@contextmanager
def preserved_rng_state(spare: np.random.MT19937) -> Iterator[None]:
    """Restore the CPU's global generators afterwards, even after an error.

    Meanwhile numpy draws from ``spare``, since copying its state would take a tenth of a
    millisecond, and exchanging the generators takes a microsecond. numpy draws normal numbers in
    pairs; if the second of a pair is still waiting, it is dropped.
    """
    python_state = random.getstate()
    torch_state = torch.get_rng_state()
    numpys = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(spare)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        random.setstate(python_state)
        torch.set_rng_state(torch_state)
        np.random.set_bit_generator(numpys)  # type: ignore[attr-defined]


def _endless(sampler: Sampler[int], seed: int) -> Iterator[int]:
    """The indices of a finite sampler, epoch after epoch; ``set_epoch`` is called before each.

    torch's samplers draw their order, or a seed for it, from the global generator when their first
    index is taken. Other samplers draw each index. So the generators are seeded by the epoch and
    the position in it while indices are taken, and restored afterwards. A thousand indices are
    taken at a time, since saving and restoring the states takes as long as a hundred of them.
    """
    spare = np.random.MT19937()
    for epoch in count():
        for each in with_epochs(sampler):
            each.set_epoch(epoch)
        # This calls iter(sampler) only when the first index is taken, and so is seeded too.
        indices = chain.from_iterable([sampler])
        for chunk in count():
            with preserved_rng_state(spare):
                seed_on_host(chunk, "sampler", seed, epoch)
                drawn = list(islice(indices, 1000))
            if chunk == 0 and not drawn:
                raise ValueError(f"the sampler is empty: {sampler!r}")
            yield from drawn
            if len(drawn) < 1000:
                break


@dataclass(eq=False)
class SeededDataset(Dataset[Any]):
    """Reads samples by key, with the global generators seeded by the key's position.

    Plain containers draw no random numbers, so only the last sample of a batch is seeded, for the
    collate function. This saves 10 us for each other sample.
    """

    dataset: Dataset[Any]
    seed: int

    def __getitems__(self, keys: list[Key]) -> list[Any]:
        is_plain = type(self.dataset) in _PLAIN
        last = len(keys) - 1
        samples = []
        for place, (position, index) in enumerate(keys):
            if place == last or not is_plain:
                seed_on_host(position, "sample", self.seed)
            samples.append(self.dataset[index])
        return samples


def build_train_loader(
    dataset: Dataset[Any],
    *,
    total_batch_size: int,
    mapper: Mapper | None = None,
    sampler: Sampler[int] | None = None,
    seed: int | None = None,
    shuffle: bool = True,
    **options: Any,
) -> TrainLoader | DataLoader[Any]:
    """An endless stream of training batches, all of full size, that continues where a run stopped.

    An ``IterableDataset`` has its own order, and is read by torch's ``DataLoader``, which cannot
    resume. To resume, give the trainer torchdata's ``StatefulDataLoader`` instead of this;
    docs/guide/data.md has an example.

    Args:
        dataset: a data set with ``__len__`` and ``__getitem__``, or an ``IterableDataset``, which
            must itself give each rank and each worker its part.
        total_batch_size: the number of samples in a batch of all ranks together, a multiple of the
            number of ranks.
        mapper: a function that is applied to each sample; see :class:`hooktrain.data.MapDataset`.
        sampler: yields the indices, and determines the length of an epoch. None shuffles with
            ``seed``. torch's samplers for a single process, such as ``WeightedRandomSampler``, are
            divided among the ranks. Any other sampler that is not a StreamSampler must itself
            divide the data, as ``DistributedSampler`` does. Indices are taken a thousand at a time.
        seed: any non-negative integer. It determines the order and the random numbers in a sample.
            None draws one from torch's global generator of rank 0 (a collective), or takes the seed
            of a StreamSampler.
        shuffle: False keeps the order of the data set, if there is no sampler.
        options: options of torch's ``DataLoader``, such as ``num_workers`` and ``collate_fn``.
            ``drop_last`` only matters for an ``IterableDataset``.

    Raises:
        ValueError: if the data set is empty, if the ranks cannot share the batch size, if the seed
            is not the sampler's, or if an option would determine the batches too, such as
            ``batch_size``.
        TypeError: for an unknown option.
    """
    world = comm.data_parallel_size()
    check_count("total_batch_size", total_batch_size)
    if total_batch_size % world:
        raise ValueError(
            f"total_batch_size must be a positive multiple of {world}, the ranks, but got "
            f"{total_batch_size!r}"
        )
    dataset = _mapped(dataset, mapper)
    if isinstance(dataset, IterableDataset):
        options["batch_size"] = total_batch_size // world
        return DataLoader(dataset, sampler=sampler, **options)
    options.pop("drop_last", None)
    # Refuses unknown options now, not when the training starts.
    call(DataLoader, [dataset], {"batch_sampler": (), **options}, _DECIDED)
    size = len(dataset)  # type: ignore[arg-type]
    if isinstance(sampler, BatchSampler) or "batch_sampler" in options:
        raise TypeError(
            "sampler must yield single indices, of which total_batch_size make a batch, not "
            f"{options.get('batch_sampler', sampler)!r}"
        )
    if isinstance(sampler, WeightedRandomSampler) and len(sampler.weights) != size:
        raise ValueError(
            f"sampler needs a weight for each of the {size} samples, not {len(sampler.weights)}"
        )
    if sampler is None:
        sampler = TrainingSampler(size, shuffle, seed)
    if size < total_batch_size:
        logger.warning(
            "total_batch_size=%d exceeds the %d samples, so a batch has some of them twice",
            total_batch_size,
            size,
        )
    adopt_seed = seed is None
    if isinstance(sampler, StreamSampler):
        if seed not in (None, sampler.seed):
            raise ValueError(
                f"{seed=} is not the sampler's, {sampler.seed}: pass the seed to the sampler, and "
                "none here"
            )
        seed, adopt_seed = sampler.seed, sampler.adopt_seed
    elif seed is None:
        seed = comm.shared_random_seed()
    return TrainLoader(dataset, sampler, total_batch_size, seed, adopt_seed, options)


def build_test_loader(
    dataset: Dataset[Any],
    *,
    mapper: Mapper | None = None,
    sampler: Sampler[int] | None = None,
    **options: Any,
) -> DataLoader[Any]:
    """A loader that yields each sample once, with the samples divided among the ranks.

    Args:
        dataset: a data set with ``__len__`` and ``__getitem__``, or an ``IterableDataset``, which
            must itself give each rank its part.
        mapper: a function that is applied to each sample; see :class:`hooktrain.data.MapDataset`.
        sampler: yields this rank's indices. None takes :class:`hooktrain.data.InferenceSampler`.
        options: options of torch's ``DataLoader``, such as ``batch_size``, ``num_workers`` and
            ``collate_fn``.
    """
    dataset = _mapped(dataset, mapper)
    if sampler is None and not isinstance(dataset, IterableDataset):
        sampler = InferenceSampler(len(dataset))  # type: ignore[arg-type]
    return DataLoader(dataset, sampler=sampler, **options)


def _mapped(dataset: Dataset[Any], mapper: Mapper | None) -> Dataset[Any]:
    """The data set, with the mapper applied to each sample if there is one."""
    # IterableDataset inherits the method.
    if isinstance(dataset, tuple | Mapping) or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            "a data set must have __getitem__(index) and __len__, like TensorDataset(X, y), or be "
            f"an IterableDataset, but got {dataset!r:.200}"
        )
    return dataset if mapper is None else MapDataset(dataset, mapper)
