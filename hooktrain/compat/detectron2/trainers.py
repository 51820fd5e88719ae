"""detectron2's trainers: one may have another inside of it, which makes its steps."""

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

# What the inner trainer takes from the outer one when a run begins.
_SHARED = ("storage", "seed", "iter", "start_iter", "max_iter")


def of_inner_trainer(name: str) -> Any:
    """A property that reads and sets an attribute of the trainer inside."""
    return property(
        lambda self: getattr(self._trainer, name),
        lambda self, value: setattr(self._trainer, name, value),
    )


def _left_out(self: Any) -> Any:
    raise RuntimeError(
        f"the constructor of {type(self).__qualname__} must call super().__init__() with the "
        "arguments of its base class"
    )


class TrainerBase(engine.TrainerBase):
    """A :class:`hooktrain.engine.TrainerBase` that may have a trainer inside of it.

    Assign the inner one to ``self._trainer`` in the constructor, and let ``run_step`` do
    ``self._trainer.iter = self.iter; self._trainer.run_step()``, as detectron2's
    ``DefaultTrainer`` does. The loop, the storage and the hooks are the outer one's; its hooks see
    ``after_backward`` of the inner one. The inner one goes through the events of each run, and
    its state is saved and loaded with the outer one's, also where it has a ``state_dict`` of its
    own. Hooks that are registered with it are called, but their state is not saved.

    Raises:
        RuntimeError: when it is used, if a subclass has not called this constructor; when a
            trainer that is not the ``_trainer`` makes a step.
    """

    places_by_phase = False  # as in detectron2 the order of registration alone decides
    _trainer: Any = None
    # The constructor sets these, and what it has set hides them.
    storage = cached_property(_left_out)
    _hooks = cached_property(_left_out)
    _run = cached_property(_left_out)

    def before_train(self) -> None:
        """Begin the run, also of the inner trainer, which gets this one's storage."""
        inner = self._trainer
        if inner is None:
            super().before_train()
            return
        self.sync_period = inner.sync_period
        self.epoch_length = self.epoch_length or inner.epoch_length
        super().before_train()
        for name in _SHARED:
            setattr(inner, name, getattr(self, name))
        _unlink(inner)  # a loop of one's own may have broken off without after_train
        inner.register_hooks([_OuterHooks(self)])
        inner.before_train()
        # The steps of the inner one record losses there; the loop of this one exchanges them.
        self._losses = inner._losses
        inner.agreement = self.agreement  # its hooks may ask this loop to stop

    def before_step(self) -> None:
        """Seed this iteration, then call the hooks, first those of the inner trainer."""
        if self._trainer is not None:
            self._trainer.iter = self.iter
            self._trainer.before_step()
        super().before_step()  # it seeds again, since a hook may have drawn random numbers

    def after_step(self) -> None:
        """Exchange metrics and call the hooks, first those of the inner trainer."""
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
        """Whether a checkpoint would now hold everything that a resumed run needs."""
        return self._trainer is None or bool(self._trainer.can_save)

    def prepare_save(self) -> None:
        """Check before a save that everything is finite, also of the inner trainer."""
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
        """Refuse what :meth:`load_state_dict` could not load; change nothing."""
        super().check_state_dict(state_dict)
        if isinstance(self._trainer, ModelTrainer):
            self._trainer.check_state_dict(_for_inner(state_dict))

    def load_state_dict(self, state_dict: State) -> None:
        """Load what ``state_dict`` returned; see the base class.

        A copy of detectron2's trainers inside knows no parts: it loads its whole state if
        the optimizer is there.
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
        # The class does not override the method, since perhaps no outer hook needs it.
        self.after_backward = lambda: outer.after_backward()  # type: ignore[method-assign]


def _unlink(inner: Any) -> None:
    """Leave the hooks of the inner trainer that are its own."""
    inner._hooks = [hook for hook in inner._hooks if not isinstance(hook, _OuterHooks)]


def _for_inner(state_dict: State) -> State:
    """The state for the inner trainer: the hooks in it are the outer one's.

    Files of detectron2 have the state of the inner trainer under ``"_trainer"``.
    """
    state = {**state_dict, **state_dict.get("_trainer", {})}
    if "hooks" in state:
        state["hooks"] = {}
    return state


class _AtOnce(Executor):
    """Calls functions at once: nothing waits for metrics here, so no thread has to."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        fn(*args, **kwargs)


class SimpleTrainer(engine.SimpleTrainer, TrainerBase):
    """A :class:`hooktrain.engine.SimpleTrainer` whose metrics can be written from anywhere.

    All values of a dict of losses are added up, whatever their names.

    Attributes:
        concurrent_executor: what a ``run_step`` of detectron2 submits ``_write_metrics`` to.

    Raises:
        TypeError: when a subclass is defined in which ``_data_loader_iter`` is a property.
    """

    concurrent_executor: ClassVar[Executor] = _AtOnce()
    optim_wrapper = cached_property(_left_out)

    @staticmethod
    def parse_losses(output: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of all values that a model returned, and the values."""
        values = values_by_name(output)
        return reduce(add, values.values()), values

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        hint = "change batches in prepare_batch, or give another data_loader"
        names.refuse_overrides(cls, {"_data_loader_iter": hint})

    def reset_data_loader(
        self, data_loader_builder: Callable[[], Iterable[Any]]
    ) -> None:
        """Replace the loader. The old one is freed before the new one is built."""
        self.data_loader = []
        self.data_loader = data_loader_builder()

    @staticmethod
    def write_metrics(
        loss_dict: Mapping[str, Any],
        data_time: float,
        cur_iter: int | str | None = None,
        prefix: str = "",
    ) -> None:
        """Record losses at once, for a trainer that has a step of its own. Collective.

        Args:
            loss_dict: losses by name.
            data_time: the seconds that the step waited for data.
            cur_iter: the iteration; None is the storage's. As in detectron2 0.6, the prefix
                may stand here.
            prefix: is put before ``total_loss``.

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
