"""Steps the schedules of the learning rate and other parameters, and records them."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler as TorchLRScheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hooktrain.engine.train_loop import HookBase
from hooktrain.solver import LRMultiplier, ParamScheduler
from hooktrain.solver.group_scheduler import GroupParamScheduler
from hooktrain.solver.param_curves import INF
from hooktrain.solver.plateau import PlateauScheduler

__all__ = ["LRScheduler", "ParamSchedulerHook"]

logger = logging.getLogger(__name__)


class LRScheduler(HookBase):
    """Steps schedules after each iteration, and records the rate used in it as ``lr``.

    A schedule is one of:

    - a :class:`~hooktrain.solver.ParamScheduler`, which multiplies the optimizer's learning rate
      over the whole run;
    - one of MMEngine's family, such as :class:`~hooktrain.solver.LinearLR`. It steps at the end of
      each epoch if it has ``by_epoch``, and :class:`~hooktrain.solver.ReduceOnPlateauLR` after each
      new value of its ``monitor``;
    - a scheduler of torch.

    An iteration counts also where a scaler skipped its update. Where a momentum is scheduled, it is
    recorded as ``momentum``.

    Args:
        optimizer: the optimizer whose rate is recorded, and multiplied; or several by name. None
            takes ``trainer.optimizer``, or for schedules by name ``trainer.optim_wrapper``.
        scheduler: a schedule; or a list, stepped in order; or for several optimizers a dict of
            either by name, where ``<name>.lr`` is recorded. None takes ``trainer.scheduler``.
        metric: for :class:`torch.optim.lr_scheduler.ReduceLROnPlateau`, the metric that it watches.
            It steps after each new value, so register this hook after the one that evaluates.
        epoch_length: the number of iterations of an epoch, for schedules that count epochs.
        by_epoch: whether schedulers of torch count epochs.

    Raises:
        TypeError: if ``scheduler`` is none of these.
        ValueError: if a scheduler needs ``metric`` or ``epoch_length`` and has none; if ``metric``
            or ``by_epoch`` is given and no scheduler takes it; or, when training starts, if a
            loaded state is of other schedulers.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | Mapping[str, Any] | None = None,
        scheduler: Any = None,
        metric: str | None = None,
        *,
        epoch_length: int | None = None,
        by_epoch: bool = False,
    ) -> None:
        if epoch_length is not None and epoch_length < 1:
            raise ValueError(f"epoch_length must be at least 1, but got {epoch_length!r}")
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._metric = metric
        self._epoch_length = epoch_length
        self._by_epoch = by_epoch
        # By name of the optimizer; the only one has none. A multiplier has its scheduler only
        # when training starts.
        self._schedulers: dict[str, list[Any]] = {}
        if scheduler is not None:
            named = self._checked(scheduler)
            if not any(isinstance(s, ParamScheduler) for group in named.values() for s in group):
                self._schedulers = named
        self._seen_iters: dict[str, int] = {}
        self._loaded: Mapping[str, Any] | None = None
        self._recorded: list[tuple[str, dict[str, Any], str]] = []
        self._each_iteration: list[Callable[[], None]] = []
        self._each_epoch: list[Callable[[], None]] = []
        self._each_value: list[tuple[str, Any]] = []

    @property
    def scheduler(self) -> Any:
        """The schedule as it was given; after ``before_train`` with schedulers for multipliers."""
        if not self._schedulers or isinstance(self._scheduler, Mapping):
            return self._schedulers or self._scheduler
        schedulers = self._schedulers[""]
        return schedulers if isinstance(self._scheduler, Sequence) else schedulers[0]

    def before_train(self) -> None:
        """Find what was not given, and put multipliers to work where training starts."""
        trainer = self.trainer
        self._storage = trainer.storage
        if self._scheduler is None:
            self._scheduler = trainer.scheduler
        self._schedulers = {}
        self._recorded = []
        for name, given in self._checked(self._scheduler).items():
            optimizer = self._find_optimizer(name)
            # Anew in each run, since it is laid over the whole length, which may have changed.
            self._schedulers[name] = schedulers = [
                LRMultiplier(optimizer, s, trainer.max_iter, last_iter=trainer.iter - 1)
                if isinstance(s, ParamScheduler)
                else s
                for s in given
            ]
            group = optimizer.param_groups[self.get_best_param_group_id(optimizer)]
            scheduled = {getattr(s, "param_name", "lr") for s in schedulers}
            for key in ["lr", *scheduled.intersection({"momentum"})]:
                self._recorded.append((f"{name}.{key}" if name else key, group, key))
        if self._loaded is not None:
            self._load(self._loaded)
            self._loaded = None
        self._sort_by_period()

    def _find_optimizer(self, name: str) -> torch.optim.Optimizer:
        """The optimizer whose schedulers have this name."""
        wrapper = getattr(self.trainer, "optim_wrapper", None)
        if self._optimizer is not None:
            found: Any = self._optimizer
        elif not name and isinstance(wrapper, Mapping):
            raise ValueError(
                f"there are several optimizers, {list(wrapper)}: give a dict of schedulers by "
                f"these names, not {self._scheduler!r}"
            )
        else:
            found = wrapper if name else self.trainer.optimizer
        found = found[name] if name else found
        optimizer: torch.optim.Optimizer = getattr(found, "optimizer", found)
        return optimizer

    def _checked(self, scheduler: Any) -> dict[str, list[Any]]:
        """The schedulers by the name of their optimizer."""
        named = scheduler if isinstance(scheduler, Mapping) else {"": scheduler}
        lists = {n: [*s] if isinstance(s, Sequence) else [s] for n, s in named.items()}
        schedulers = [s for group in lists.values() for s in group]
        kinds = TorchLRScheduler | ParamScheduler | GroupParamScheduler
        for s in schedulers:
            if not isinstance(s, kinds):
                raise TypeError(
                    f"scheduler must be a torch LRScheduler, a ParamScheduler, or one of "
                    f"MMEngine's family; or a list of these, or a dict by name; but got {s!r}"
                )
            if self._epoch_length is None and self._counts_epochs(s):
                raise ValueError(
                    f"{s!r} counts epochs: give epoch_length=, the iterations of an epoch; or make "
                    f"it with by_epoch=False, and all its steps in iterations"
                )
        plateaus = [s for s in schedulers if isinstance(s, ReduceLROnPlateau)]
        if plateaus and self._metric is None:
            raise ValueError("ReduceLROnPlateau needs metric=, the name of the metric to watch")
        if self._metric is not None and not plateaus:
            raise ValueError(
                f"metric={self._metric!r} is for ReduceLROnPlateau, not for {scheduler!r}"
            )
        if self._by_epoch and not any(isinstance(s, TorchLRScheduler) for s in schedulers):
            raise ValueError(f"by_epoch=True is for schedulers of torch, not for {scheduler!r}")
        return lists

    def _counts_epochs(self, scheduler: Any) -> bool:
        if isinstance(scheduler, PlateauScheduler):
            return (scheduler.begin, scheduler.end) != (0, INF)
        if isinstance(scheduler, GroupParamScheduler):
            return scheduler.by_epoch
        return self._by_epoch and not isinstance(scheduler, ParamScheduler | LRMultiplier)

    def _sort_by_period(self) -> None:
        """Decide who steps when, so that a step of training does not have to."""
        self._each_iteration, self._each_epoch, self._each_value = [], [], []
        for scheduler in [s for group in self._schedulers.values() for s in group]:
            if isinstance(scheduler, ReduceLROnPlateau):
                self._each_value.append((self._metric or "", scheduler))
                continue
            if isinstance(scheduler, PlateauScheduler):
                self._each_value.append((scheduler.monitor, scheduler))
            if self._counts_epochs(scheduler):
                self._each_epoch.append(scheduler.step)
            elif not isinstance(scheduler, PlateauScheduler):
                self._each_iteration.append(scheduler.step)

    def after_step(self) -> None:
        """Record the rate of this iteration, then step to that of the next."""
        for name, group, key in self._recorded:
            self._storage.put_scalar(name, group[key], smoothing_hint=False)
        for step in self._each_iteration:
            step()
        if self._each_epoch and (self.trainer.iter + 1) % (self._epoch_length or 1) == 0:
            for step in self._each_epoch:
                step()
        if self._each_value:
            self._step_plateaus()

    def _step_plateaus(self) -> None:
        storage = self._storage
        new: dict[str, int] = {}
        for metric, scheduler in self._each_value:
            measured_at = storage.latest_iter(metric)
            if measured_at is None or measured_at <= self._seen_iters.get(metric, -1):
                continue
            new[metric] = measured_at
            value = storage.history(metric).latest()
            ours = isinstance(scheduler, PlateauScheduler)
            scheduler.step({metric: value} if ours else value)
        self._seen_iters |= new

    def after_train(self) -> None:
        """Say so if a metric to watch was never there."""
        for metric in sorted({metric for metric, _ in self._each_value}):
            if self._storage.latest_iter(metric) is None:
                logger.warning("There was no metric %r, so its schedule never stepped", metric)

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
        """The scheduler's state, as detectron2 saves it; of several ``{"schedulers": states}``."""
        if self._loaded is not None:
            return dict(self._loaded)
        if not self._schedulers:
            return {}
        states = {n: [s.state_dict() for s in group] for n, group in self._schedulers.items()}
        several = isinstance(self._scheduler, Mapping | Sequence)
        state: dict[str, Any] = {"schedulers": states} if several else states[""][0]
        return {**state, "seen_iters": dict(self._seen_iters)} if self._each_value else state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep the state until training starts: only then a multiplier has its scheduler."""
        self._loaded = dict(state_dict)

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        state = dict(state_dict)
        seen_iters = state.pop("seen_iters", {})
        states = state.get("schedulers", {"": [state]})
        saved, mine = ({n: len(s) for n, s in x.items()} for x in (states, self._schedulers))
        if saved != mine:
            raise ValueError(
                f"the state is of other schedulers: by the name of the optimizer, it has {saved} "
                f"of them, and there are {mine}"
            )
        for name, schedulers in self._schedulers.items():
            for scheduler, its_state in zip(schedulers, states[name], strict=True):
                scheduler.load_state_dict(its_state)
        self._seen_iters = dict(seen_iters)


ParamSchedulerHook = LRScheduler
"""MMEngine's name."""
