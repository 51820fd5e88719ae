"""Steps a learning-rate schedule, and records the learning rate."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler as TorchLRScheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hooktrain.engine.hook_base import HookBase
from hooktrain.solver import LRMultiplier, ParamScheduler

__all__ = ["LRScheduler"]


class LRScheduler(HookBase):
    """Steps a schedule after each iteration, and records the rate used in it as ``lr``.

    Args:
        optimizer: None takes ``trainer.optimizer``.
        scheduler: a torch scheduler; or a :class:`~hooktrain.solver.ParamScheduler` that
            multiplies the optimizer's learning rate over the whole run. None takes
            ``trainer.scheduler``.
        metric: for :class:`torch.optim.lr_scheduler.ReduceLROnPlateau`, the metric that it watches:
            it steps after each new value, so register this hook after the one that evaluates.

    Raises:
        TypeError: if ``scheduler`` is neither of these.
        ValueError: if a scheduler needs ``metric`` and has none, or the other way round.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: TorchLRScheduler | ParamScheduler | None = None,
        metric: str | None = None,
    ) -> None:
        if scheduler is not None:
            _check(scheduler, metric)
        self._optimizer = optimizer
        self._scheduler: Any = scheduler
        self._multiplier: ParamScheduler | None = None
        self._metric = metric
        self._seen_iter = -1
        self._group: dict[str, Any] = {}
        self._loaded: Mapping[str, Any] | None = None

    @property
    def scheduler(self) -> Any:
        """The schedule: after ``before_train`` always an object with ``step``."""
        return self._scheduler

    def before_train(self) -> None:
        """Find what was not given, and put a multiplier to work where training starts."""
        trainer = self.trainer
        self._storage = trainer.storage
        optimizer = self._optimizer or trainer.optimizer
        if self._scheduler is None:
            self._scheduler = trainer.scheduler
            _check(self._scheduler, self._metric)
        if isinstance(self._scheduler, ParamScheduler):
            self._multiplier = self._scheduler
        if self._multiplier is not None:
            # Anew in each run, since it is laid over the whole length, which may have changed.
            self._scheduler = LRMultiplier(
                optimizer, self._multiplier, trainer.max_iter, last_iter=trainer.iter - 1
            )
        if self._loaded is not None:
            self._scheduler.load_state_dict(dict(self._loaded))
            self._loaded = None
        self._group = optimizer.param_groups[self.get_best_param_group_id(optimizer)]

    def after_step(self) -> None:
        """Record the rate of this iteration, then step to that of the next."""
        storage = self._storage
        storage.put_scalar("lr", self._group["lr"], smoothing_hint=False)
        if self._metric is None:
            self._scheduler.step()
            return
        measured_at = storage.latest_iter(self._metric)
        if measured_at is not None and measured_at > self._seen_iter:
            self._seen_iter = measured_at
            self._scheduler.step(storage.history(self._metric).latest())

    @staticmethod
    def get_best_param_group_id(optimizer: torch.optim.Optimizer) -> int:
        """The group whose rate stands for all: the one with the most parameters.

        If each group has one parameter, the first group that has the most common rate.
        """
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        if max(sizes) > 1:
            return sizes.index(max(sizes))
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        return rates.index(Counter(rates).most_common(1)[0][0])

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state, as detectron2 saves it."""
        if self._loaded is not None:
            return dict(self._loaded)
        if self._scheduler is None or isinstance(self._scheduler, ParamScheduler):
            return {}
        state: dict[str, Any] = self._scheduler.state_dict()
        return {**state, "seen_iter": self._seen_iter} if self._metric else state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep the state until training starts: only then a multiplier has its scheduler."""
        state = dict(state_dict)
        self._seen_iter = state.pop("seen_iter", -1)
        self._loaded = state


def _check(scheduler: Any, metric: str | None) -> None:
    if not isinstance(scheduler, TorchLRScheduler | ParamScheduler):
        raise TypeError(
            f"scheduler must be a torch LRScheduler or a ParamScheduler, but got {scheduler!r}"
        )
    plateau = isinstance(scheduler, ReduceLROnPlateau)
    if plateau and metric is None:
        raise ValueError("ReduceLROnPlateau needs metric=, the name of the metric to watch")
    if metric is not None and not plateau:
        raise ValueError(f"metric={metric!r} is for ReduceLROnPlateau, not for {scheduler!r}")
