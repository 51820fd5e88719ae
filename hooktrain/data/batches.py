"""The batches of any loader, epoch after epoch."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from operator import length_hint
from typing import Any

from torch.testing import assert_close

from hooktrain.data.loader import TrainLoader
from hooktrain.utils import comm
from hooktrain.utils.workers import start_workers

logger = logging.getLogger(__name__)

SAME_BATCHES = (
    "The first two batches are the same. If each worker reads all of a stream, divide it by "
    "torch.utils.data.get_worker_info()"
)
STARTS_ANEW = (
    "The position in the %s could not be restored: the loader starts anew. Those of "
    "build_train_loader() go on; for a stream that needs pip install 'hooktrain[streams]'"
)


class Batches(Iterator[Any]):
    """The batches of a loader, which starts again when it is exhausted.

    Then ``set_epoch`` of its samplers and of its data set is called, if they have that.

    Args:
        loader: the loader.
        name: for a warning.

    Attributes:
        epoch: how often it was exhausted.
    """

    def __init__(self, loader: Iterable[Any], name: str = "data") -> None:
        self.loader = loader
        self._name = name
        self.epoch = 0
        self._taken = 0  # of this epoch
        self._iterator: Iterator[Any] | None = None

    def start(self) -> Iterator[Any]:
        """The loader's iterator, with its workers."""
        if self._iterator is None:
            if self.epoch > 0:
                self._set_epoch()
            self._iterator = start_workers(self.loader)
            if self.epoch == 0 and getattr(self.loader, "num_workers", 0) > 1:
                self._iterator = _told_apart(self._iterator)
        return self._iterator

    def _set_epoch(self) -> None:
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        sampler = getattr(self.loader, "sampler", None)
        inner = getattr(batch_sampler, "sampler", None)
        dataset = getattr(self.loader, "dataset", None)
        for each in (sampler, inner, batch_sampler, dataset):
            if hasattr(each, "set_epoch"):
                each.set_epoch(self.epoch)  # type: ignore[union-attr]

    def __next__(self) -> Any:
        # Of this epoch nothing may be left; then the next one begins.
        for _ in range(2):
            try:
                batch = next(self.start())
            except StopIteration:
                self.epoch += 1
                self._taken = 0
                self._iterator = None
            else:
                self._taken += 1
                return batch
        raise ValueError(
            f"the data loader is empty (by drop_last?), or starts only once: {self.loader!r}"
        )

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and the loader's position if it has one."""
        if hasattr(self.loader, "state_dict"):
            return {"epoch": self.epoch, "loader": self.loader.state_dict()}
        # The loader will start anew: with the next epoch, if this one is over.
        is_over = self._taken == length_hint(self.loader, -1)
        return {"epoch": self.epoch + is_over}

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the loader refuse the state of other data."""
        if "loader" in state_dict and hasattr(self.loader, "check_state_dict"):
            self.loader.check_state_dict(state_dict["loader"])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned; warn if the position cannot be restored."""
        self.epoch = int(state_dict.get("epoch", 0))
        self._taken = 0
        self._iterator = None
        if "loader" in state_dict and hasattr(self.loader, "load_state_dict"):
            self.loader.load_state_dict(state_dict["loader"])
            if comm.get_world_size() > 1 and not isinstance(self.loader, TrainLoader):
                logger.warning(
                    "Each rank goes on from the main process's position in %r: this is "
                    "right only if the state is the same for all ranks",
                    self.loader,
                )
        else:
            logger.warning(STARTS_ANEW, self._name)


def _told_apart(batches: Iterator[Any]) -> Iterator[Any]:
    """The batches; warn if the first two, which are of two workers, are the same."""
    first = None
    for _, batch in zip(range(2), batches, strict=False):
        # It compares numbers only.
        with suppress(AssertionError, TypeError):
            assert_close(first, batch, rtol=0, atol=0)
            logger.warning(SAME_BATCHES)
        first = batch
        yield batch
    del first
    yield from batches
