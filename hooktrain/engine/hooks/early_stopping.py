"""Ends a run that no longer improves."""

import math
from collections.abc import Mapping
from typing import Any

from hooktrain.engine.hooks.watching import check_comes, sign_of
from hooktrain.engine.train_loop import HookBase


class EarlyStopping(HookBase):
    """Asks for the end of training when a metric has not improved for some evaluations.

    It looks after each iteration that put a new value of the metric, so register it after the
    hook that does. A value that is not finite counts as no improvement. A metric that has not come
    when all evaluations were made once ends the run with an error.

    Args:
        metric: the metric's name, such as ``"classification/val_loss"``.
        mode: ``"min"`` if less is better, ``"max"`` if more is. None asks the name: that of a loss
            or an error means ``"min"``, that of a well-known score (accuracy, AP, mIoU) ``"max"``.
        patience: how many values in a row without improvement end the run, at least 1.
        min_delta: an improvement must be larger than this.

    Raises:
        ValueError: for another mode, for None where the name does not tell, or a patience below 1.
    """

    def __init__(
        self, metric: str, mode: str | None = None, patience: int = 5, min_delta: float = 0.0
    ) -> None:
        if patience < 1:
            raise ValueError(f"patience must be at least 1, but got {patience!r}")
        self._metric = metric
        self._sign = sign_of(metric, mode)
        self._patience = patience
        self._min_delta = min_delta
        self._best: float | None = None
        self._waited = 0
        self._seen_iter = -1

    def before_train(self) -> None:
        """A run that had stopped stops again, unless its patience was raised."""
        self._stop_if_exhausted()

    def after_step(self) -> None:
        """Look at a new value of the metric."""
        if self.is_due(self.trainer.sync_period):
            check_comes(self, self._metric)
        storage = self.trainer.storage
        measured_at = storage.latest_iter(self._metric)
        if measured_at is None or measured_at <= self._seen_iter:
            return
        self._seen_iter = measured_at
        value = storage.history(self._metric).latest()
        best = self._best
        if math.isfinite(value) and (best is None or (value - best) * self._sign > self._min_delta):
            self._best = value
            self._waited = 0
        else:
            self._waited += 1
        self._stop_if_exhausted()

    def after_train(self) -> None:
        """Refuse a metric that was never there."""
        check_comes(self, self._metric)

    def _stop_if_exhausted(self) -> None:
        if self._waited >= self._patience:
            reason = (
                f"{self._metric} has not improved on {self._best} in {self._waited} evaluations"
            )
            self.trainer.request_stop(reason)

    def state_dict(self) -> dict[str, Any]:
        """The best value and how long ago it was."""
        return {"best": self._best, "waited": self._waited, "seen_iter": self._seen_iter}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned."""
        self._best = state_dict["best"]
        self._waited = state_dict["waited"]
        self._seen_iter = state_dict["seen_iter"]
