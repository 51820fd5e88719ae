"""Steps learning-rate schedules, and records the rate."""

import logging
from collections.abc import Mapping
from inspect import signature
from statistics import mode
from typing import Any, TypeAlias

from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    LambdaLR,
    LRScheduler as TorchScheduler,
    ReduceLROnPlateau,
)

from hooktrain.engine.hook_base import HookBase
from hooktrain.engine.hooks.evaluation import (
    check_mode,
    find_result,
    log_missing_evaluations,
)
from hooktrain.solver import LRMultiplier, ParamScheduler
from hooktrain.solver.checks import rates_of, scheduled
from hooktrain.solver.optim_wrapper_dict import by_name
from hooktrain.utils.names import Numbers, State
from hooktrain.utils.periods import Period

logger = logging.getLogger(__name__)

_EPOCH = Period("1 epoch")  # whose length may change during a run

# Schedules, or their states, by the names of their optimizers. A single optimizer has the name "".
ByOptimizer: TypeAlias = Mapping[str, list[Any]]


class LRScheduler(HookBase):
    """Steps schedules after each iteration, and records the rate used in it as ``lr``.

    A schedule is one of:

    - a :class:`hooktrain.solver.ParamScheduler`, which multiplies the optimizer's learning rate
      over the whole run;
    - a torch scheduler.

    For MMEngine's schedulers use the ``LRScheduler`` of ``hooktrain.compat.mmengine``. An iteration
    counts even if a scaler skipped its update.

    Args:
        optimizer: the optimizer whose rate is recorded and multiplied, or several by name. None
            takes ``trainer.optimizer``, or ``trainer.optim_wrapper`` for schedules by name.
        scheduler: a schedule, or a list of schedules, stepped in order. Several optimizers, whose
            rates are recorded as ``<name>.lr``, share a multiplier, or have their own schedules or
            lists in a dict by name. None takes ``trainer.scheduler``.
        metric: for :class:`torch.optim.lr_scheduler.ReduceLROnPlateau`, the result that it watches.
            It steps after each evaluation.
        by_epoch: whether torch schedulers count epochs instead of iterations. The log says which.

    Raises:
        TypeError: when training starts, if an object is not a schedule.
        ValueError: when training starts, if a schedule was made for another optimizer, is given
            twice, lacks its metric, has fewer steps than the run, ends at a negative rate, or
            counts epochs while the trainer has no ``epoch_length``; when the state of other
            schedulers is loaded; during a run, if the first results lack the metric.

    Attributes:
        scheduler: the schedule as given.
    """

    phase = "update"

    def __init__(
        self,
        optimizer: Optimizer | Mapping[str, Any] | None = None,
        scheduler: Any = None,
        metric: str | None = None,
        *,
        by_epoch: bool = False,
    ) -> None:
        if isinstance(optimizer, ParamScheduler | TorchScheduler):
            raise TypeError(f"pass it by name: LRScheduler(scheduler={optimizer!r})")
        self._optimizer = optimizer
        self.scheduler = scheduler
        self._metric = metric
        self._by_epoch = by_epoch
        self._schedulers: dict[str, list[Any]] = {}
        self._loaded: State = {}  # a state that the schedulers have not loaded yet

    def before_train(self) -> None:
        """Find the optimizers and schedules, and when each schedule steps."""
        self._storage = self.trainer.storage
        # Names of metrics, and the groups whose rates they are.
        self._recorded: list[tuple[str, Any]] = []
        # Whether a schedule steps after each epoch, rather than iteration, and the schedule.
        self._steps: list[tuple[bool, Any]] = []
        # Names of results, and functions of their values.
        self._watched: list[tuple[str, Any]] = []
        # Optimizers and the names of their settings, and the schedules that change them.
        self._driven: list[Any] = []
        self._expected: list[Any] = []  # the rates after the last step, while watched
        self._schedulers = {}
        optimizers = self._optimizers()
        for name, schedules in self._schedules_by_name().items():
            optimizer = _unwrapped(optimizers[name])
            group = optimizer.param_groups[self.get_best_param_group_id(optimizer)]
            self._recorded.append((f"{name}.lr" if name else "lr", group))
            self._schedulers[name] = [self.begin(s, optimizer) for s in schedules]
        # An epoch is enough to see whether other code steps too; after it a step costs less.
        self._watched_until = self.trainer.start_iter + max(
            self.trainer.sync_period, self.trainer.epoch_length or 0
        )
        if not self._driven:
            logger.info("No schedule is given: the learning rate is only recorded")
        if self._loaded:
            for name, states in _saved_schedulers(self._loaded).items():
                for schedule, state in zip(self._schedulers[name], states, strict=True):
                    _warn_about_changed_settings(schedule, state)
                    schedule.load_state_dict(state)
            self._loaded = {}
        self._expected = self._rates() if self._driven else []

    def _optimizers(self) -> Mapping[str, Any]:
        """The optimizers by name, in wrappers or not; a single one has the name ``""``."""
        wrapper = getattr(self.trainer, "optim_wrapper", None)
        return by_name(self._optimizer or wrapper or self.trainer.optimizer)

    def _schedules_by_name(self) -> ByOptimizer:
        """The schedules as given, by the names of their optimizers."""
        if self.scheduler is None:
            self.scheduler = getattr(self.trainer, "scheduler", None)
        named = self.scheduler
        if not isinstance(named, Mapping) or "type" in named:
            named = dict.fromkeys(self._optimizers(), named)
        return {
            name: list(given) if isinstance(given, list | tuple) else [given]
            for name, given in named.items()
        }

    def begin(self, scheduler: Any, optimizer: Optimizer) -> Any:
        """Decide when a schedule steps; a subclass may know other kinds of schedules.

        Returns:
            The schedule, or the multiplier made from it.
        """
        if isinstance(scheduler, ParamScheduler):
            if not self._loaded:
                _warn_about_ignored_rates(optimizer)
            # Created anew for each run, since it covers the whole run, whose length may have
            # changed.
            multiplier = LRMultiplier(
                optimizer,
                scheduler,
                max(1, self.trainer.max_iter),
                self.trainer.iter - 1,
            )
            _log_rates(scheduler, optimizer)
            scheduler = multiplier
            self.step_every(scheduler, False)
        elif isinstance(scheduler, ReduceLROnPlateau):
            if self._metric is None:
                raise ValueError(
                    "ReduceLROnPlateau needs the name of the result that it watches: "
                    "hooks.LRScheduler(scheduler=..., metric='val_loss')"
                )
            check_mode(scheduler.mode, self._metric)
            log_missing_evaluations(self, self._metric, scheduler.patience)
            self._watched.append((self._metric, scheduler.step))
        elif isinstance(scheduler, TorchScheduler):
            period = self.step_every(scheduler, self._by_epoch)
            self._compare_length(scheduler, period)
        else:
            raise TypeError(
                "LRScheduler(scheduler=...) needs a ParamScheduler or a torch scheduler (for "
                "MMEngine's use the LRScheduler of hooktrain.compat.mmengine), not "
                f"{scheduler!r}"
            )
        self.drive(scheduler, optimizer, "lr")
        return scheduler

    def _compare_length(self, scheduler: TorchScheduler, period: int) -> None:
        """Compare the length of a torch schedule with the run; log where a LambdaLR ends.

        Raises:
            ValueError: if the run takes more steps than the schedule has, or if a LambdaLR ends
                at a negative rate.
        """
        kind = type(scheduler).__name__
        steps = (self.trainer.max_iter - self.trainer.start_iter) // period
        logger.info(
            "%s takes %d steps in this run; iterations per step: %d (by_epoch=%s; True "
            "counts epochs)",
            kind,
            steps,
            period,
            self._by_epoch,
        )
        total_steps = getattr(scheduler, "total_steps", steps)
        if total_steps < steps:
            raise ValueError(
                f"{kind} has {total_steps=}, but takes {steps} in this run; by_epoch=True counts "
                "epochs"
            )
        period_of_cosine = getattr(scheduler, "T_max", steps)
        if 1.5 * period_of_cosine < steps:
            logger.warning(
                "The rate rises again after T_max=%d steps: by_epoch=True counts epochs",
                period_of_cosine,
            )
        # A resumed run continues the steps of the earlier one.
        end = self.trainer.max_iter // period
        for name in ("total_steps", "T_max", "total_iters"):
            length = getattr(scheduler, name, 0)
            if length > 1.5 * end:
                logger.info(
                    "The run ends at step %d of %s=%d, so the rate does not reach its end",
                    end,
                    name,
                    length,
                )
        # A later run may or may not continue the schedule.
        is_first = not self.trainer.start_iter and not scheduler.last_epoch
        if is_first and steps and isinstance(scheduler, LambdaLR):
            last = (self.trainer.max_iter - 1) // period
            earlier, factor = map(scheduler.lr_lambdas[0], (2 * last // 3, last))
            logger.info("LambdaLR ends at %g times the rate", factor)
            if factor < 0:
                raise ValueError(
                    f"LambdaLR ends at {factor} times the rate; by_epoch=True counts epochs"
                )
            if last and max(earlier, factor) < 1e-6:
                logger.warning(
                    "The rate is 0 in the last third of the run: by_epoch=True counts epochs, and "
                    "the schedule's own number of steps should be that of the run"
                )

    def drive(self, scheduler: Any, optimizer: Optimizer, key: str) -> None:
        """Remember which setting of which optimizer a schedule changes.

        Raises:
            ValueError: if the schedule was made for another optimizer, or if a multiplier is not
                the only schedule of the setting.
        """
        if _unwrapped(scheduler.optimizer) is not optimizer:
            raise ValueError(f"{scheduler!r} was made for another optimizer")
        scheduled.setdefault(optimizer, [])
        self._driven.append(((optimizer, key), scheduler))
        schedules = [
            each
            for hook in self.trainer.hooks
            for setting, each in getattr(hook, "_driven", ())
            if setting == (optimizer, key)
        ]
        is_multiplied = any(isinstance(each, LRMultiplier) for each in schedules)
        if is_multiplied and len(schedules) > 1:
            raise ValueError(
                f"a multiplier must be the only schedule of {key}: pass one schedule, not "
                f"{self.scheduler!r} (are hooks registered twice?)"
            )

    def step_every(self, scheduler: Any, by_epoch: bool) -> int:
        """Step a schedule after each epoch, or each iteration.

        Returns:
            The number of iterations per step.

        Raises:
            ValueError: if the length of an epoch is needed but unknown.
        """
        period = self.trainer.epoch_length if by_epoch else 1
        if not period:
            raise ValueError(
                f"{scheduler!r} counts epochs, but the loader has no length: "
                "set trainer.epoch_length, or by_epoch=False"
            )
        self._steps.append((by_epoch, scheduler))
        return period

    def after_step(self) -> None:
        """Record the rate of this iteration, then step to that of the next."""
        if self._expected and self._expected != self._rates():
            self._watched_until = 0  # warn once
            logger.warning(
                "Learning rates or step counts changed outside LRScheduler: expected %s, found "
                "%s. Does another hook set the rate, or step the scheduler too?",
                self._expected,
                self._rates(),
            )
        self._record_rates()
        for by_epoch, schedule in self._steps:
            # Schedules that count iterations skip this call, which would cost each step.
            if not by_epoch or _EPOCH.is_due(self.trainer):
                schedule.step()
        is_watched = self._driven and self.trainer.done <= self._watched_until
        self._expected = self._rates() if is_watched else []

    def _record_rates(self) -> None:
        for name, group in self._recorded:
            self._storage.put_scalar(name, group["lr"], False)  # not smoothed

    def after_evaluation(self, results: Numbers) -> None:
        """Step the schedules that watch a result."""
        for metric, step in self._watched:
            value = find_result(self, metric, results)
            if value is not None:
                step(value)
        if self._expected:
            self._expected = self._rates()

    def _rates(self) -> list[Any]:
        """The rates, and how often each schedule has stepped."""
        # A rate that is a tensor stays the same object, so comparing it needs no value.
        rates = [group["lr"] for _, group in self._recorded]
        return rates + [getattr(each, "last_epoch", 0) for _, each in self._steps]

    def after_train(self) -> None:
        """Remember the rates, so that the next run sees whether they were set in between."""
        for (optimizer, _), _ in self._driven:
            scheduled[optimizer] = rates_of(optimizer)

    @staticmethod
    def get_best_param_group_id(optimizer: Optimizer) -> int:
        """The group whose rate is recorded: the one with the most parameters.

        If each group has one parameter, it is the first group with the most common rate.
        """
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        if max(sizes) > 1:
            return sizes.index(max(sizes))
        rates = rates_of(optimizer)
        return rates.index(mode(rates))

    def state_dict(self) -> State:
        """The schedulers' states, by the names of their optimizers."""
        if self._loaded or not self._schedulers:
            return dict(self._loaded)
        return {
            "schedulers": {
                name: [scheduler.state_dict() for scheduler in schedulers]
                for name, schedulers in self._schedulers.items()
            }
        }

    def check_state_dict(self, state_dict: State) -> None:
        """Refuse the state of other schedulers."""
        check_schedulers(self._schedules_by_name(), _saved_schedulers(state_dict))

    def load_state_dict(self, state_dict: State) -> None:
        """Keep what ``state_dict`` returned, and load it when training starts."""
        self._loaded = dict(state_dict)


def check_schedulers(schedules: ByOptimizer, states: ByOptimizer) -> None:
    """Refuse the states of more or fewer schedules."""
    here = {name: len(each) for name, each in schedules.items()}
    saved = {name: len(each) for name, each in states.items()}
    if here != saved:
        raise ValueError(
            f"numbers of schedulers differ: the state has {saved}, this run {here}"
        )


def _saved_schedulers(state_dict: State) -> ByOptimizer:
    """The states of the schedulers in the hook's state."""
    # In detectron2 the hook's state is that of its only scheduler.
    only = {"": [state_dict]}
    return state_dict.get("schedulers", only)  # type: ignore[no-any-return]


def _unwrapped(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


def _log_rates(schedule: ParamScheduler, optimizer: Optimizer) -> None:
    """Log the course of the rate; warn if a schedule seems to return rates, not multipliers."""
    rate = max(group["initial_lr"] for group in optimizer.param_groups)
    multipliers = [schedule(step / 20) for step in range(21)]
    # Host-device synchronisation, once a run, if rates are tensors.
    highest = max(multipliers)
    logger.info(
        "lr goes from %g to %g; the schedule's highest is about %.2g",
        max(rates_of(optimizer)),
        rate * multipliers[-1],
        rate * highest,
    )
    if multipliers[-1] > 1.001 * multipliers[-2]:
        logger.info("lr rises until the end: are the ends swapped? %r", schedule)
    if rate < 1 and not 0.5 <= highest < 1.01:
        logger.warning(
            "lr will be %g x %g = %g: a schedule must return multipliers, such as 1 to 0",
            rate,
            highest,
            rate * highest,
        )


def _warn_about_changed_settings(schedule: Any, state: State) -> None:
    """Warn about settings of a schedule that its saved state replaces."""
    known = signature(type(schedule)).parameters.keys() - {"last_epoch"}
    changes = [
        f"{name} is {saved}, not {getattr(schedule, name)}"
        for name, saved in state.items()
        if name in known and saved != getattr(schedule, name, saved)
    ]
    if changes:
        logger.warning(
            "%s uses the checkpoint's settings: %s", type(schedule).__name__, changes
        )


def _warn_about_ignored_rates(optimizer: Optimizer) -> None:
    """Warn about rates that were set after the last run, and that a multiplier ignores."""
    left = scheduled.get(optimizer, [])
    rates = rates_of(optimizer)[: len(left)]
    if rates != left:
        logger.warning(
            "lr was set to %s after the last run, but is not used: the schedule multiplies "
            "group['initial_lr'], so set this in each group too",
            rates,
        )
