"""detectron2's trainers, which may have an inner trainer that makes the steps."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from functools import cached_property, reduce
from operator import add
from typing import Any, ClassVar

from torch import Tensor

from hooktrain import engine
from hooktrain.engine.losses import LossRecorder
from hooktrain.engine.trainers import ModelTrainer
from hooktrain.events import get_event_storage
from hooktrain.model.losses import values_by_name
from hooktrain.utils import comm, names
from hooktrain.utils.names import State

# The attributes that the inner trainer takes from the outer one when a run begins.
_SHARED = ("storage", "seed", "iter", "start_iter", "max_iter")


def inner_attribute(name: str) -> Any:
    """A property that reads and sets an attribute of the inner trainer."""
    return property(
        lambda self: getattr(self._trainer, name),
        lambda self, value: setattr(self._trainer, name, value),
    )


def _constructor_not_called(self: Any) -> Any:
    raise RuntimeError(
        f"the constructor of {type(self).__qualname__} must call super().__init__() with the "
        "arguments of its base class"
    )


class TrainerBase(engine.TrainerBase):
    """A :class:`hooktrain.engine.TrainerBase` that may have an inner trainer.

    Assign the inner trainer to ``self._trainer`` in the constructor, and let ``run_step`` do
    ``self._trainer.iter = self.iter; self._trainer.run_step()``, as detectron2's
    ``DefaultTrainer`` does. The loop, the storage and the hooks belong to the outer trainer; its
    hooks also get the inner trainer's ``after_backward``. The inner trainer's event methods are
    called in each run, and its state is saved and loaded with the outer trainer's, even if it
    overrides ``state_dict``. Hooks that are registered with it are called, but their state is not
    saved.

    Raises:
        RuntimeError: when it is used, if a subclass has not called this constructor; if a
            trainer that is not the ``_trainer`` makes a step.
    """

    places_by_phase = False  # as in detectron2, hooks run in the order of registration
    _trainer: Any = None
    # Errors unless the constructor is called: the attributes that it sets hide them.
    storage = cached_property(_constructor_not_called)
    _hooks = cached_property(_constructor_not_called)
    _run = cached_property(_constructor_not_called)

    def before_train(self) -> None:
        """Begin the run, also of the inner trainer, which gets this trainer's storage."""
        inner = self._trainer
        if inner is None:
            super().before_train()
            return
        self.sync_period = inner.sync_period
        self.epoch_length = self.epoch_length or inner.epoch_length
        super().before_train()
        for name in _SHARED:
            setattr(inner, name, getattr(self, name))
        _unlink(inner)  # a custom loop may have ended without after_train
        inner.register_hooks([_OuterHooks(self)])
        inner.before_train()
        # The inner trainer's steps record losses there; this trainer's loop exchanges them.
        self._losses = inner._losses
        inner.agreement = self.agreement  # its hooks may ask this loop to stop

    def before_step(self) -> None:
        """Seed this iteration, then call the hooks, the inner trainer's first."""
        if self._trainer is not None:
            self._trainer.iter = self.iter
            self._trainer.before_step()
        super().before_step()  # it seeds again, since a hook may have drawn random numbers

    def after_step(self) -> None:
        """Exchange metrics and call the hooks, the inner trainer's first."""
        if self._trainer is not None:
            self._trainer.after_step()
        super().after_step()

    def after_train(self) -> None:
        """End the run, also of the inner trainer."""
        inner = self._trainer
        try:
            super().after_train()
        finally:
            if inner is not None:
                inner.succeeded = self.succeeded
                inner._max_iter = self.max_iter  # an early stop has lowered it
                inner.after_train()
                _unlink(inner)

    @property
    def can_save(self) -> bool:
        """Whether a checkpoint saved now would hold everything that a resumed run needs."""
        return self._trainer is None or bool(self._trainer.can_save)

    def prepare_save(self) -> None:
        """Check before a save that everything is finite, also in the inner trainer."""
        super().prepare_save()
        if self._trainer is not None:
            self._trainer.prepare_save()

    def state_dict(self) -> State:
        """The state that a resumed run needs; see the base class."""
        state = super().state_dict()
        if self._trainer is not None:
            state = {**self._trainer.state_dict(), **state}
        return state

    def check_state_dict(self, state_dict: State) -> None:
        """Check a state without loading it; see the base class."""
        super().check_state_dict(state_dict)
        if isinstance(self._trainer, ModelTrainer):
            self._trainer.check_state_dict(_for_inner(state_dict))

    def load_state_dict(self, state_dict: State) -> None:
        """Load a state; see the base class.

        If the inner trainer is a copy of detectron2's, it cannot load a part of its state: it
        loads the whole state if that has the optimizer's.
        """
        super().load_state_dict(state_dict)
        inner = self._trainer
        state = _for_inner(state_dict)
        if isinstance(inner, ModelTrainer) or (
            inner is not None and "optimizer" in state
        ):
            inner.load_state_dict(state)


class _OuterHooks(engine.HookBase):
    """Calls the hooks of the outer trainer between backward and update of the inner one."""

    def __init__(self, outer: TrainerBase) -> None:
        outer = weakref.proxy(outer)
        # Set on the object, not defined by the class, since perhaps no outer hook needs it.
        self.after_backward = lambda: outer.after_backward()  # type: ignore[method-assign]


def _unlink(inner: Any) -> None:
    """Remove the outer trainer's hooks from the inner trainer."""
    inner._hooks = [hook for hook in inner._hooks if not isinstance(hook, _OuterHooks)]


def _for_inner(state_dict: State) -> State:
    """The inner trainer's part of a state, without the hooks, which are the outer trainer's.

    detectron2's files have the state of the inner trainer under ``"_trainer"``.
    """
    state = {**state_dict, **state_dict.get("_trainer", {})}
    if "hooks" in state:
        state["hooks"] = {}
    return state


class _AtOnce(Executor):
    """An executor that calls functions at once, since recording metrics does not wait."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        fn(*args, **kwargs)


class SimpleTrainer(engine.SimpleTrainer, TrainerBase):
    """A :class:`hooktrain.engine.SimpleTrainer` with detectron2's ``write_metrics``.

    All values of a dict of losses are added up, whatever their names.

    Attributes:
        concurrent_executor: the executor to which detectron2's ``run_step`` submits
            ``_write_metrics``.

    Raises:
        TypeError: when a subclass is defined in which ``_data_loader_iter`` is a property.
    """

    concurrent_executor: ClassVar[Executor] = _AtOnce()
    optim_wrapper = cached_property(_constructor_not_called)

    @staticmethod
    def parse_losses(output: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of all values that the model returned, and the values."""
        values = values_by_name(output)
        return reduce(add, values.values()), values

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        hint = "change batches in prepare_batch, or give another data_loader"
        names.refuse_overrides(cls, {"_data_loader_iter": hint})

    def reset_data_loader(
        self, data_loader_builder: Callable[[], Iterable[Any]]
    ) -> None:
        """Replace the loader. The old loader is freed before the new one is built."""
        self.data_loader = []
        self.data_loader = data_loader_builder()

    @staticmethod
    def write_metrics(
        loss_dict: Mapping[str, Any],
        data_time: float,
        cur_iter: int | str | None = None,
        prefix: str = "",
    ) -> None:
        """Record losses at once, for a trainer with its own ``run_step``. Collective.

        Args:
            loss_dict: losses by name.
            data_time: the seconds that the step waited for data.
            cur_iter: the iteration; None is the storage's. As in detectron2 0.6, this may be the
                prefix instead.
            prefix: the prefix of ``total_loss``.

        Raises:
            FloatingPointError: if the sum is not finite.
        """
        storage = get_event_storage()
        if isinstance(cur_iter, str):
            prefix, cur_iter = cur_iter, None
        iteration = storage.iter if cur_iter is None else cur_iter
        recorder = LossRecorder(storage, iteration)
        recorder.record(iteration, loss_dict, data_time, prefix + "total_loss")
        if comm.get_world_size() > 1:
            recorder.exchange(iteration + 1, {})
        recorder.check(iteration + 1)


class AMPTrainer(engine.AMPTrainer, SimpleTrainer):
    """A :class:`SimpleTrainer` in mixed precision; see :class:`hooktrain.engine.AMPTrainer`."""
