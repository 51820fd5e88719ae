"""The training loop, which calls the hooks around each iteration."""

import logging
import weakref
from collections.abc import Iterable
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from hooktrain import __version__
from hooktrain.engine.agreement import Agreement, agree_on_run
from hooktrain.engine.clock import Clock
from hooktrain.engine.hook_base import HookBase
from hooktrain.engine.hook_list import (
    HookReference,
    describe,
    hook_states,
    load_hook_states,
    named_hooks,
    place_beside,
    place_by_phase,
    warn_about_eventless_hook,
)
from hooktrain.engine.losses import LossRecorder
from hooktrain.engine.preflight import warn_about_events
from hooktrain.evaluation.testing import Results, as_numbers
from hooktrain.events import EventStorage
from hooktrain.solver.checks import Version
from hooktrain.utils import comm
from hooktrain.utils.env import in_one_thread, seed_step
from hooktrain.utils.logger import log_once
from hooktrain.utils.names import State, as_list
from hooktrain.utils.periods import end_of_run

# All ranks take these attributes from the main process when a run begins.
_SHARED = ("seed", "_max_iter", "sync_period", "_epoch_length", "_loader_length")

Trainer = TypeVar("Trainer", bound="TrainerBase")

logger = logging.getLogger(__name__)


class Run:
    """The bookkeeping of one run.

    Attributes:
        rank: the data-parallel rank of this process.
        begun: the hooks whose ``before_train`` was called; None outside a run.
        has_backward: whether ``after_backward`` was called.
        late_error: an error to raise after all hooks have seen the iteration.
        trainable: the trainable parameters by their ``id()``; None if they are sharded.
        versions: the optimizers' versions when the run began; empty once they were compared.
        attributes: the model's :func:`hooktrain.engine.preflight.unsaved_attributes` when the run
            began.
        non_finite: the names of the tensors that already held infinities or NaNs when the run
            began, such as masks; None before that.
        confirmed: the number of finished iterations at the last check that found everything finite
            on every rank; -1 once a state was taken after it.
    """

    def __init__(self) -> None:
        self.rank = comm.data_parallel_rank()
        self.begun: list[HookBase] | None = None
        self.has_backward = False
        self.late_error: BaseException | None = None
        self.trainable: dict[int, nn.Parameter] | None = None
        self.versions: dict[str, Version] = {}
        self.attributes: State = {}
        self.non_finite: set[str] | None = None
        self.confirmed = -1


class TrainerBase:
    """A training loop with hooks. A subclass defines :meth:`run_step`.

    The methods ``before_train``, ``before_step``, ``after_backward``, ``after_step``,
    ``after_evaluation`` and ``after_train`` are the events of the hooks. A subclass may override
    them, and must then call ``super()``.

    Before each iteration and at the end of the run, the loop seeds the random generators from the
    seed, the iteration and the rank, so that any iteration can be recomputed.

    Attributes:
        iter: the current iteration, from 0; ``max_iter`` after a complete run.
        done: the number of finished iterations; in ``after_step`` it includes the current one.
        start_iter: the first iteration of the run.
        succeeded: whether the run reached its end, or an early stop, without an error. Set by the
            event methods, so it also holds in loops that call those directly.
        seed: the seed of the run's random numbers, an integer; None takes
            ``torch.initial_seed()``.
        storage: the EventStorage that holds the metrics.
        agreement: the Agreement of the ranks, for example on an early stop.
        sync_period: the number of iterations between two exchanges of the ranks.
        is_last: whether the current iteration is the last one of the run. Set before the step.
        ends_period: whether the ranks exchange metrics after the current iteration, as they do at
            the end of each period and of the run. Set before the step.
        clock: measures the time of the run, and decides when periods such as "10 minutes" end.
        meta: plain values to save in each checkpoint, such as the configuration.
        places_by_phase: whether :meth:`register_hooks` sorts hooks by their phases.
    """

    iter: int = 0
    done: int = 0
    start_iter: int = 0
    succeeded: bool = False
    seed: Any = None
    places_by_phase: ClassVar[bool] = True
    sync_period: int = 20
    is_last: bool = False
    ends_period: bool = False
    _broke_off = False  # inside an iteration
    _max_iter = 0
    _epoch_length: int | None = None  # as set by the user
    _loader_length = 0  # in batches; 0 if unknown

    def __new__(cls: type[Trainer], *_args: Any, **_kwargs: Any) -> Trainer:
        """Warn about likely mistakes in a subclass, such as an event that is never called."""
        warn_about_events(cls)
        return super().__new__(cls)

    def __init__(self) -> None:
        self._hooks: list[HookBase] = []
        self.storage = EventStorage()
        self.meta: dict[str, Any] = {}
        self.clock = Clock()
        self.agreement = Agreement(self.clock)
        self._losses = LossRecorder(self.storage)
        self._run = Run()

    @property
    def max_iter(self) -> int:
        """The iteration at which the run ends, exclusive. An early stop lowers it."""
        return self._max_iter

    @max_iter.setter
    def max_iter(self, max_iter: int) -> None:
        self._refuse_in_run(
            "max_iter cannot be set",
            "call request_stop() to end it early, or train(max_iter=...) later to continue",
        )
        self._max_iter = max_iter

    def _refuse_in_run(self, problem: str, instead: str) -> None:
        if self._run.begun is not None:
            raise RuntimeError(f"{problem} during a run: {instead}")

    @property
    def batches_per_step(self) -> int:
        """The number of batches that an iteration takes from the loader."""
        return 1

    @property
    def epoch_length(self) -> int | None:
        """The iterations per epoch, as set or from the length of the loader, or None."""
        own = -(-self._loader_length // self.batches_per_step)  # rounded up
        return self._epoch_length or own or None

    @epoch_length.setter
    def epoch_length(self, epoch_length: int | None) -> None:
        self._refuse_in_run(
            "epoch_length cannot be set",
            "set it before, or assign another trainer.data_loader",
        )
        self._epoch_length = epoch_length

    @property
    def stop_reason(self) -> str | None:
        """Why the run ends early; None until all ranks know it."""
        return self.agreement.stop_reason

    # The loop.

    def train(
        self,
        start_iter: int | None = None,
        max_iter: int | None = None,
        *,
        max_epochs: float | None = None,
    ) -> None:
        """Run the iterations from ``start_iter`` up to ``max_iter``, exclusive.

        Args:
            start_iter: the first iteration; None continues after the last finished one.
            max_iter: the iteration at which to end, exclusive.
            max_epochs: the end in epochs, in place of ``max_iter``. Also counted from iteration 0.

        Raises:
            ValueError: if no end is given or it lies before the start, or if ``max_epochs`` is
                given and the length of an epoch is unknown.
            RuntimeError: if called from a hook or an evaluation, or while another thread trains;
                or without ``start_iter``, if the last run broke off inside an iteration.
        """
        self._refuse_in_run(
            "train() cannot be called", "hooks and evaluations are a part of it"
        )
        if start_iter is None:
            start_iter = self.done
            if self._broke_off:
                raise RuntimeError(
                    f"the last run broke off inside iteration {self.iter}: load a checkpoint, "
                    f"or continue from the current state by train({start_iter=})"
                )
        max_iter = end_of_run(start_iter, max_iter, max_epochs, self.epoch_length)
        if start_iter < max_iter:
            logger.info("Starting training from iteration %d", start_iter)
        if start_iter != self.done:
            self.storage = EventStorage(start_iter)
        self.iter = self.start_iter = start_iter
        self.max_iter = max_iter
        log_once.cache_clear()
        with in_one_thread(), self.storage:
            try:
                self.before_train()
                self._run_iterations()
            except BaseException as error:
                self._end_failed_run(error)
                raise
            self.succeeded = True
            self.after_train()

    def _run_iterations(self) -> None:
        self.synchronize()  # a hook may have requested a stop
        self._broke_off = True  # until the last iteration has ended
        for iteration in range(self.start_iter, self.max_iter):
            if self.stop_reason is not None and self.can_save:
                self._max_iter = iteration
                self.synchronize()  # covers the iterations since the last exchange
                break
            self.iter = iteration
            self.before_step()
            self.run_step()
            self.after_step()
            if self.done == iteration:
                raise RuntimeError("after_step() of the trainer must call super()")
        self._broke_off = False

    def _end_failed_run(self, error: BaseException) -> None:
        self.succeeded = False
        if isinstance(error, Exception):
            # For log.txt; on the terminal the caller or Python itself shows it.
            logger.debug("Exception during training:", exc_info=True)
        try:
            self.after_train()
        except BaseException:  # it must not hide the first error
            logger.exception("Exception while ending the failed run:")

    def before_train(self) -> None:
        """Begin a run, and call the hooks."""
        self.succeeded = self.is_last = False
        self.agreement = Agreement(self.clock)
        self.done = self.start_iter
        self._losses = LossRecorder(self.storage, self.start_iter)
        self._run = run = Run()
        if self.seed is None:
            self.seed = torch.initial_seed()
        self.clock.is_shared = comm.get_world_size() > 1
        own = {name: getattr(self, name) for name in _SHARED}
        for name, value in agree_on_run(self._hooks, own).items():
            setattr(self, name, value)
        self.storage.iter = self.iter
        self.storage.max_iter = self.max_iter
        self.storage.epoch_length = self.epoch_length
        run.begun = []
        for hook in self._hooks:
            hook.before_train()
            run.begun.append(hook)
        self.succeeded = self.start_iter >= self.max_iter

    def before_step(self) -> None:
        """Seed this iteration, then call the hooks."""
        self.seed_generators(self.iter)
        finished = self.iter + 1  # after this iteration
        self.is_last = finished == self._max_iter
        self.ends_period = self.is_last or finished % self.sync_period == 0
        self.storage.iter = self.iter
        self.clock.begin_step()
        for hook in self._hooks:
            hook.before_step()

    def run_step(self) -> None:
        """Run one iteration. A subclass defines it, and calls :meth:`after_backward` in it."""
        raise NotImplementedError

    def after_backward(self) -> None:
        """Call the hooks between backward and update."""
        self._run.has_backward = True
        for hook in self._hooks:
            hook.after_backward()

    def after_step(self) -> None:
        """Exchange metrics if a period ends, then call the hooks."""
        self.done = self.iter + 1
        self.clock.lap()
        if self.ends_period:
            self.end_period()
            self.clock.lap()  # the wait for the device and for other ranks counts too
        self.clock.advance()
        for hook in self._hooks:
            hook.after_step()
        error = self._run.late_error
        if error is not None:
            self._run.late_error = None
            self._broke_off = False
            raise error
        self.succeeded = self.is_last

    def after_evaluation(self, results: Results) -> None:
        """Record the results of an evaluation, then call the hooks. A collective.

        ``EvalHook`` calls it, and so should any hook or loop with its own evaluation. Every rank
        takes the results of the main process. They are recorded under their names, or under
        ``"eval/<name>"`` if the training records a metric of that name.

        Args:
            results: numbers by name, possibly nested. Other values in it, such as torchmetrics'
                list of classes, are skipped, and named in the log.
        """
        numbers = comm.broadcast(as_numbers(results))
        self.synchronize()  # training metrics come first, and a signal may have arrived
        # An evaluation after the run belongs to its last iteration.
        iteration = max(self.done - 1, 0) if self.succeeded else self.iter
        self.storage.put_results(numbers, iteration)
        for hook in self._hooks:
            hook.after_evaluation(numbers)
        self.synchronize()  # so that a stop requested by a hook comes after this iteration

    def after_train(self) -> None:
        """Call every hook whose ``before_train`` ran, and raise the first error."""
        if self.succeeded:
            self.iter = self.storage.max_iter = self.max_iter  # an early stop lowers it
            # No step has seeded them if the run was already complete when it began.
            self.seed_generators(self.done, "end")
        self.storage.iter = self.iter
        run = self._run
        begun, run.begun = run.begun or [], None
        for hook in begun:
            try:
                hook.after_train()
            except BaseException as error:  # sys.exit() and Ctrl-C too
                self.succeeded = False  # for the hooks that follow
                if run.late_error is not None:
                    logger.exception("Another hook failed in after_train:")
                self.raise_later(error)
        if run.late_error is not None:
            self.succeeded = False
            raise run.late_error

    # Requests from hooks.

    def seed_generators(self, iteration: int, event: str = "step") -> None:
        """Seed the generators of this rank; see :func:`hooktrain.utils.env.seed_step`."""
        seed_step(self.seed, iteration, self._run.rank, event)

    def request_stop(self, reason: str) -> None:
        """Request an early end of the run. Any rank may call it.

        A single process stops after this iteration, several ranks at their next exchange. A
        gradient accumulation in progress is completed first.
        """
        self.agreement.request_stop(reason, self.iter)

    def _refuse_to_stop(self, value: object) -> None:
        raise AttributeError("a run is stopped by trainer.request_stop(reason)")

    # Lightning's, and those of Ultralytics, where they are set.
    should_stop = stop = stop_training = property(fset=_refuse_to_stop)

    def raise_later(self, error: BaseException) -> None:
        """Raise an error after all hooks have seen this iteration. Call it on all ranks."""
        self._run.late_error = self._run.late_error or error

    def tolerate_losses(self) -> None:
        """Allow infinite and NaN losses in this iteration. Call it on all ranks."""
        self._losses.tolerate(self.iter)

    def end_period(self) -> None:
        """Exchange metrics at the end of a period. A collective."""
        self.synchronize()

    def synchronize(self) -> None:
        """Exchange metrics, stop requests and the time, and check the losses. A collective."""
        if comm.get_world_size() > 1:
            maxima = self._losses.exchange(self.done, self.agreement.proposals())
            self.agreement.settle(maxima)
        self._losses.check(self.done)

    def prepare_save(self) -> None:
        """Check before a save that the losses are finite on every rank. A collective.

        Raises:
            FloatingPointError: on all ranks, if a loss of any rank is not finite.
        """
        self.synchronize()

    @property
    def can_save(self) -> bool:
        """Whether a checkpoint would now hold everything that a resumed run needs."""
        return True

    # The state.

    def state_dict(self) -> State:
        """The state that a resumed run needs, in tensors and plain types.

        ``iteration`` is the last finished iteration, -1 before the first.

        Raises:
            FloatingPointError: if a loss is not finite.
        """
        self._losses.check(self.done)
        return {
            "iteration": self.done - 1,
            "hooks": hook_states(self._hooks),
            "storage": self.storage.state_dict(),
            "seed": self.seed,
            "meta": {
                **self.meta,
                "hooktrain": __version__,
                "torch": str(torch.__version__),
                "world_size": comm.get_world_size(),
                "seconds": self.clock.state_dict(),
            },
        }

    def check_state_dict(self, state_dict: State) -> None:
        """Refuse a state that :meth:`load_state_dict` could not load; change nothing.

        Raises:
            ValueError: if it holds the state of a hook that is not registered, or if a hook
                refuses its state.
            RuntimeError: during a run.
        """
        self._refuse_in_run(
            "the state of the trainer cannot be set",
            "load it before train(), or only the weights by load_checkpoint()",
        )
        hooks = named_hooks(self._hooks)
        states = state_dict.get("hooks", {})
        lost = [key for key in states if key not in hooks]
        # The state is that of the main process; other ranks may have fewer hooks.
        if lost and comm.is_main_process():
            raise ValueError(
                f"the checkpoint has states of hooks that are not registered: {lost}; registered "
                f"are {list(hooks)}. Register them before you resume, or load only other parts"
            )
        for key in states.keys() & hooks.keys():
            hooks[key].check_state_dict(states[key])

    def load_state_dict(self, state_dict: State) -> None:
        """Load what :meth:`state_dict` returned, so that ``train`` continues after it.

        Args:
            state_dict: the state; states of detectron2's trainers are accepted too. An object
                whose part is missing stays as it is; without ``"hooks"`` schedules start anew.

        Raises:
            ValueError: if :meth:`check_state_dict` refuses the state. Nothing has changed then.
        """
        self.check_state_dict(state_dict)
        if "hooks" in state_dict:
            load_hook_states(self._hooks, state_dict["hooks"])
        if "iteration" in state_dict:
            self.iter = int(state_dict["iteration"])
            self.done = self.iter + 1
            self._broke_off = False
            self.clock.load_state_dict(state_dict.get("meta", {}).get("seconds", {}))
        if "storage" in state_dict:
            self.storage.load_state_dict(state_dict["storage"])
        if "seed" in state_dict:
            self.seed = state_dict["seed"]

    # The list of hooks.

    @property
    def hooks(self) -> tuple[HookBase, ...]:
        """The registered hooks, in the order in which they run."""
        return tuple(self._hooks)

    def register_hooks(
        self,
        hooks: Iterable[HookBase | None],
        *,
        before: HookReference = None,
        after: HookReference = None,
    ) -> None:
        """Add hooks, each behind those of its phase; see :class:`HookBase`.

        During a run their ``before_train`` is called at once.

        Args:
            hooks: the hooks; None entries are skipped.
            before: a registered hook or its class. The new hooks run right before it, in the
                order of the list, and take its phase.
            after: the same, but they run right after it.

        Raises:
            TypeError: if an entry is not a hook.
            ValueError: if the hook ``before`` or ``after`` is not registered, if a phase is
                unknown, or if a new hook already has a trainer.
        """
        index, phase = len(self._hooks), None
        if before is not None or after is not None:
            index, phase = place_beside(self._hooks, before, after)
        what = "hooks (for MMEngine's see docs/migrating.md)"
        # A cycle of strong references would keep the model's memory until Python finds it.
        me = weakref.proxy(self)
        for hook in as_list(hooks, HookBase, what):
            if hook is None:
                continue
            # The hook's constructor may have set this trainer already.
            is_free = any(hook.trainer is known for known in (None, self, me))
            if hook in self._hooks or not is_free:
                raise ValueError(
                    f"{hook!r} already has a trainer: make one hook for each trainer"
                )
            warn_about_events(type(hook))
            warn_about_eventless_hook(hook)
            if phase is not None:
                hook.phase = phase
            elif self.places_by_phase:
                index = place_by_phase(self._hooks, hook)
            hook.trainer = me
            # A new list, since a loop may be iterating over the old one.
            self._hooks = [*self._hooks[:index], hook, *self._hooks[index:]]
            index += 1
            if self._run.begun is not None:
                hook.before_train()
                self._run.begun.append(hook)

    def describe_hooks(self) -> str:
        """One line per hook, in order: its name, its phase and the events that it overrides."""
        return describe(self._hooks)
