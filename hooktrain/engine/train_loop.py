"""The loop of iterations, which calls the hooks around it."""

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
)
from hooktrain.engine.losses import LossRecorder
from hooktrain.engine.preflight import warn_of_events
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
    """What a trainer notes for one run.

    Attributes:
        rank: the data-parallel rank of this process.
        begun: the hooks whose ``before_train`` was called; None if nothing runs.
        has_backward: whether ``after_backward`` was called.
        late_error: an error that is raised when all hooks have seen the iteration.
        trainable: the parameters that are trained, by their identity; None if they are sharded.
        versions: those of the optimizers when the run began; empty when they were looked at.
        non_finite: the names of what was infinite or NaN when the run began, such as masks; None
            before that.
        confirmed: so many iterations were done when everything was finite on every rank.
    """

    def __init__(self) -> None:
        self.rank = comm.data_parallel_rank()
        self.begun: list[HookBase] | None = None
        self.has_backward = False
        self.late_error: BaseException | None = None
        self.trainable: dict[int, nn.Parameter] | None = None
        self.versions: dict[str, Version] = {}
        self.non_finite: set[str] | None = None
        self.confirmed = -1


class TrainerBase:
    """A loop of iterations with hooks. A subclass defines :meth:`run_step`.

    The methods ``before_train``, ``before_step``, ``after_backward``, ``after_step``,
    ``after_evaluation`` and ``after_train`` are the events of the hooks. A subclass that has
    something to do at one of them overrides it and calls ``super()``.

    Before each iteration, and before the end, the loop seeds the random generators, by a function
    of the seed, the iteration and the rank. So any iteration can be computed again.

    Attributes:
        iter: the current iteration, from 0; ``max_iter`` after a complete run.
        done: the number of finished iterations. In ``after_step`` the current one is finished.
        start_iter: the first iteration of the run.
        succeeded: whether the run came to its end, early or not, and nothing failed. Set by the
            event methods, so it also holds in loops that call those directly.
        seed: the seed of the run's random numbers; None takes ``torch.initial_seed()``.
        storage: holds the metrics.
        agreement: what the ranks agree on at each exchange, such as an early stop.
        sync_period: the number of iterations from one exchange of the ranks to the next.
        is_last: whether the current iteration is the last one of the run.
        ends_period: whether the ranks exchange metrics after the current iteration, as they do at
            the end of each period and of the run. Both are known before the step.
        clock: where the time of the run goes; periods such as "10 minutes" end by it.
        meta: plain values that each checkpoint holds, such as the configuration.
        places_by_phase: whether :meth:`register_hooks` sorts hooks by their phases.
    """

    iter: int = 0
    done: int = 0
    start_iter: int = 0
    succeeded: bool = False
    seed: int | None = None
    places_by_phase: ClassVar[bool] = True
    sync_period: int = 20
    is_last: bool = False
    ends_period: bool = False
    _broke_off = False  # inside an iteration
    _max_iter = 0
    _epoch_length: int | None = None  # as it was set
    _loader_length = 0  # in batches; 0 is not known

    def __new__(cls: type[Trainer], *_args: Any, **_kwargs: Any) -> Trainer:
        """Warn of what a subclass leaves out, such as the call of this class's constructor."""
        warn_of_events(cls)
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
        """The iteration that the run ends before. An early stop lowers it."""
        return self._max_iter

    @max_iter.setter
    def max_iter(self, max_iter: int) -> None:
        self._refuse_in_run(
            "max_iter",
            "request_stop() ends it early, train(max_iter=...) goes on later",
        )
        self._max_iter = max_iter

    def _refuse_in_run(self, name: str, instead: str) -> None:
        if self._run.begun is not None:
            raise RuntimeError(
                f"{name} cannot be set in a run, which has read it: {instead}"
            )

    @property
    def batches_per_step(self) -> int:
        """The number of batches of the loader that an iteration takes."""
        return 1

    @property
    def epoch_length(self) -> int | None:
        """The iterations of an epoch, as they were set or as the loader has them, or None."""
        own = -(-self._loader_length // self.batches_per_step)  # rounded up
        return self._epoch_length or own or None

    @epoch_length.setter
    def epoch_length(self, epoch_length: int | None) -> None:
        self._refuse_in_run(
            "epoch_length", "set it before, or give the trainer another data_loader"
        )
        self._epoch_length = epoch_length

    @property
    def stop_reason(self) -> str | None:
        """Why the run ends early, once all ranks know it."""
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
            start_iter: None goes on after the last finished iteration.
            max_iter: the iteration to end before.
            max_epochs: in place of ``max_iter``, counted from iteration 0.

        Raises:
            ValueError: if there is no end after the start, or if epochs are asked for and their
                length is not known.
            RuntimeError: if a hook or an evaluation calls it; if another thread trains; or without
                ``start_iter``, if the last run broke off inside an iteration.
        """
        if self._run.begun is not None:
            raise RuntimeError("train() is running: no hook or evaluation can call it")
        if start_iter is None:
            start_iter = self.done
            if self._broke_off:
                raise RuntimeError(
                    f"the last run broke off inside iteration {self.iter}: load a checkpoint, "
                    f"or go on as things are: train({start_iter=})"
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
        self.synchronize()  # a hook may have asked for a stop
        self._broke_off = True  # until the last iteration has ended
        for iteration in range(self.start_iter, self.max_iter):
            if self.stop_reason is not None and self.can_save:
                self._max_iter = iteration
                self.synchronize()  # of the iterations since the last exchange
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
            # For log.txt; who catches it, or Python, shows it on the terminal.
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
        ends = self.iter + 1
        self.is_last = ends == self._max_iter
        self.ends_period = self.is_last or ends % self.sync_period == 0
        self.storage.iter = self.iter
        self.clock.begin_step()
        for hook in self._hooks:
            hook.before_step()

    def run_step(self) -> None:
        """Make one iteration. A subclass defines it, and calls :meth:`after_backward`."""
        raise NotImplementedError(f"{type(self).__qualname__} must define run_step")

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
            self.synchronize()
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

        ``EvalHook`` calls it, and so does any hook or loop that evaluates in its own way. Every
        rank takes the results of the main process. They are recorded under their names, but under
        ``"eval/<name>"`` if the training has a metric of that name.

        Args:
            results: numbers by name, possibly nested. Other values in it, such as torchmetrics'
                list of classes, are named in the log and left out.
        """
        numbers = comm.broadcast(as_numbers(results))
        self.synchronize()  # the training's metrics come first, and a signal may have come
        # An evaluation after the run is one of its last iteration.
        iteration = max(self.done - 1, 0) if self.succeeded else self.iter
        self.storage.put_results(numbers, iteration)
        for hook in self._hooks:
            hook.after_evaluation(numbers)
        self.synchronize()  # a hook may ask for a stop, which then comes after this iteration

    def after_train(self) -> None:
        """Call every hook whose ``before_train`` ran, and raise the first error."""
        if self.succeeded:
            self.iter = self.storage.max_iter = self.max_iter  # an early stop lowers it
            # A run that was complete when it began has seeded no step.
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
                    logger.exception("A further hook failed in after_train:")
                self.raise_later(error)
        if run.late_error is not None:
            self.succeeded = False
            raise run.late_error

    # Requests of hooks.

    def seed_generators(self, iteration: int, event: str = "step") -> None:
        """Seed the generators of this rank; see :func:`hooktrain.utils.env.seed_step`."""
        assert self.seed is not None  # from before_train on
        seed_step(self.seed, iteration, self._run.rank, event)

    def request_stop(self, reason: str) -> None:
        """Ask for an early end of the run. Any rank may call it.

        A single process stops after this iteration, and several ranks stop at their next
        exchange. An open gradient accumulation is completed first.
        """
        self.agreement.request_stop(reason, self.iter)

    def raise_later(self, error: BaseException) -> None:
        """Raise an error after all hooks have seen this iteration. Call it on all ranks."""
        self._run.late_error = self._run.late_error or error

    def tolerate_losses(self) -> None:
        """Let the losses of this iteration be infinite or NaN. Call it on all ranks."""
        self._losses.tolerate(self.iter)

    def synchronize(self) -> None:
        """Exchange metrics and what the ranks agree on, and check the losses. A collective."""
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

        ``iteration`` is the last finished iteration, and -1 before the first.

        Raises:
            FloatingPointError: if a loss was not finite.
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
        """Refuse what :meth:`load_state_dict` could not load; change nothing.

        Raises:
            ValueError: for the state of a hook that is not registered, or if a hook refuses its
                state.
            RuntimeError: in a run.
        """
        self._refuse_in_run(
            "the state of the trainer",
            "load it before train(), or the weights alone by load_checkpoint()",
        )
        hooks = named_hooks(self._hooks)
        states = state_dict.get("hooks", {})
        lost = [key for key in states if key not in hooks]
        # The state is the main process's, and other ranks may have fewer hooks.
        if lost and comm.is_main_process():
            raise ValueError(
                f"the checkpoint has states of hooks that are not registered: {lost}; "
                f"there are {list(hooks)}. Register them before you resume, or load other parts "
                "only"
            )
        for key in states.keys() & hooks.keys():
            hooks[key].check_state_dict(states[key])

    def load_state_dict(self, state_dict: State) -> None:
        """Load what :meth:`state_dict` returned, so that ``train`` goes on after it.

        Args:
            state_dict: the state. That of detectron2's trainers is accepted too. What the missing
                parts are about is left unchanged; without ``"hooks"`` schedules begin anew.

        Raises:
            ValueError: if :meth:`check_state_dict` refuses the state. Nothing is changed then.
        """
        self.check_state_dict(state_dict)
        if "hooks" in state_dict:
            load_hook_states(self._hooks, state_dict["hooks"])
        if "iteration" in state_dict:
            self.iter = int(state_dict["iteration"])
            self.done = self.iter + 1
            self._broke_off = False
            self.storage.iter = max(self.iter, 0)
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
        """Add hooks. Each has its place behind those of its phase; see :class:`HookBase`.

        During a run their ``before_train`` is called at once.

        Args:
            hooks: the hooks; entries that are None are left out.
            before: a registered hook, its class or its key. The new hooks run right before it,
                in the order of the list, and take over its phase.
            after: the same, to let them run right after it.

        Raises:
            TypeError: if an entry is not a hook.
            ValueError: if there is no hook ``before`` or ``after``, if a phase is unknown, or if a
                new hook has a trainer already.
        """
        index, phase = len(self._hooks), None
        if before is not None or after is not None:
            index, phase = place_beside(self._hooks, before, after)
        what = "hooks (for those of MMEngine see docs/migrating.md)"
        # A cycle of strong references would keep the model's memory until Python finds it.
        me = weakref.proxy(self)
        for hook in as_list(hooks, HookBase, what):
            if hook is None:
                continue
            # A constructor may have set this very trainer.
            is_free = any(hook.trainer is known for known in (None, self, me))
            if hook in self._hooks or not is_free:
                raise ValueError(
                    f"{hook!r} has a trainer already: make one for each trainer"
                )
            warn_of_events(type(hook))
            if phase is not None:
                hook.phase = phase
            elif self.places_by_phase:
                index = place_by_phase(self._hooks, hook)
            hook.trainer = me
            # It is a new list, since a loop may be going over the old one.
            self._hooks = [*self._hooks[:index], hook, *self._hooks[index:]]
            index += 1
            if self._run.begun is not None:
                hook.before_train()
                self._run.begun.append(hook)

    def describe_hooks(self) -> str:
        """A line for each hook, in order: its name, its phase, the events that it overrides."""
        return describe(self._hooks)
