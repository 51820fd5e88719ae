"""An endless run of batches, and the position in it."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

__all__ = ["Batches"]

logger = logging.getLogger(__name__)


class Batches(Iterator[Any]):
    """The batches of a loader; a finite one starts again when it is exhausted.

    Before it starts again, ``sampler.set_epoch`` is called if the loader has that.

    Args:
        loader: an iterable of batches.

    Attributes:
        epoch: how often the loader was exhausted.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self._iterator: Iterator[Any] | None = None
        self.epoch = 0

    @property
    def loader(self) -> Iterable[Any]:
        """The loader; another one is used from the next batch on."""
        return self._loader

    @loader.setter
    def loader(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self._iterator = None

    def replace(self, builder: Callable[[], Iterable[Any]]) -> None:
        """Free the loader, then build another one."""
        self._iterator = None
        del self._loader
        self._loader = builder()

    def start(self) -> Iterator[Any]:
        """The loader's iterator; starts its workers if they do not run."""
        if self._iterator is None:
            sampler = getattr(self._loader, "sampler", None)
            if self.epoch > 0 and sampler is not None and hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self.epoch)
            self._iterator = iter(self._loader)
        return self._iterator

    def __next__(self) -> Any:
        if self._iterator is not None:
            try:
                return next(self._iterator)
            except StopIteration:
                self.epoch += 1
                self._iterator = None
        for batch in self.start():
            return batch
        raise ValueError(f"the data loader is empty: {self._loader!r}")

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and the loader's own position if it has one."""
        state: dict[str, Any] = {"epoch": self.epoch}
        if hasattr(self._loader, "state_dict"):
            state["loader"] = self._loader.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], *, begun: bool) -> None:
        """Take back what ``state_dict`` gave.

        Args:
            state_dict: the state.
            begun: whether batches were taken before it was saved, so that a position that cannot
                be restored is worth a warning.
        """
        self.epoch = int(state_dict.get("epoch", 0))
        self._iterator = None
        if "loader" in state_dict and hasattr(self._loader, "load_state_dict"):
            self._loader.load_state_dict(state_dict["loader"])
        elif begun:
            logger.warning(
                "The position in the data could not be restored (%s): the loader starts at its "
                "first batch. Loaders of hooktrain.data.build_train_loader continue.",
                "the loader has no load_state_dict"
                if "loader" in state_dict
                else "it was not saved",
            )
