"""Steps the schedules of the learning rate and other parameters, and records them."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hooktrain.engine.hooks.evaluation import refuse_missing
from hooktrain.engine.train_loop import HookBase
from hooktrain.solver import LRMultiplier, ParamScheduler
from hooktrain.solver.build import load_scheduler_states, scheduler_states
from hooktrain.solver.optim_wrapper_dict import wrappers_by_name
from hooktrain.solver.param_scheduler import INF, GroupParamScheduler

logger = logging.getLogger(__name__)


class LRScheduler(HookBase):
    """Steps schedules after each iteration, and records the rate used in it as ``lr``.

    A schedule is one of:

    - a :class:`~hooktrain.solver.ParamScheduler`, which multiplies the optimizer's learning rate
      over the whole run;
    - one of MMEngine's family, such as :class:`~hooktrain.solver.LinearLR`. It steps at the end of
      each epoch if it has ``by_epoch``, and ``ReduceOnPlateauLR`` of
      ``hooktrain.compat.mmengine`` also after each new value of its ``monitor``;
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
        ValueError: when training starts, if there is no schedule, one is of another optimizer or
            is there twice, or one counts epochs and the trainer has no ``epoch_length``; if a
            state of other schedulers is loaded; in a run, if a metric is not there after the
            first evaluation.

    Attributes:
        scheduler: the schedule as it was given.
    """

    def __init__(
        self,
        optimizer: Optimizer | Mapping[str, Any] | None = None,
        scheduler: Any = None,
        metric: str | None = None,
        *,
        by_epoch: bool = False,
    ) -> None:
        self._optimizer = optimizer
        self.scheduler = scheduler
        self._metric = metric
        self._by_epoch = by_epoch
        # By the names of optimizers; the only optimizer has the name "".
        self._schedulers: dict[str, list[Any]] = {}
        self._seen_iters: dict[int, int] = {}  # of the values that are used
        self._loaded: Mapping[str, Any] = {}  # and not given to them yet

    def before_train(self) -> None:
        """Find what was not given, and decide who steps when, so that a step need not."""
        self._storage = self.trainer.storage
        self._recorded: list[Any] = []  # names, and in which group under which key
        self._steps: list[Any] = []  # periods, and what steps then
        self._watched: list[Any] = []  # metrics, and what steps with their values
        self._schedulers = self._find_schedulers()
        for name, schedulers in self._schedulers.items():
            optimizer = self._optimizer_of(name)
            for i, scheduler in enumerate(schedulers):
                if isinstance(scheduler, ParamScheduler):
                    schedulers[i] = self._multiplier(optimizer, scheduler)
            for scheduler in schedulers:
                self._decide_when_to_step(scheduler)
                self._check_optimizer(scheduler, optimizer)
            self._decide_what_to_record(name, optimizer, schedulers)
        self._refuse_twice()
        self._load()

    def _find_schedulers(self) -> dict[str, list[Any]]:
        if self.scheduler is None:
            self.scheduler = getattr(self.trainer, "scheduler", None)
        if self.scheduler is None:
            raise ValueError(
                "LRScheduler has no schedule: give scheduler=, after the optimizer"
            )
        named = self.scheduler
        if not isinstance(named, Mapping):
            named = {"": named}
        return {
            name: list(given) if isinstance(given, Sequence) else [given]
            for name, given in named.items()
        }

    def _optimizer_of(self, name: str) -> Any:
        wrapper = getattr(self.trainer, "optim_wrapper", None)
        found: Any = self._optimizer or wrapper or self.trainer.optimizer
        if name or isinstance(found, Mapping):
            found = found[name]
        return _unwrapped(found)

    def _multiplier(self, optimizer: Any, schedule: ParamScheduler) -> LRMultiplier:
        # Made again in each run: it covers the whole length, which may have changed.
        length = max(1, self.trainer.max_iter)
        return LRMultiplier(optimizer, schedule, length, self.trainer.iter - 1)

    def _decide_when_to_step(self, scheduler: Any) -> None:
        if isinstance(scheduler, ReduceLROnPlateau) and self._metric is not None:
            self._watched.append((self._metric, scheduler.step))
            return
        if hasattr(scheduler, "monitor"):  # a plateau of MMEngine's family
            metric = scheduler.monitor
            self._watched.append(
                (metric, lambda value: scheduler.step({metric: value}))
            )
            if (scheduler.begin, scheduler.end) == (0, INF):  # it needs no epochs
                return
        by_epoch = self._by_epoch and not isinstance(scheduler, LRMultiplier)
        if isinstance(scheduler, GroupParamScheduler):
            by_epoch = scheduler.by_epoch
        period = self.trainer.epoch_length if by_epoch else 1
        if not period:
            raise ValueError(
                f"{scheduler!r} counts epochs, and the loader has no length: "
                "set trainer.epoch_length, or by_epoch=False"
            )
        self._steps.append((period, scheduler.step))

    def _decide_what_to_record(
        self, name: str, optimizer: Optimizer, schedulers: list[Any]
    ) -> None:
        group = optimizer.param_groups[self.get_best_param_group_id(optimizer)]
        prefix = f"{name}." if name else ""
        self._recorded.append((f"{prefix}lr", group, "lr"))
        if any(getattr(s, "param_name", None) == "momentum" for s in schedulers):
            self._recorded.append((f"{prefix}momentum", group, "momentum"))

    def _check_optimizer(self, scheduler: Any, optimizer: Optimizer) -> None:
        driven = _unwrapped(getattr(scheduler, "optimizer", optimizer))
        if driven is not optimizer:
            raise ValueError(f"{scheduler!r} is made for another optimizer")
        wrapper = getattr(self.trainer, "optim_wrapper", None)
        if wrapper is None:  # a trainer of another kind
            return
        trained = [each.optimizer for each in wrappers_by_name(wrapper).values()]
        if optimizer not in trained:  # a step of one's own may use it
            logger.warning(
                "%r is for an optimizer that the trainer does not have", scheduler
            )

    def _refuse_twice(self) -> None:
        """Two multipliers of one rate: the last one would win. One schedule twice: too fast."""
        hooks = [hook for hook in self.trainer._hooks if isinstance(hook, LRScheduler)]
        lists = [each for hook in hooks for each in hook._schedulers.values()]
        seen = set()
        for scheduler in chain(*lists):
            one = scheduler
            if isinstance(scheduler, LRMultiplier):
                one = scheduler.optimizer
            if id(one) in seen:
                raise ValueError(
                    f"a rate has two schedules, or one twice: {scheduler!r}. Give one"
                )
            seen.add(id(one))

    def _load(self) -> None:
        state = self._loaded
        if state:
            # detectron2's is the state of the only scheduler.
            states = state.get("schedulers", {"": [state]})
            load_scheduler_states(self._schedulers, states)
            self._seen_iters = dict(state.get("seen_iters", {}))
            self._loaded = {}

    def after_step(self) -> None:
        """Record the rate of this iteration, then step to that of the next."""
        storage = self._storage
        for name, group, key in self._recorded:
            storage.put_scalar(name, group[key], smoothing_hint=False)
        done = storage.iter + 1
        for period, step in self._steps:
            if done % period == 0:
                step()
        for i, (metric, step) in enumerate(self._watched):
            measured_at = storage.latest_iter(metric)
            if measured_at is None:
                refuse_missing(metric, self.trainer)
            elif measured_at > self._seen_iters.get(i, -1):
                self._seen_iters[i] = measured_at
                step(storage.history(metric).latest())

    @staticmethod
    def get_best_param_group_id(optimizer: Optimizer) -> int:
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
        return {
            "schedulers": scheduler_states(self._schedulers),
            "seen_iters": dict(self._seen_iters),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned; into a multiplier, when training starts."""
        self._loaded = dict(state_dict)
        self._schedulers = self._find_schedulers()
        found = chain(*self._schedulers.values())
        if not any(isinstance(scheduler, ParamScheduler) for scheduler in found):
            self._load()


def _unwrapped(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)
