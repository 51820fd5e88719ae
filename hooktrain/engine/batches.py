"""Where a training is in its data."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hooktrain.utils.workers import start_workers

logger = logging.getLogger(__name__)


class Batches(Iterator[Any]):
    """The batches of a loader. A finite loader starts again when it is exhausted.

    Before it starts again, ``set_epoch`` is called where the loader's ``sampler``, its
    ``batch_sampler`` or the sampler of that one has it.

    Args:
        loader: an iterable of batches.

    Attributes:
        epoch: how often the loader was exhausted.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.epoch = 0
        self._iterator: Iterator[Any] | None = None

    def start(self) -> Iterator[Any]:
        """The loader's iterator. Starts its workers if they do not run."""
        if self._iterator is None:
            batch_sampler = getattr(self.loader, "batch_sampler", None)
            inner: Any = [
                getattr(owner, "sampler", None)
                for owner in (self.loader, batch_sampler)
            ]
            for sampler in (*inner, batch_sampler):
                if self.epoch > 0 and hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(self.epoch)
            self._iterator = start_workers(self.loader)
        return self._iterator

    def __next__(self) -> Any:
        for _ in range(
            2
        ):  # the rest of an epoch, of which nothing may be left, and the next one
            try:
                return next(self.start())
            except StopIteration:
                self.epoch += 1
                self._iterator = None
        text = "the data loader is empty (perhaps by drop_last), or starts only once"
        raise ValueError(f"{text}: {self.loader!r}")

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and the loader's own position if it has one."""
        state: dict[str, Any] = {"epoch": self.epoch}
        if hasattr(self.loader, "state_dict"):
            state["loader"] = self.loader.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], *, begun: bool) -> None:
        """Load what ``state_dict`` returned.

        Args:
            state_dict: the state.
            begun: whether batches were taken before it was saved, so that a position that cannot
                be restored is worth a warning.
        """
        self.epoch = int(state_dict.get("epoch", 0))
        self._iterator = None
        if "loader" in state_dict and hasattr(self.loader, "load_state_dict"):
            self.loader.load_state_dict(state_dict["loader"])
        elif begun:
            text = "The position in the data could not be restored, so the loader starts at its "
            text += "first batch. Loaders of hooktrain.data.build_train_loader continue"
            logger.warning(text)
