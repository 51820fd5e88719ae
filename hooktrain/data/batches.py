"""The batches of any loader, epoch after epoch."""

import logging
import random
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, repeat
from operator import length_hint
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, Subset

from hooktrain.data.loader import TrainLoader
from hooktrain.data.samplers import (
    InferenceSampler,
    StreamSampler,
    is_undivided,
    with_epochs,
)
from hooktrain.utils import comm
from hooktrain.utils.logger import log_once
from hooktrain.utils.names import State, names_used
from hooktrain.utils.tensors import checksum
from hooktrain.utils.workers import start_workers

logger = logging.getLogger(__name__)

GENERATORS = (
    np.random.Generator,
    np.random.RandomState,
    random.Random,
    torch.Generator,
)

SAME_BATCHES = (
    "Ranks or workers have read the same first batch. If each reads all of the data, divide it "
    "among them by comm.data_parallel_rank() and torch.utils.data.get_worker_info()"
)
OTHER_STREAMS = (
    "The ranks divide different streams, so samples are read twice or never: pass "
    "build_train_loader() the same data set, seed and total_batch_size on all ranks, not %s and %s"
)
EQUAL_RANKS = (
    "%s does not divide the data among the ranks: unless each rank has its own part of the data, "
    "use build_train_loader() or a DistributedSampler"
)
UNSHUFFLED = (
    "The DataLoader reads the training data in the same order in each epoch: shuffle=True, or "
    "build_train_loader(), shuffles them"
)
EQUAL_WORKERS = (
    "Each worker has a copy of the generator in %s.%s and draws the same numbers: draw from "
    "np.random, torch or random, which each worker seeds"
)
NO_EPOCHS = (
    "%s.set_epoch() is not called, since the stream of build_train_loader() never ends: pass the "
    "trainer a DataLoader, or let a sample depend only on its index and on random numbers"
)
STALE_COPIES = (
    "%s of the data set was set in the run, but each worker has a copy from its start: "
    "docs/guide/data.md shows samples that change with the epoch"
)
ONE_POSITION = (
    "A checkpoint has the main process's position in the %s, and all ranks continue from there. "
    "This is right only if all have the same state; docs/guide/data.md shows how to save each one"
)
STARTS_AGAIN = (
    "The position in the %s could not be restored, so its loader starts from the beginning. A "
    "loader of build_train_loader() continues; so does torchdata's StatefulDataLoader, for a stream"
)


class Batches(Iterator[Any]):
    """The batches of a loader, which is restarted whenever it is exhausted.

    Before each new epoch ``set_epoch(epoch)`` is called on its samplers and data sets that have
    this method, including wrapped ones. If a data set has it, persistent workers are restarted,
    since they keep a copy.

    Args:
        loader: any iterable of batches; None makes each batch None, without end.
        name: the name of the data in warnings.

    Attributes:
        loader: the loader.
        epoch: how many times the loader was exhausted.
        waited: the seconds spent waiting for batches, until a trainer sets it back to 0.
        first: the checksums of the first batches of up to two workers. For a ``TrainLoader`` they
            are kept only if its sampler is not a ``StreamSampler``, which divides the data itself.
    """

    def __init__(self, loader: Iterable[Any] | None, name: str = "data") -> None:
        self.loader: Any = loader
        self._name = name
        self.epoch = 0
        self.waited = 0.0
        self._taken = 0  # the number of batches taken in this epoch
        self._iterator: Iterator[Any] | None = None
        self.first: list[int] = []
        self._copied: State = {}
        self._compared = 0
        if isinstance(loader, DataLoader):
            self._compared = min(max(loader.num_workers, 1), 2)
        if isinstance(loader, TrainLoader):
            # Batches are counted here, so that no other iterator moves the position.
            loader.is_counted = False
            self._compared = not isinstance(loader.sampler, StreamSampler)
            for each in with_epochs(loader.dataset):
                logger.warning(NO_EPOCHS, type(each).__name__)
        elif hasattr(loader, "state_dict") and comm.get_world_size() > 1:
            logger.warning(ONE_POSITION, name)

    def start(self) -> Iterator[Any]:
        """Start the loader and its workers unless they have started, and return its iterator.

        Raises:
            TypeError: if it is a data set, several loaders, or torchdata's loader of a stream
                without a state.
        """
        if self._iterator is None:
            _refuse_loaders(self.loader)
            if self.epoch > 0:
                self._set_epoch()
            batches = repeat(None) if self.loader is None else self.loader
            self._copied = self._attributes_in_workers()
            self._iterator = start_workers(batches)
        return self._iterator

    def _attributes_in_workers(self) -> State:
        """The attributes of the data set, if workers keep copies of it."""
        if not getattr(self.loader, "options", {}).get("num_workers"):
            return {}
        return {**getattr(self.loader.dataset, "__dict__", {})}

    def log_stale_copies(self) -> None:
        """Log attributes of the data set that were set after its workers started."""
        for name, value in self._attributes_in_workers().items():
            if value is not self._copied.get(name):
                log_once(logger.info, STALE_COPIES, name)

    def _set_epoch(self) -> None:
        for name in ("batch_sampler", "sampler", "dataset"):
            for each in with_epochs(getattr(self.loader, name, None)):
                each.set_epoch(self.epoch)
        if isinstance(self.loader, DataLoader) and with_epochs(self.loader.dataset):
            self.loader._iterator = None  # that of persistent workers

    def __next__(self) -> Any:
        start = time.perf_counter()
        # If nothing is left of this epoch, the second attempt begins the next one.
        for _ in range(2):
            try:
                batch = next(self.start())
            except StopIteration:
                self.epoch += 1
                self._taken = 0
                self._iterator = None
            else:
                self.waited += time.perf_counter() - start
                self._taken += 1
                if len(self.first) < self._compared:
                    self.first.append(_checksum(batch))
                if isinstance(self.loader, TrainLoader):
                    self.loader.batches += 1
                return batch
        raise ValueError(
            f"the data loader has no batch: {self.loader!r}. Either it is empty, perhaps because "
            "of drop_last, or it can be iterated only once"
        )

    def state_dict(self) -> State:
        """The epoch, and the state of the loader if it has a ``state_dict``.

        A loader that is not a :class:`TrainLoader` is started first. Otherwise torchdata's would
        start itself, in the order of epoch 0 and with workers that a signal ends.
        """
        if hasattr(self.loader, "state_dict"):
            if not isinstance(self.loader, TrainLoader):
                self.start()
            return {"epoch": self.epoch, "loader": self.loader.state_dict()}
        # Such a loader will start from the beginning: of the next epoch, if this one is over.
        is_over = self._taken == length_hint(self.loader, -1)
        return {"epoch": self.epoch + is_over}

    def check_state_dict(self, state_dict: State) -> None:
        """Let the loader refuse the state of other data."""
        if "loader" in state_dict and hasattr(self.loader, "check_state_dict"):
            self.loader.check_state_dict(state_dict["loader"])

    def load_state_dict(self, state_dict: State) -> None:
        """Load what :meth:`state_dict` returned. Warn if the position cannot be restored."""
        self.epoch = int(state_dict.get("epoch", 0))
        self._taken = 0
        self._iterator = None
        if "loader" in state_dict and hasattr(self.loader, "load_state_dict"):
            self.loader.load_state_dict(state_dict["loader"])
        elif self.loader is not None:
            logger.warning(STARTS_AGAIN, self._name)


def warn_about_equal_samples(loader: Any) -> None:
    """Warn if ranks read the same samples, or if workers draw the same random numbers.

    Args:
        loader: this rank's training loader.
    """
    options = getattr(loader, "options", {})
    dataset = getattr(loader, "dataset", None)
    if isinstance(loader, DataLoader):
        options = vars(loader)
        owner = loader if loader.batch_sampler is None else loader.batch_sampler
        sampler = getattr(owner, "sampler", None)
        if is_undivided(sampler) and comm.data_parallel_size() > 1:
            logger.warning(EQUAL_RANKS, type(sampler).__name__)
        is_ordered = isinstance(sampler, SequentialSampler | InferenceSampler)
        if is_ordered or not getattr(sampler, "shuffle", True):
            logger.info(UNSHUFFLED)
    if options.get("num_workers", 0) < 2 or options.get("worker_init_fn"):
        return
    while dataset is not None:
        kind = type(dataset)
        reads = [getattr(kind, name, None) for name in ("__getitem__", "__iter__")]
        for name in chain.from_iterable(map(names_used, reads)):
            value = getattr(dataset, name, None)
            # A transform may have generators among its attributes.
            parts = getattr(value, "__dict__", {}).values() if callable(value) else ()
            if any(isinstance(each, GENERATORS) for each in (value, *parts)):
                logger.warning(EQUAL_WORKERS, kind.__name__, name)
        dataset = getattr(dataset, "dataset", None)


def _refuse_loaders(loader: Any) -> None:
    """Refuse several loaders, and a loader that would resume at a wrong position."""
    items = loader if isinstance(loader, list | tuple) else ()
    are_loaders = any(isinstance(each, DataLoader | TrainLoader) for each in items)
    if are_loaders or isinstance(loader, Mapping):
        raise TypeError(
            "pass one loader, for example of a ConcatDataset of all data sets, not "
            f"several: {loader!r}"
        )
    dataset = getattr(loader, "dataset", None)
    is_stream = isinstance(dataset, IterableDataset)
    if (
        is_stream
        and hasattr(loader, "state_dict")
        and not hasattr(dataset, "state_dict")
    ):
        # torchdata would read the stream again up to its position, and too far at a second resume.
        raise TypeError(
            f"{type(loader).__name__} needs a state_dict() and load_state_dict() of "
            f"{type(dataset).__name__} to continue; docs/guide/data.md has an example"
        )


def warn_about_equal_batches(batches: Batches) -> None:
    """Warn if ranks or workers read the same first batch, or different streams. A collective."""
    loader = batches.loader
    stream: State = {}
    if isinstance(loader, TrainLoader):
        # Of a Subset, whose indices a random split may have drawn on each rank.
        indices = loader.dataset.indices if isinstance(loader.dataset, Subset) else ()
        stream = {**loader.state_dict(), "indices": hash(tuple(map(int, indices)))}
    for other in comm.all_gather(stream):
        if other != stream:
            logger.warning(OTHER_STREAMS, stream, other)
            break
    # Ranks that compute a batch together read the same one.
    parts = dict(comm.all_gather((comm.data_parallel_rank(), batches.first)))
    first = list(filter(None, chain.from_iterable(parts.values())))
    if len(set(first)) < len(first):
        logger.warning(SAME_BATCHES)


def _checksum(batch: Any) -> int:
    """A checksum of the dense tensors of a batch; 0 if it has none."""
    leaves = tree_leaves(batch)
    numbers = tuple(checksum(leaf) for leaf in leaves if isinstance(leaf, Tensor))
    return hash(numbers) if any(numbers) else 0
