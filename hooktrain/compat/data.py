"""What detectron2's loaders are made of beside data sets and samplers."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

from hooktrain.utils.env import seed_all_rng


class AspectRatioGroupedDataset(IterableDataset[list[Any]]):
    """Batches of samples that are all wider than high, or all not.

    Args:
        dataset: of dicts with ``width`` and ``height``.
        batch_size: samples in a batch.
    """

    def __init__(self, dataset: Iterable[Any], batch_size: int) -> None:
        self.dataset = dataset
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[list[Any]]:
        batches: dict[bool, list[Any]] = {True: [], False: []}
        for sample in self.dataset:
            is_wide = sample["width"] > sample["height"]
            batches[is_wide].append(sample)
            if len(batches[is_wide]) == self.batch_size:
                full, batches[is_wide] = batches[is_wide], []
                yield full


def trivial_batch_collator(batch: Any) -> Any:
    """The samples of a batch, as they are."""
    return batch


def worker_init_reset_seed(worker_id: int) -> None:
    """Seed the generators of a worker process of a torch ``DataLoader``."""
    seed_all_rng(torch.initial_seed() % 2**31 + worker_id)
