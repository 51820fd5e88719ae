"""The loop of iterations, which calls the hooks around it."""

import logging
import weakref
from collections.abc import Callable, Collection, Iterable
from datetime import datetime, timezone
from functools import partial
from typing import Any, ClassVar, TypeAlias

import torch

from hooktrain import __version__
from hooktrain.checkpoint.files import states_of
from hooktrain.engine.clock import Clock
from hooktrain.engine.hook_base import EVENTS, HookBase, State
from hooktrain.engine.losses import LOOK_AGAIN, LossRecorder
from hooktrain.engine.preflight import warn_of_events
from hooktrain.events import EventStorage
from hooktrain.utils import comm
from hooktrain.utils.comm import on_all_ranks
from hooktrain.utils.env import seed_step
from hooktrain.utils.names import as_list
from hooktrain.utils.periods import end_of_run

# All ranks take these attributes from the main process when a run begins.
_SHARED = ("seed", "max_iter", "sync_period", "epoch_length")

# Names a registered hook: the object, its class, or its key.
HookReference: TypeAlias = HookBase | type[HookBase] | str | None

logger = logging.getLogger(__name__)


class TrainerBase:
    """A loop of iterations with hooks. A subclass defines :meth:`run_step`.

    The methods ``before_train``, ``before_step``, ``after_backward``, ``after_step`` and
    ``after_train`` are the events of the hooks. A subclass that has something to do at one of
    them overrides it and calls ``super()``.

    Before each iteration, and before the end, the loop seeds the random generators, by a function
    of the seed, the iteration and the rank. So any iteration can be computed again.

    Attributes:
        iter: the current iteration, from 0; ``max_iter`` after a complete run.
        done: the number of finished iterations. In ``after_step`` the current one is finished.
        start_iter: the first iteration of the run.
        max_iter: the iteration that the run ends before. An early stop lowers it.
        succeeded: whether the run came to its end, early or not, and nothing failed. The events
            set it, so it is also true in loops that call them without ``train``.
        epoch_length: the number of iterations of an epoch, if it is known.
        seed: the seed of the run's random numbers; None takes ``torch.initial_seed()``.
        storage: holds the metrics.
        stop_reason: why the run ends early, once all ranks know it.
        own_signal: the number of a signal that asks this process to end, or 0.
        signal: the highest such number of any rank, once all ranks know it.
        sync_period: the number of iterations from one exchange of the ranks to the next.
        ends_period: whether the current iteration ends with an exchange, known before its hooks.
        clock: the seconds in the steps, by which periods such as "10 minutes" end.
        meta: plain values that each checkpoint holds, such as the configuration.
        state_parts: the names of the parts of the state that can be loaded alone.
    """

    state_parts: ClassVar[frozenset[str]] = frozenset(
        {"iteration", "hooks", "storage", "seed"}
    )

    iter: int = 0
    done: int = 0
    start_iter: int = 0
    max_iter: int = 0
    succeeded: bool = False
    epoch_length: int | None = None
    seed: int | None = None
    stop_reason: str | None = None
    own_signal: int = 0
    signal: int = 0
    sync_period: int = 20
    ends_period: bool = False
    # The hooks whose before_train was called; None while nothing runs.
    _begun: list[HookBase] | None = None
    _broke_off = False  # inside an iteration
    _has_backward = False  # whether after_backward was ever called
    _is_checked = False  # all is finite in this iteration, as every rank knows
    _compared = 0  # see compare_ranks
    _on_difference: Any = None
    _stop_request: str | None = None
    _late_error: BaseException | None = None

    def __new__(cls, *_args: Any, **_kwargs: Any) -> "TrainerBase":
        """Warn of what a subclass leaves out, such as the call of this class's constructor."""
        warn_of_events(cls, EVENTS)
        return super().__new__(cls)

    def __init__(self) -> None:
        self._hooks: list[HookBase] = []
        self.storage = EventStorage()
        self.meta: dict[str, Any] = {}
        self.clock = Clock()
        self._losses = LossRecorder(self.storage)

    @property
    def is_last(self) -> bool:
        """Whether the current iteration is the last one of the run."""
        return self.iter == self.max_iter - 1

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
            RuntimeError: if a hook or an evaluation calls it; or without ``start_iter``, if the
                last run broke off inside an iteration.
        """
        if self._begun is not None:
            raise RuntimeError("train() is running: no hook or evaluation can call it")
        start = self.done if start_iter is None else start_iter
        if start_iter is None and self._broke_off:
            raise RuntimeError(
                f"the last run broke off inside iteration {self.iter}: load a checkpoint, "
                f"or go on as things are: train(start_iter={start})"
            )
        max_iter = end_of_run(start, max_iter, max_epochs, self.epoch_length)
        if start < max_iter:
            logger.info("Starting training from iteration %d", start)
        if start != self.done:
            self.storage = EventStorage(start)
        self.iter = self.start_iter = start
        self.max_iter = max_iter
        with self.storage:
            try:
                self.before_train()
                self._run_iterations()
            except BaseException as error:
                self._end_failed_run(error)
                # Raised on, it would just end a loop around this.
                if isinstance(error, StopIteration):
                    raise RuntimeError(
                        f"StopIteration in iteration {self.iter}: what a step reads has ended"
                    ) from error
                raise
            self.succeeded = True
            self.after_train()

    def _run_iterations(self) -> None:
        self.synchronize()  # a hook may have asked for a stop
        self._broke_off = True  # until the last iteration has ended
        for iteration in range(self.start_iter, self.max_iter):
            if self.stop_reason is not None and self.can_save:
                self.max_iter = iteration
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
        self.succeeded = False
        self.stop_reason = None
        self._stop_request = None
        self._late_error = None
        self.own_signal = self.signal = self._compared = 0
        self.done = self.start_iter
        self._losses = LossRecorder(self.storage, self.start_iter)
        self._agree()
        self.storage.iter = self.iter
        self.storage.trainer = weakref.proxy(self)
        self._begun = []
        for hook in self._hooks:
            hook.before_train()
            self._begun.append(hook)
        self.succeeded = self.start_iter >= self.max_iter

    def _agree(self) -> None:
        """Take the main process's values, and find out which hooks all ranks have."""
        self._rank = comm.data_parallel_rank()
        if self.seed is None:
            self.seed = torch.initial_seed()
        hooks = self._named_hooks()
        mine = {name: getattr(self, name) for name in _SHARED}
        ranks = comm.all_gather((list(hooks), mine))
        self.clock.is_shared = len(ranks) > 1
        for name, value in ranks[0][1].items():
            setattr(self, name, value)
        for name, hook in hooks.items():
            hook.on_every_rank = all(name in names for names, _ in ranks)
            if hook.needs_every_rank and not hook.on_every_rank:
                raise RuntimeError(f"register {name} on every rank, or on none")

    def before_step(self) -> None:
        """Seed this iteration, then call the hooks."""
        assert self.seed is not None
        seed_step(self.seed, self.iter, self._rank)
        self._is_checked = False
        self.ends_period = (self.iter + 1) % self.sync_period == 0
        self.storage.iter = self.iter
        self.clock.begin_step()
        for hook in self._hooks:
            hook.before_step()

    def run_step(self) -> None:
        """Make one iteration. A subclass defines it, and calls :meth:`after_backward`."""
        raise NotImplementedError(f"{type(self).__qualname__} must define run_step")

    def after_backward(self) -> None:
        """Call the hooks between backward and update."""
        self._has_backward = True
        for hook in self._hooks:
            hook.after_backward()

    def after_step(self) -> None:
        """Exchange metrics where a period ends, then call the hooks."""
        self.done = self.iter + 1
        self.clock.end_step()
        if self.ends_period or self.is_last:
            self.synchronize()
        self.clock.advance()
        for hook in self._hooks:
            hook.after_step()
        if self._late_error is not None:
            error = self._late_error
            self._late_error = None
            self._broke_off = False
            raise error
        self.succeeded = self.is_last

    def after_train(self) -> None:
        """Call every hook whose ``before_train`` ran, and raise the first error."""
        if self.succeeded:
            self.iter = self.max_iter
            # A run that was complete when it began has seeded no step.
            assert self.seed is not None
            seed_step(self.seed, self.done, self._rank, "end")
        self.storage.iter = self.iter
        begun = self._begun or []
        self._begun = None
        first: BaseException | None = None
        for hook in begun:
            try:
                hook.after_train()
            except BaseException as error:  # sys.exit() and Ctrl-C too
                self.succeeded = False  # for the hooks that follow
                if first is None:
                    first = error
                else:
                    logger.exception("A further hook failed in after_train:")
        first = first or self._late_error
        if first is not None:
            self.succeeded = False
            raise first

    # What hooks ask for.

    def request_stop(self, reason: str) -> None:
        """Ask for an early end of the run. Any rank may call it.

        A single process stops after this iteration, and several ranks stop at their next
        exchange. An open gradient accumulation is completed first.
        """
        if self._stop_request is None:
            logger.info("Stop requested at iteration %d: %s", self.iter, reason)
            self._stop_request = reason
        if comm.get_world_size() == 1:
            self.stop_reason = self._stop_request

    def raise_later(self, error: BaseException) -> None:
        """Raise an error after all hooks have seen this iteration. Call it on all ranks."""
        self._late_error = self._late_error or error

    def tolerate_losses(self) -> None:
        """Let the losses of this iteration be infinite or NaN. Call it on all ranks."""
        self._losses.tolerate(self.iter)

    def compare_ranks(self, number: int, on_difference: Callable[[], None]) -> None:
        """Let the exchanges from now on compare a number of the ranks. Call it on all ranks.

        Args:
            number: from 0 to 2^53.
            on_difference: is called on all ranks if the numbers differ, and raises an error.
        """
        self._compared = number
        self._on_difference = on_difference

    def synchronize(self) -> None:
        """Exchange metrics and requests to stop, and check the losses. A collective."""
        if comm.get_world_size() > 1:
            asking = -1 if self._stop_request is None else comm.get_rank()
            seconds, compared = self.clock.own, self._compared
            # The maximum of the negative numbers is the minimum of the numbers.
            own = [asking, seconds, self.own_signal, compared, -compared]
            maxima = self._losses.exchange(self.done, own)
            rank, self.clock.agreed, signal, most, least = maxima
            self.signal = int(signal)
            if most != -least:
                self._on_difference()
            if rank >= 0 and self.stop_reason is None:
                self.stop_reason = comm.broadcast(self._stop_request, int(rank))
                logger.info("Stopping, since rank %d asks: %s", rank, self.stop_reason)
        self._losses.check(self.done)

    def prepare_save(self) -> None:
        """Check before a save that everything is finite on every rank. A collective.

        The next :meth:`state_dict` of this iteration does not look at the weights again.

        Raises:
            FloatingPointError: on all ranks, if a loss or a weight of any rank is not finite.
        """
        self.synchronize()
        # What is broken is found first, since hooks may gather their states.
        on_all_ranks(partial(self._refuse, self.find_non_finite()))
        self._is_checked = True

    def find_non_finite(self) -> set[str]:
        """Name what became infinite or NaN in this run and would be saved; here nothing."""
        return set()

    def _refuse(self, broken: set[str]) -> None:
        self._losses.check(self.done)
        if broken:
            raise FloatingPointError(
                f"Infinite or NaN at iteration={self.iter}, and not saved: "
                f"{sorted(broken)[:10]}\n{LOOK_AGAIN}"
            )

    @property
    def can_save(self) -> bool:
        """Whether a checkpoint would now hold everything that a resumed run needs."""
        return True

    # The state.

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs, in tensors and plain types.

        ``iteration`` is the last finished iteration, and -1 before the first.

        Raises:
            FloatingPointError: if a loss was not finite, or if weights are not.
        """
        if not self._is_checked:
            self._refuse(self.find_non_finite())
        self._is_checked = False
        meta = {
            "hooktrain": __version__,
            "torch": str(torch.__version__),
            "world_size": comm.get_world_size(),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        return {
            "iteration": self.done - 1,
            "hooks": self._hook_states(),
            "storage": self.storage.state_dict(),
            "seed": self.seed,
            "meta": {**self.meta, **meta},
        }

    def _hook_states(self) -> dict[str, Any]:
        """The states of the hooks that have one."""
        states = states_of(self._named_hooks())
        return {key: state for key, state in states.items() if state}

    def check_state_dict(
        self, state_dict: State, *, only: Collection[str] | None = None
    ) -> None:
        """Refuse what :meth:`load_state_dict` could not load; change nothing.

        Raises:
            ValueError: for an unknown part, for the state of a hook that is not registered, or if
                a hook refuses its state.
        """
        if "hooks" not in self._chosen(only):
            return
        hooks = self._named_hooks()
        states = state_dict.get("hooks", {})
        lost = [key for key in states if key not in hooks]
        # The state is the main process's, and other ranks may have fewer hooks.
        if lost and comm.is_main_process():
            raise ValueError(
                f"the checkpoint has states of hooks that are not registered: {lost}; "
                f"there are {list(hooks)}. Register them, or load other parts only"
            )
        for key in states.keys() & hooks.keys():
            hooks[key].check_state_dict(states[key])

    def _chosen(self, only: Collection[str] | None) -> frozenset[str]:
        """The parts of the state to load."""
        parts = self.state_parts if only is None else frozenset(only)
        if not self.state_parts.issuperset(parts):
            raise ValueError(f"only={only!r}: there is {sorted(self.state_parts)}")
        return parts

    def load_state_dict(
        self, state_dict: State, *, only: Collection[str] | None = None
    ) -> None:
        """Load what :meth:`state_dict` returned, so that ``train`` goes on after it.

        Args:
            state_dict: the state. That of detectron2's trainers is accepted too. Missing parts
                are left unchanged.
            only: those of :attr:`state_parts` to load; None loads all of them. Without
                ``"hooks"`` schedules begin anew.

        Raises:
            ValueError: if :meth:`check_state_dict` refuses the state. Nothing is changed then.
        """
        self.check_state_dict(state_dict, only=only)
        parts = self._chosen(only)
        if "hooks" in parts:
            self._load_hooks(state_dict.get("hooks", {}))
        there = state_dict.keys() & parts
        if "iteration" in there:
            self.iter = int(state_dict["iteration"])
            self.done = self.iter + 1
            self._broke_off = False
            self.storage.iter = max(self.iter, 0)
        if "storage" in there:
            self.storage.load_state_dict(state_dict["storage"])
        if "seed" in there:
            self.seed = state_dict["seed"]

    def _load_hooks(self, states: State) -> None:
        for key, hook in self._named_hooks().items():
            if key in states:
                hook.load_state_dict(states[key])
            elif hook.state_dict():
                logger.warning("The checkpoint has no state for the hook %r", key)

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
        """Add hooks behind those that are there. They run in the order of the list.

        During a run their ``before_train`` is called at once.

        Args:
            hooks: the hooks; entries that are None are left out.
            before: a registered hook, its class or its key. The new hooks run before it.
            after: the same, to let them run after it.

        Raises:
            TypeError: if an entry is no hook.
            ValueError: if there is no hook ``before`` or ``after``, or if a new one is registered
                already.
        """
        index = len(self._hooks)
        if before is not None:
            index = self._indices(before)[0]
        elif after is not None:
            index = self._indices(after)[-1] + 1
        # A cycle of strong references would keep the model's memory until Python finds it.
        me = weakref.proxy(self)
        what = "hooks (for those of MMEngine see docs/migrating.md)"
        for hook in as_list(hooks, HookBase, what):
            if hook is None:
                continue
            # A constructor may have set this very trainer.
            is_free = any(hook.trainer is known for known in (None, self, me))
            if hook in self._hooks or not is_free:
                raise ValueError(
                    f"{hook!r} is registered already: make one for each trainer"
                )
            warn_of_events(type(hook), EVENTS)
            hook.trainer = me
            # It is a new list, since a loop may be going over the old one.
            self._hooks = [*self._hooks[:index], hook, *self._hooks[index:]]
            index += 1
            if self._begun is not None:
                hook.before_train()
                self._begun.append(hook)

    def _indices(self, wanted: HookReference) -> list[int]:
        """The places of this hook, or of the hooks of this class or key."""
        named = self._named_hooks()
        found = [
            index
            for index, (key, hook) in enumerate(named.items())
            if wanted in (key, hook, *type(hook).__mro__)
        ]
        if not found:
            raise ValueError(f"no hook {wanted!r} is registered; there are {[*named]}")
        return found

    def _named_hooks(self) -> dict[str, HookBase]:
        """The hooks by their keys or classes. Further ones get ``#1``, ``#2`` behind the name."""
        named: dict[str, HookBase] = {}
        for hook in self._hooks:
            name = first = hook.key or type(hook).__qualname__
            count = 0
            while name in named:
                count += 1
                name = f"{first}#{count}"
            named[name] = hook
        return named

    def describe_hooks(self) -> str:
        """A text with a line for each hook, in order, that names the events it overrides."""
        lines = []
        for key, hook in self._named_hooks().items():
            kind = type(hook)
            own = [e for e in EVENTS if getattr(kind, e) is not getattr(HookBase, e)]
            lines.append(f"{key}: {', '.join(own)}")
        return "\n".join(lines)
