"""MMEngine's hooks, which get the trainer as a runner."""

import logging
from collections.abc import Callable, Mapping
from functools import cached_property, partial, wraps
from typing import Any

from hooktrain.compat.mmengine.runner import Runner
from hooktrain.engine import HookBase
from hooktrain.engine.hooks import EvalHook
from hooktrain.evaluation import DatasetEvaluator
from hooktrain.utils import names

logger = logging.getLogger(__name__)

PRIORITIES = {
    "HIGHEST": 0,
    "VERY_HIGH": 10,
    "HIGH": 30,
    "ABOVE_NORMAL": 40,
    "NORMAL": 50,
    "BELOW_NORMAL": 60,
    "LOW": 70,
    "VERY_LOW": 90,
    "LOWEST": 100,
}

_ELSEWHERE = {
    "before_save_checkpoint": "return the values to save from state_dict()",
    "after_load_checkpoint": "restore the saved values in load_state_dict(state)",
}
# A trainer runs no test, and only the evaluators of a validation get its batches.
_SELDOM_CALLED = {
    "_before_iter",
    "_after_iter",
    "before_val_iter",
    "after_val_iter",
    "before_test",
    "before_test_epoch",
    "before_test_iter",
    "after_test_iter",
    "after_test_epoch",
    "after_test",
}


def _with_runner(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an event method with a runner so that the trainer can call it without one.

    ``before_run`` is called before ``before_train``, and ``after_run`` after ``after_train``.
    """

    @wraps(method)
    def event(self: Any, runner: Any = None) -> None:
        if runner is not None:  # called by a subclass
            method(self, runner)
            return
        runner = Runner(self.trainer)
        if method.__name__ == "before_train":
            for hook in self.trainer.hooks:
                if isinstance(hook, EvalHook):  # each MMEngine hook sets the same
                    announce = partial(_announce, self.trainer)
                    hook.announce = announce  # type: ignore[method-assign]
            self.before_run(runner)
        method(self, runner)
        if method.__name__ == "after_train":
            self.after_run(runner)

    return event


def _announce(trainer: Any) -> None:
    """Call the events before a validation, for all MMEngine hooks."""
    runner = Runner(trainer, ahead=1, epoch_ahead=1)
    for hook in trainer.hooks:
        if isinstance(hook, Hook):
            hook.before_val(runner)
            hook.before_val_epoch(runner)


def _event_of_mode(event: str, mode: str) -> Callable[..., None]:
    """Make an event method of one mode, which calls the method of all modes."""

    def call(self: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("metrics", None)  # The method of all modes does not take metrics.
        getattr(self, event)(runner, *args, mode=mode, **kwargs)

    return call


class Hook(HookBase, DatasetEvaluator):
    """A hook with MMEngine's events, which get the trainer as a :class:`Runner`.

    ::

        before_run(runner)
        before_train(runner)
        before_train_epoch(runner)              # of len(loader) iterations
        before_train_iter(runner, batch_idx)    # the batch is not loaded yet
        after_train_iter(runner, batch_idx, data_batch, outputs)
        after_train_epoch(runner)
        after_train(runner)
        after_run(runner)

        before_val(runner)
        before_val_epoch(runner)
        after_val_epoch(runner, metrics)
        after_val(runner)

    The events of a validation are called around the function of each ``EvalHook``. An event of an
    epoch or a batch that is not overridden calls ``_before_epoch``, ``_after_epoch``,
    ``_before_iter`` or ``_after_iter`` with a ``mode``, ``"train"`` or ``"val"``. A hook gets the
    batches of a validation if it is one of the evaluators::

        inference_on_dataset(model, loader, [metric, hook], step="val_step")
        # hook.after_val_iter(runner, batch_idx, data_batch, outputs)

    A warning names overridden events that are otherwise never called.

    Attributes:
        priority: a name such as ``"LOW"``, or a number from 0 to 100, which is read when the hook
            is registered. Among MMEngine hooks, smaller numbers run first, and equal numbers run in
            the order of registration. With a priority above ``NORMAL`` a hook also runs before
            schedules and averages; at ``VERY_LOW`` and below it runs after evaluations, writers and
            checkpoints.

    Raises:
        TypeError: when a subclass is defined that overrides an event of a checkpoint.
        ValueError: when it is registered, if the priority is unknown.
    """

    priority: Any = "NORMAL"

    @cached_property
    def phase(self) -> str:  # type: ignore[override]
        """The phase of the priority; see :class:`hooktrain.engine.HookBase`."""
        if self._order < PRIORITIES["NORMAL"]:
            return "update"
        return "run" if self._order < PRIORITIES["VERY_LOW"] else "end"

    @cached_property
    def _order(self) -> int:  # type: ignore[override]
        """The number of the priority."""
        # mmengine has an enum too.
        priority = getattr(self.priority, "value", self.priority)
        number = PRIORITIES.get(str(priority).upper(), priority)
        if not isinstance(number, int):
            raise ValueError(
                f"the priority of {type(self).__qualname__} must be a number or one of "
                f"{[*PRIORITIES]}, not {priority!r}"
            )
        return number

    def __init_subclass__(cls) -> None:
        names.refuse_overrides(cls, _ELSEWHERE)
        seldom = sorted(_SELDOM_CALLED & vars(cls).keys())
        if seldom:
            logger.warning(
                "%s of %s may never be called: there are no test events, and after_val_iter is "
                "called only by inference_on_dataset(model, loader, [metric, hook])",
                seldom,
                cls.__qualname__,
            )
        for name in ("before_train", "after_train"):
            if name in vars(cls):
                setattr(cls, name, _with_runner(vars(cls)[name]))

    @_with_runner
    def before_train(self, runner: Any) -> None:
        """Called before the first iteration."""

    @_with_runner
    def after_train(self, runner: Any) -> None:
        """Called after the last iteration."""

    def _event(self, *args: Any, **kwargs: Any) -> None:
        pass

    before_run = after_run = before_val = after_val = _event
    _before_epoch = _after_epoch = _before_iter = _after_iter = _event
    before_test = before_test_epoch = before_test_iter = before_val_iter = _event
    after_test = after_test_epoch = after_test_iter = _event
    before_train_epoch = _event_of_mode("_before_epoch", "train")
    before_train_iter = _event_of_mode("_before_iter", "train")
    after_train_iter = _event_of_mode("_after_iter", "train")
    after_train_epoch = _event_of_mode("_after_epoch", "train")
    before_val_epoch = _event_of_mode("_before_epoch", "val")
    after_val_iter = _event_of_mode("_after_iter", "val")
    after_val_epoch = _event_of_mode("_after_epoch", "val")

    def before_step(self) -> None:
        """Call the events before an iteration."""
        runner = Runner(self.trainer)
        place = runner.iter % runner.epoch_length
        if place == 0:
            self.before_train_epoch(runner)
        self.before_train_iter(runner, batch_idx=place, data_batch=None)

    def after_step(self) -> None:
        """Call the events after an iteration."""
        trainer = self.trainer
        runner = Runner(trainer)
        place = runner.iter % runner.epoch_length
        self.after_train_iter(
            runner,
            batch_idx=place,
            data_batch=getattr(trainer, "last_batch", None),
            outputs=getattr(trainer, "last_outputs", None),
        )
        if place + 1 == runner.epoch_length:
            self.after_train_epoch(Runner(trainer, ahead=1))

    def after_evaluation(self, results: Mapping[str, float]) -> None:
        """Call the events after a validation."""
        runner = Runner(self.trainer, ahead=1, epoch_ahead=1)
        self.after_val_epoch(runner, metrics=dict(results))
        self.after_val(runner)

    def reset(self) -> None:
        """Begin a validation of which this hook is an evaluator."""
        self._place = 0

    def process(self, inputs: Any, outputs: Any) -> None:
        """Call the event after a batch of the validation."""
        runner = Runner(self.trainer, ahead=1, epoch_ahead=1)
        self.after_val_iter(
            runner, batch_idx=self._place, data_batch=inputs, outputs=outputs
        )
        self._place += 1

    def every_n_train_iters(self, runner: Any, n: int, start: int = 0) -> bool:
        """Whether this is one of every ``n`` iterations after ``start``."""
        done = runner.iter - start
        return done >= 0 and self.every_n_inner_iters(done, n)

    def every_n_epochs(self, runner: Any, n: int, start: int = 0) -> bool:
        """Whether this is one of every ``n`` epochs after ``start``."""
        done = runner.epoch - start
        return done >= 0 and self.every_n_inner_iters(done, n)

    def every_n_inner_iters(self, batch_idx: int, n: int) -> bool:
        """Whether this is one of every ``n`` iterations of an epoch."""
        return n > 0 and (batch_idx + 1) % n == 0

    def end_of_epoch(self, dataloader: Any, batch_idx: int) -> bool:
        """Whether this is the last iteration of an epoch."""
        return batch_idx + 1 == len(dataloader)

    def is_last_train_epoch(self, runner: Any) -> bool:
        """Whether this is the last epoch, which may be incomplete."""
        return bool(runner.epoch + 1 == runner.max_epochs)

    def is_last_train_iter(self, runner: Any) -> bool:
        """Whether this is the last iteration."""
        return bool(runner.iter + 1 == runner.max_iters)


class ParamSchedulerHook(Hook):
    """A base class for custom schedules. :class:`LRScheduler` steps schedulers."""

    priority = "LOW"

    def before_run(self, runner: Any) -> None:
        """Refuse to be used in place of :class:`LRScheduler`."""
        if type(self) is ParamSchedulerHook:
            raise TypeError("use LRScheduler instead of ParamSchedulerHook")
