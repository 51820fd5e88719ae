"""Steps the schedules of the learning rate and other parameters, and records them."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hooktrain.engine.hooks.evaluation import better_by_name, check_comes
from hooktrain.engine.train_loop import HookBase
from hooktrain.solver import LRMultiplier, ParamScheduler
from hooktrain.solver.build import load_scheduler_states, scheduler_states
from hooktrain.solver.param_scheduler import INF, GroupParamScheduler

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
        by_epoch: whether schedulers of torch count epochs.

    Raises:
        ValueError: when training starts, if there is no schedule, one counts epochs and the trainer
            has no ``epoch_length``, one is there twice, all are of another optimizer, or ``metric``
            is not used; when a state is loaded, if it is of other schedulers.

    Attributes:
        scheduler: the schedule as it was given.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | Mapping[str, Any] | None = None,
        scheduler: Any = None,
        metric: str | None = None,
        *,
        by_epoch: bool = False,
    ) -> None:
        self._optimizer = optimizer
        self.scheduler = scheduler
        self._metric = metric
        self._by_epoch = by_epoch
        self._schedulers: dict[
            str, list[Any]
        ] = {}  # the only optimizer has the name ""
        self._seen_iters: dict[int, int] = {}
        self._loaded: Mapping[str, Any] = {}

    def before_train(self) -> None:
        """Find what was not given, and decide who steps when, so that a step need not."""
        trainer = self.trainer
        self._storage = trainer.storage
        self._find_schedulers()
        self._recorded: list[tuple[str, dict[str, Any], str]] = []
        self._steps: list[tuple[int, Callable[[], None]]] = []  # with their periods
        self._watched: list[tuple[str, Any]] = []  # the metric, and who steps with it
        for name, each in self._schedulers.items():
            optimizer = self._optimizer_of(name)
            for i, s in enumerate(each):
                if isinstance(s, ParamScheduler):
                    # Made again in each run: it covers the whole length, which may have changed.
                    length = max(1, trainer.max_iter)
                    each[i] = LRMultiplier(optimizer, s, length, trainer.iter - 1)
                self._decide_when_to_step(each[i])
            driven = [getattr(s, "optimizer", optimizer) for s in each]
            if each and all(
                getattr(d, "optimizer", d) is not optimizer for d in driven
            ):
                raise ValueError(
                    f"none of {each} schedules the optimizer of the trainer"
                )
            group = optimizer.param_groups[self.get_best_param_group_id(optimizer)]
            prefix = f"{name}." if name else ""
            self._recorded.append((f"{prefix}lr", group, "lr"))
            if any(getattr(s, "param_name", None) == "momentum" for s in each):
                self._recorded.append((f"{prefix}momentum", group, "momentum"))
        if self._metric is not None and not self._watched:
            raise ValueError(
                f"metric={self._metric!r} is for ReduceLROnPlateau, and there is none"
            )
        self._load()

    def _find_schedulers(self) -> None:
        if self.scheduler is None:
            self.scheduler = getattr(self.trainer, "scheduler", None)
        if self.scheduler is None:
            raise ValueError(
                "LRScheduler has no schedule: give scheduler=, after the optimizer"
            )
        named = (
            self.scheduler
            if isinstance(self.scheduler, Mapping)
            else {"": self.scheduler}
        )
        self._schedulers = {
            name: list(given) if isinstance(given, Sequence) else [given]
            for name, given in named.items()
        }

    def _load(self) -> None:
        if state := self._loaded:
            # detectron2's is the state of the only scheduler.
            load_scheduler_states(
                self._schedulers, state.get("schedulers", {"": [state]})
            )
            self._seen_iters = dict(state.get("seen_iters", {}))
            self._loaded = {}

    def _optimizer_of(self, name: str) -> Any:
        wrapper = getattr(self.trainer, "optim_wrapper", None)
        found: Any = self._optimizer or wrapper or self.trainer.optimizer
        # Several optimizers refuse to be without a name, and only one refuses to have a name.
        found = found[name] if name or isinstance(found, Mapping) else found
        return getattr(found, "optimizer", found)

    def _decide_when_to_step(self, s: Any) -> None:
        metric = (
            self._metric
            if isinstance(s, ReduceLROnPlateau)
            else getattr(s, "monitor", None)
        )
        if isinstance(s, GroupParamScheduler):
            # Without a range, a plateau has no use for epochs.
            by_epoch = s.by_epoch and (metric is None or (s.begin, s.end) != (0, INF))
        else:
            by_epoch = self._by_epoch and not isinstance(
                s, LRMultiplier | ReduceLROnPlateau
            )
            end, names = (
                max(1, self.trainer.max_iter),
                ("_max_iter", "total_steps", "T_max"),
            )
            lengths = {getattr(s, name, end) for name in names} - {end}
            if lengths and not by_epoch:
                text = "%s is made for %s iterations, and the run has %d"
                logger.warning(text, type(s).__name__, *lengths, end)
        period = self.trainer.epoch_length if by_epoch else 1
        if not period:
            text = "and the loader has no length: set trainer.epoch_length, or by_epoch=False"
            raise ValueError(f"{s!r} counts epochs, {text}")
        if metric is not None:
            mode = getattr(
                s, "mode", "max" if getattr(s, "rule", "") == "greater" else "min"
            )
            if better_by_name(metric) not in (mode, None):
                text = "A schedule watches %r with the mode %r: by its name the other one is better"
                logger.warning(text, metric, mode)
            self._watched.append((metric, s))
        if by_epoch or metric is None:
            self._steps.append((period, s.step))

    def after_step(self) -> None:
        """Record the rate of this iteration, then step to that of the next."""
        storage = self._storage
        for name, group, key in self._recorded:
            storage.put_scalar(name, group[key], smoothing_hint=False)
        for period, step in self._steps:
            if period == 1 or self.is_due(period, at_end=None):
                step()
        for i, (metric, scheduler) in enumerate(self._watched):
            if self.is_due(self.trainer.sync_period):
                check_comes(self, metric)
            measured_at = storage.latest_iter(metric)
            if measured_at is not None and measured_at > self._seen_iters.get(i, -1):
                self._seen_iters[i] = measured_at
                value = storage.history(metric).latest()
                scheduler.step(
                    {metric: value} if hasattr(scheduler, "monitor") else value
                )

    def after_train(self) -> None:
        """Say so if a metric to watch was never there."""
        for metric, _ in self._watched:
            check_comes(self, metric)

    @staticmethod
    def get_best_param_group_id(optimizer: torch.optim.Optimizer) -> int:
        """The group whose rate is recorded: the one with the most parameters.

        If each group has one parameter, the first group that has the most common rate.
        """
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        if max(sizes) > 1:
            return sizes.index(max(sizes))
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        return rates.index(Counter(rates).most_common(1)[0][0])

    def state_dict(self) -> dict[str, Any]:
        """The schedulers' states, by the names of their optimizers."""
        if self._loaded or not self._schedulers:
            return dict(self._loaded)
        seen = dict(self._seen_iters)
        return {"schedulers": scheduler_states(self._schedulers), "seen_iters": seen}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned; into a multiplier, when training starts."""
        self._loaded = dict(state_dict)
        if self.scheduler is not None or hasattr(self.trainer, "scheduler"):
            self._find_schedulers()
            if not any(
                isinstance(s, ParamScheduler) for s in chain(*self._schedulers.values())
            ):
                self._load()
