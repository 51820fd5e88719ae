"""The loop of iterations, and the hooks around it: everything else in the package hangs on it."""

import logging
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timezone
from typing import Any, TypeAlias

import torch
from tabulate import tabulate

from hooktrain import __version__
from hooktrain.engine.losses import LossRecorder, note_batch
from hooktrain.events import EventStorage
from hooktrain.utils import comm
from hooktrain.utils.comm import on_all_ranks
from hooktrain.utils.env import seed_step
from hooktrain.utils.epochs import in_iterations
from hooktrain.utils.names import did_you_mean

EVENTS = ("before_train", "before_step", "after_backward", "after_step", "after_train")

logger = logging.getLogger(__name__)


class HookBase:
    """Something that happens around the steps of a trainer.

    A hook overrides the events that it needs. Each is called in the order of registration::

        hook.before_train()
        for iter in range(start_iter, max_iter):
            hook.before_step()
            trainer.run_step()    # calls hook.after_backward() between backward and update
            hook.after_step()
        hook.after_train()

    ``before_step`` should be cheap, since timers count it as part of the step. Do the work in
    ``after_step``. Register a hook on every rank: hooks that write decide which rank writes.

    A hook with state overrides both ``state_dict`` and ``load_state_dict``. Its state is saved
    with the trainer's, under :attr:`key`. A copy of a hook belongs to no trainer.

    Attributes:
        trainer: a weak proxy of the trainer, set when the hook is registered.
        key: the name of this hook in checkpoints and tables; None is the name of its class. Give
            names where several hooks of one class have state, so that removing one of them does
            not shift the others.
        on_every_rank: whether all ranks have this hook, so that it may call collectives. The
            trainer sets it before ``before_train``.
        needs_every_rank: whether the hook calls collectives in any case, so that a run must not
            begin without it on some rank.
    """

    trainer: Any = None
    key: str | None = None
    on_every_rank: bool = True
    needs_every_rank: bool = False

    def __getstate__(self) -> dict[str, Any]:
        # To copy the proxy would copy the whole trainer.
        return {name: value for name, value in vars(self).items() if name != "trainer"}

    def before_train(self) -> None:
        """Called once before the first iteration."""

    def after_train(self) -> None:
        """Called once at the end, also after an error; see ``trainer.succeeded``."""

    def before_step(self) -> None:
        """Called before each iteration."""

    def after_backward(self) -> None:
        """Called between the backward pass and the update, when the gradients are complete."""

    def after_step(self) -> None:
        """Called after each iteration."""

    def is_due(self, period: int | str, at_end: bool | None = True) -> bool:
        """Whether something that happens every ``period`` iterations is due after this one.

        Args:
            period: in iterations, or a text such as ``"1 epoch"``, counted from the start of the
                training. 0 is never due.
            at_end: the answer at the last iteration of the run; None asks the period there too.

        Raises:
            ValueError: for a period that is no whole number.
        """
        done: int = self.trainer.iter + 1
        if at_end is not None and done == self.trainer.max_iter:
            return at_end
        if isinstance(period, str):
            period = in_iterations(period, self.trainer.epoch_length)
        if period % 1:
            raise ValueError(
                f"{type(self).__name__} needs a whole number as period: {period!r}"
            )
        return period > 0 and done % period == 0

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart, in tensors and plain types. Empty for no state."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned."""
        logger.warning(
            "%s saves state but has no load_state_dict: it starts with its defaults",
            type(self).__qualname__,
        )


# Beside which hooks to put others: an object, those of a class, or a key.
Place: TypeAlias = HookBase | type[HookBase] | str | None


class TrainerBase:
    """A loop of iterations with hooks. A subclass defines :meth:`run_step`.

    Random numbers are a function of the seed, the iteration and the rank: the global generators
    are seeded at the start of each iteration. So a resumed run draws the same numbers as one that
    was not interrupted.

    Attributes:
        iter: the current iteration, counted from 0; ``max_iter`` after a complete run.
        start_iter: the first iteration of the current run.
        max_iter: the iteration that the run ends before. An early stop lowers it.
        succeeded: whether the run came to its end, early or not, and nothing has failed since.
        epoch_length: the iterations of an epoch, which trainers with a loader take from its length,
            rounded up where an iteration takes several batches; None if that is not known.
        seed: of the random numbers. None takes ``torch.initial_seed()`` of the main process when
            the training begins.
        storage: the :class:`~hooktrain.events.EventStorage` that takes the metrics.
        stop_reason: why the run is ending early, once all ranks agree; None in a run that goes on.
        sync_period: several ranks exchange metrics and requests to stop every so many iterations.
        meta: plain values to keep in every checkpoint, such as the text of the configuration.
        state_parts: the names of the parts of the state that can be loaded one by one.
    """

    sync_period: int = 20
    epoch_length: int | None = None
    state_parts: tuple[str, ...] = ("iteration", "hooks", "storage", "seed")

    def __init__(self) -> None:
        self._hooks: list[HookBase] = []
        # The hooks whose before_train was called; None while nothing runs.
        self._begun: list[HookBase] | None = None
        self.iter = self.start_iter = self.max_iter = 0
        self.succeeded = False
        self.seed: int | None = None
        self.storage = EventStorage()
        self.meta: dict[str, Any] = {}
        self._losses = LossRecorder()
        self._finished = 0
        self._broke_off = False
        self._stop_request: str | None = None
        self.stop_reason: str | None = None
        self._late_error: BaseException | None = None

    def register_hooks(
        self,
        hooks: Iterable[HookBase | None],
        *,
        before: Place = None,
        after: Place = None,
    ) -> None:
        """Add hooks. The order of registration is the order of execution.

        Of those that are added during a run, on all ranks alike, ``before_train`` is called at
        once. A method whose name resembles that of an event gets a warning.

        Args:
            hooks: the hooks, in order. None entries are left out.
            before: place them before this hook: an object, a class or a key.
            after: place them after this hook, if there is no ``before``.

        Raises:
            TypeError: for something that is not a hook.
            ValueError: for a place that is not there, or a hook that has a trainer already.
            RuntimeError: if a subclass has not called ``super().__init__()``.
        """
        if not hasattr(self, "_hooks"):
            raise RuntimeError(
                f"{type(self).__name__}.__init__ must call super().__init__() first"
            )
        new = [hook for hook in hooks if hook is not None]
        # A proxy, since a cycle of strong references would keep the model's memory alive.
        me = weakref.proxy(self)
        known = {id(hook) for hook in self._hooks}
        for hook in new:
            if not isinstance(hook, HookBase):
                raise TypeError(f"hooks must be HookBase objects, but got {hook!r}")
            if id(hook) in known or (
                hook.trainer is not None and hook.trainer is not me
            ):
                raise ValueError(
                    f"{hook!r} is registered already: make one for each trainer"
                )
            known.add(id(hook))
            _warn_of_misspelt_events(type(hook))
        place = len(self._hooks)
        if before is not None:
            place = self._places(before)[0]
        elif after is not None:
            place = self._places(after)[-1] + 1
        # A new list, since a loop may be going over the old one.
        self._hooks = [*self._hooks[:place], *new, *self._hooks[place:]]
        for hook in new:
            hook.trainer = me
            if self._begun is not None:
                hook.before_train()
                self._begun.append(hook)

    def _places(self, target: Place) -> list[int]:
        named = self._named_hooks()
        found = [
            place
            for place, (key, hook) in enumerate(named.items())
            if target in (key, hook)
            or (isinstance(target, type) and isinstance(hook, target))
        ]
        if not found:
            raise ValueError(
                f"no hook {target!r} is registered; there are {list(named)}"
            )
        return found

    def _named_hooks(self) -> dict[str, HookBase]:
        """The hooks in order, by distinct names: the key or the class, then ``#1``, ``#2``."""
        seen: Counter[str] = Counter()
        named = {}
        for hook in self._hooks:
            name = hook.key or type(hook).__qualname__
            named[f"{name}#{seen[name]}" if seen[name] else name] = hook
            seen[name] += 1
        return named

    def describe_hooks(self) -> str:
        """A table of the hooks: who runs at which event, and in which order."""
        rows = [
            [place, key, *("x" if _acts_at(hook, event) else "" for event in EVENTS)]
            for place, (key, hook) in enumerate(self._named_hooks().items())
        ]
        return tabulate(rows, headers=["", "hook", *EVENTS], tablefmt="pipe")

    def train(
        self,
        start_iter: int | None = None,
        max_iter: int | None = None,
        *,
        max_epochs: float | None = None,
    ) -> None:
        """Run the iterations from ``start_iter`` up to, not including, ``max_iter``.

        Args:
            start_iter: the first iteration. None continues after the last finished one: from 0
                in a new trainer, after the loaded state in a resumed one.
            max_iter: the iteration to end before. With ``max_iter == start_iter`` nothing is left
                to do, and only ``before_train`` and ``after_train`` run.
            max_epochs: in place of ``max_iter``, the epochs to train, counted from iteration 0.

        Raises:
            ValueError: if ``max_iter`` is missing, no integer, or lies before ``start_iter``; or if
                nobody knows how long an epoch is.
            RuntimeError: if the last run broke off inside an iteration and ``start_iter`` is None.
                What that iteration has done and what not, is not known.
        """
        self._prepare()
        if start_iter is None and self._broke_off:
            raise RuntimeError(
                f"the last run broke off inside iteration {self.iter}: a batch, an update or the "
                "after_step of some hooks may be missing. To go on exactly, load a checkpoint; to "
                f"go on with things as they are, call train(start_iter={self._finished}, ...)"
            )
        start = self._finished if start_iter is None else start_iter
        if max_iter is None and max_epochs is not None:
            max_iter = in_iterations(f"{max_epochs} epochs", self.epoch_length)
        if max_iter is None or not (
            hasattr(max_iter, "__index__") and 0 <= start <= max_iter
        ):
            raise ValueError(
                "train() needs an integer max_iter, and start_iter between 0 and that, but got "
                f"start_iter={start!r} and max_iter={max_iter!r}"
            )
        if start == max_iter:
            logger.info(
                "Nothing is left to train: all %d iterations are done", max_iter
            )
        else:
            logger.info("Starting training from iteration %d", start)
        if start != self._finished:
            self.storage = EventStorage(start)
        self.iter = self.start_iter = start
        self.max_iter = max_iter
        with self.storage:
            try:
                self.before_train()
                self._run_iterations()
            except BaseException as error:
                self.succeeded = False
                if isinstance(error, Exception):
                    note_batch(error)
                    logger.exception("Exception during training:")
                try:
                    self.after_train()
                except BaseException:
                    # The first error is the cause; this one must not hide it.
                    logger.exception("Exception while ending the failed run:")
                raise
            self.succeeded = True
            self.after_train()

    def _prepare(self) -> None:
        """What a subclass does before it is decided where the run starts."""

    def _agree(self) -> None:
        """Take the main process's seed and lengths; find the hooks that not all ranks have."""
        for (
            hook
        ) in self._hooks:  # also what was put into the list without register_hooks
            if hook.trainer is None:
                hook.trainer = weakref.proxy(self)
        named = self._named_hooks()
        needs_all = {name: hook.needs_every_rank for name, hook in named.items()}
        seed = torch.initial_seed() if self.seed is None else self.seed
        lengths = self.sync_period, self.epoch_length, self.max_iter
        of_ranks = comm.all_gather((needs_all, lengths, seed))
        _, (self.sync_period, self.epoch_length, self.max_iter), self.seed = of_ranks[0]
        everywhere = set.intersection(*(set(names) for names, _, _ in of_ranks))
        for name, hook in named.items():
            hook.on_every_rank = name in everywhere
        needed = {
            name for names, _, _ in of_ranks for name, needs in names.items() if needs
        }
        if missed := sorted(needed - everywhere):
            raise RuntimeError(f"register on every rank, not only on some: {missed}")

    def _run_iterations(self) -> None:
        self.synchronize()  # a stop that was asked for before the first step
        self._broke_off = True  # until the end is reached
        for iteration in range(self.start_iter, self.max_iter):
            if self.stop_reason is not None and self.can_save:
                self.max_iter = iteration
                self.synchronize()  # the period that the stop cuts short
                break
            self.iter = iteration
            self.before_step()
            self.run_step()
            self.after_step()
        self._broke_off = False

    def before_train(self) -> None:
        """Begin a run at ``start_iter``, also for a loop of one's own, and call the hooks."""
        start = self.start_iter
        self.succeeded = False
        self._stop_request = self.stop_reason = self._late_error = None
        if start != self._finished:
            self._losses.reset(start)
        self._finished = start
        self._losses.begin(start)
        self._agree()
        self._rank = comm.get_rank()
        self.storage.iter = self.iter
        self._begun = []
        for hook in self._hooks:
            hook.before_train()
            self._begun.append(hook)
        self.succeeded = start >= self.max_iter  # then nothing is left to do

    def after_train(self) -> None:
        """Call every hook whose ``before_train`` ran, whatever happens; the first error wins."""
        if self.succeeded:
            self.iter = self.max_iter
        self.storage.iter = self.iter
        first: BaseException | None = None
        begun, self._begun = self._begun or [], None
        for hook in begun:
            try:
                hook.after_train()
            except BaseException as error:  # also sys.exit() and Ctrl-C
                # The hooks after it end a failed run: other ranks may wait elsewhere.
                self.succeeded = False
                if first is None:
                    first = error
                else:
                    logger.exception("A further hook failed in after_train:")
        if first is None:
            first = self._late_error
        if first is not None:
            self.succeeded = False
            raise first

    def before_step(self) -> None:
        """Seed and stamp this iteration, then call the hooks."""
        assert self.seed is not None
        seed_step(self.seed, self.iter, self._rank)
        self.storage.iter = self.iter
        for hook in self._hooks:
            hook.before_step()

    def run_step(self) -> None:
        """One iteration. The subclass defines it, and calls :meth:`after_backward` in it."""
        raise NotImplementedError(f"{type(self).__qualname__} must define run_step")

    def after_backward(self) -> None:
        """Call the hooks between backward and update."""
        for hook in self._hooks:
            hook.after_backward()

    def after_step(self) -> None:
        """Bring the ranks together where the period ends, then call the hooks."""
        done = self._finished = self.iter + 1
        if done % self.sync_period == 0 or done == self.max_iter:
            self.synchronize()
        for hook in self._hooks:
            hook.after_step()
        if (error := self._late_error) is not None:
            self._late_error, self._broke_off = None, False
            raise error
        self.succeeded = done == self.max_iter

    def raise_later(self, error: BaseException) -> None:
        """Let an error end the run when the other hooks have seen this iteration, or the end.

        So what was trained is saved where that is due. All ranks must call it, or none, since the
        other hooks may call collectives.
        """
        self._late_error = self._late_error or error

    def request_stop(self, reason: str) -> None:
        """Ask for an early, orderly end of the run, from any hook or rank.

        The current iteration is completed. Then all ranks stop at the same iteration: at once in
        a single process, else at the next exchange, every ``sync_period`` iterations. If
        gradients are being accumulated there, they stop after the update. ``max_iter`` becomes the
        number of finished iterations, so that the final checkpoint, evaluation and logs happen as
        at any end.
        """
        if self._stop_request is None:
            logger.info("Stop requested at iteration %d: %s", self.iter, reason)
            self._stop_request = reason
        if comm.get_world_size() == 1:
            self.stop_reason = self._stop_request

    def synchronize(self) -> None:
        """Exchange the ranks' metrics and requests, and check the losses. A collective."""
        if comm.get_world_size() > 1:
            asks = self._stop_request is not None
            rank = self._losses.exchange(self.storage, self._finished, asks)
            if rank >= 0 and self.stop_reason is None:
                self.stop_reason = comm.broadcast(self._stop_request, rank)
                logger.info("Stopping, as rank %d asked: %s", rank, self.stop_reason)
        self._losses.check(self.storage, self._finished)

    def prepare_save(self, on_every_rank: bool = True) -> None:
        """What a hook calls before it saves, so that all ranks know of what must not be saved.

        Args:
            on_every_rank: whether all ranks call it; then it is a collective.

        Raises:
            FloatingPointError: as :meth:`state_dict` does, but on every rank.
        """
        if on_every_rank and comm.get_world_size() > 1:
            self.synchronize()
            on_all_ranks(self._check_finite)

    def _check_finite(self) -> None:
        self._losses.check(self.storage, self._finished)

    @property
    def can_save(self) -> bool:
        """Whether a checkpoint after this iteration would hold all that a resumed run needs."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, in tensors and plain types.

        ``iteration`` is the last finished iteration, -1 before the first.

        Raises:
            FloatingPointError: if a loss was not finite, so that no checkpoint holds its update.
        """
        self._check_finite()
        if self._broke_off and self._begun is None:
            logger.warning(
                "The run broke off inside iteration %d: its state is inexact", self.iter
            )
        return {
            "iteration": self._finished - 1,
            "hooks": {
                k: s
                for k, hook in self._named_hooks().items()
                if (s := hook.state_dict())
            },
            "storage": self.storage.state_dict(),
            "seed": self.seed,
            "meta": {
                **self.meta,
                "hooktrain": __version__,
                "torch": str(torch.__version__),
                "world_size": comm.get_world_size(),
                "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            },
        }

    def load_state_dict(
        self, state_dict: Mapping[str, Any], *, only: Collection[str] | None = None
    ) -> None:
        """Load what :meth:`state_dict` returned, so that ``train`` continues after it.

        Args:
            state_dict: the state. Parts that a file of detectron2 lacks are left as they are.
            only: the names of the parts to load; None loads all.

        Raises:
            ValueError: if the state of a hook would be lost since no such hook is registered, or
                for an unknown name in ``only``.
        """
        chosen = set(self.state_parts if only is None else only)
        if unknown := chosen.difference(self.state_parts):
            raise ValueError(
                f"unknown parts {sorted(unknown)} of the trainer's state; "
                f"there are {sorted(self.state_parts)}"
            )
        state = {key: value for key, value in state_dict.items() if key in chosen}
        # First, since the hooks can refuse: then nothing has changed.
        if "hooks" in chosen:
            self._load_hooks(state.get("hooks", {}))
        if "iteration" in state:
            self.iter = int(state["iteration"])
            self._finished = self.iter + 1
            self._broke_off = False
            self.storage.iter = max(self.iter, 0)
            self._losses.reset(self._finished)
        if "storage" in state:
            self.storage.load_state_dict(state["storage"])
        self.seed = state.get("seed", self.seed)

    def _load_hooks(self, states: Mapping[str, Any]) -> None:
        hooks = self._named_hooks()
        lost = [key for key in states if key not in hooks]
        # The state is the main process's. Other ranks may have fewer hooks.
        if lost and comm.is_main_process():
            raise ValueError(
                f"the checkpoint holds the state of hooks that are not registered: {lost}; "
                f"there are {list(hooks)}. Register them, or load the trainer's other parts only"
            )
        for key, hook in hooks.items():
            if key in states:
                hook.load_state_dict(states[key])
            elif hook.state_dict():
                logger.warning(
                    "The checkpoint has no state for the hook %r: it starts with its defaults",
                    key,
                )


def _acts_at(hook: HookBase, event: str) -> bool:
    return getattr(getattr(hook, event), "__func__", None) is not getattr(
        HookBase, event
    )


def _warn_of_misspelt_events(kind: type[HookBase]) -> None:
    own = sorted(set(dir(kind)) - set(dir(HookBase)))
    for name in (n for n in own if n[0] != "_" and callable(getattr(kind, n))):
        hint = did_you_mean(name, EVENTS)
        if name.startswith("on_") or "did you mean" in hint:
            logger.warning(
                "%s.%s is no event of a trainer%s", kind.__qualname__, name, hint
            )
