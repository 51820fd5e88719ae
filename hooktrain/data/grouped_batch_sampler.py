"""Batches of samples that belong together."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from torch.utils.data import Sampler

__all__ = ["GroupedBatchSampler"]


class GroupedBatchSampler(Sampler[list[int]]):
    """Batches whose samples belong to one group each, such as one aspect ratio.

    Batches come in the order in which they fill up. What is left in a group at the end of a finite
    sampler stays for the next iteration over this object.

    Args:
        sampler: gives the indices.
        group_ids: a group for each index.
        batch_size: samples in a batch, at least 1.

    Raises:
        TypeError: if ``sampler`` is not a sampler.
        ValueError: for a batch size below 1.
    """

    def __init__(self, sampler: Sampler[int], group_ids: Sequence[int], batch_size: int) -> None:
        if not isinstance(sampler, Sampler):
            raise TypeError(f"sampler must be a torch Sampler, but got {sampler!r}")
        if batch_size < 1:
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
