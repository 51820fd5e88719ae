"""detectron2's trainers: one may have another inside of it, which makes its steps."""

import weakref
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from hooktrain import engine
from hooktrain.engine.losses import LossRecorder
from hooktrain.engine.train_loop import State
from hooktrain.engine.trainers import ModelTrainer
from hooktrain.events import get_event_storage

# The parts of the state that are the inner trainer's.
_OF_STEPS = frozenset({"optimizer", "data"})


def of_inner_trainer(name: str) -> Any:
    """A property that is that of the trainer inside, which may also be set."""
    return property(
        lambda self: getattr(self._trainer, name),
        lambda self, value: setattr(self._trainer, name, value),
        doc=f"``{name}`` of the trainer inside.",
    )


class TrainerBase(engine.TrainerBase):
    """A :class:`hooktrain.engine.TrainerBase` that may have a trainer inside of it.

    Assign the inner one to ``self._trainer`` in the constructor, and let ``run_step`` do
    ``self._trainer.iter = self.iter; self._trainer.run_step()``, as detectron2's
    ``DefaultTrainer``. The outer one has the loop, the hooks and the storage. Optimizer and data
    of the inner one are part of its state; so is the state of a copy of detectron2's
    ``SimpleTrainer``, with a ``state_dict`` of its own.
    """

    state_parts: ClassVar[frozenset[str]] = ModelTrainer.state_parts
    _trainer: Any = None

    def before_train(self) -> None:
        """Begin the run, also of the inner trainer, which gets this one's storage."""
        inner = self._trainer
        if inner is None:
            super().before_train()
            return
        self.sync_period = inner.sync_period
        self.epoch_length = self.epoch_length or inner.epoch_length
        super().before_train()
        if not any(isinstance(hook, _OuterHooks) for hook in inner._hooks):
            inner.register_hooks([_OuterHooks(self)])
        for name in ("storage", "seed", "iter", "start_iter", "max_iter"):
            setattr(inner, name, getattr(self, name))
        inner.before_train()
        self._losses = inner._losses
        self.storage.trainer = weakref.proxy(self)

    def after_step(self) -> None:
        """Exchange metrics and call the hooks."""
        inner = self._trainer
        if inner is not None:
            inner.done = self.iter + 1
        super().after_step()
        if isinstance(inner, ModelTrainer) and self.done % self.sync_period == 0:
            inner._name_idle_optimizers()

    def after_train(self) -> None:
        """End the run, first of the inner trainer."""
        if self._trainer is not None:
            self._trainer.succeeded = self.succeeded
            self._trainer.after_train()
        super().after_train()

    @property
    def can_save(self) -> bool:
        """Whether a checkpoint would now hold all that a run needs."""
        return self._trainer is None or bool(self._trainer.can_save)

    def check_finite(self) -> None:
        """Refuse what must not be saved, also of the inner trainer."""
        super().check_finite()
        if self._trainer is not None:
            self._trainer.check_finite()

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs; see the base class."""
        state = super().state_dict()
        inner = self._trainer
        if inner is None:
            return state
        inner._is_checked = True  # by the line above
        of_inner = inner.state_dict()
        if isinstance(inner, ModelTrainer):
            state |= {name: of_inner[name] for name in _OF_STEPS}
        if _has_own_state(inner):
            state["_trainer"] = of_inner
        return state

    def check_state_dict(
        self, state_dict: State, *, only: Collection[str] | None = None
    ) -> None:
        """Refuse what :meth:`load_state_dict` could not load; change nothing."""
        super().check_state_dict(state_dict, only=only)
        if isinstance(self._trainer, ModelTrainer):
            self._trainer.check_state_dict(
                _without_hooks(state_dict), only=self._chosen(only) & _OF_STEPS
            )

    def load_state_dict(
        self, state_dict: State, *, only: Collection[str] | None = None
    ) -> None:
        """Load what ``state_dict`` returned; see the base class."""
        super().load_state_dict(state_dict, only=only)
        parts = self._chosen(only)
        if isinstance(self._trainer, ModelTrainer):
            # Without "hooks" the optimizer forgets what schedules have set.
            self._trainer.load_state_dict(
                _without_hooks(state_dict), only=parts & {*_OF_STEPS, "hooks"}
            )
        own = state_dict.get("_trainer")
        if own and "optimizer" in parts and _has_own_state(self._trainer):
            self._trainer.load_state_dict(own)


class _OuterHooks(engine.HookBase):
    """Calls the hooks of the outer trainer between backward and update of the inner one."""

    def __init__(self, outer: TrainerBase) -> None:
        self._outer = weakref.proxy(outer)

    def after_backward(self) -> None:
        self._outer.after_backward()


def _without_hooks(state_dict: State) -> dict[str, Any]:
    """The state for the inner trainer: the hooks are the outer one's."""
    return {name: part for name, part in state_dict.items() if name != "hooks"}


def _has_own_state(inner: Any) -> bool:
    method = getattr(type(inner), "state_dict", TrainerBase.state_dict)
    return not method.__module__.startswith("hooktrain.")


class SimpleTrainer(engine.SimpleTrainer, TrainerBase):
    """A :class:`hooktrain.engine.SimpleTrainer` whose metrics can be written from anywhere."""

    @staticmethod
    def write_metrics(
        loss_dict: Mapping[str, Any],
        data_time: float,
        cur_iter: int | str | None = None,
        prefix: str = "",
    ) -> None:
        """Record losses at once, where there is no such trainer. A collective.

        Args:
            loss_dict: losses by name.
            data_time: seconds that the step waited for data.
            cur_iter: the iteration; None is the storage's. As in detectron2 0.6, the prefix
                may stand here.
            prefix: put before ``total_loss``.

        Raises:
            FloatingPointError: if the sum is not finite.
        """
        storage = get_event_storage()
        if isinstance(cur_iter, str):
            prefix, cur_iter = cur_iter, None
        iteration = storage.iter if cur_iter is None else cur_iter
        recorder = LossRecorder(storage, iteration)
        recorder.record(iteration, loss_dict, data_time, prefix + "total_loss")
        recorder.exchange(iteration + 1, stop_requested=False)
        recorder.check(iteration + 1)


class AMPTrainer(engine.AMPTrainer, SimpleTrainer):
    """The same in mixed precision: see :class:`hooktrain.engine.AMPTrainer`."""
