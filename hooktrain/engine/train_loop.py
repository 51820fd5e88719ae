"""The loop of iterations: everything else in the package hangs on it."""

import logging
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timezone
from typing import Any

import torch

from hooktrain import __version__
from hooktrain.engine.hook_base import HookBase, HookList
from hooktrain.engine.rank_reports import ReportExchange, hooks_of_some_ranks
from hooktrain.engine.rank_rng import RankRng
from hooktrain.utils import comm
from hooktrain.utils.events import EventStorage

__all__ = ["HookBase", "TrainerBase"]

logger = logging.getLogger(__name__)


class TrainerBase:
    """A loop of iterations with hooks; a subclass defines :meth:`run_step`.

    Attributes:
        iter: the current iteration, counted from 0. ``max_iter`` after a run that came to its end.
        start_iter: the first iteration of the current run.
        max_iter: where the run ends; lowered by an early stop.
        storage: the :class:`~hooktrain.utils.events.EventStorage` that takes the metrics.
        sync_period: after so many iterations, several ranks exchange metrics and requests to stop.
        meta: plain values to keep in every checkpoint, such as the configuration's text.
    """

    sync_period: int = 20

    def __init__(self) -> None:
        self._hook_list = HookList()
        self._begun: list[HookBase] = []
        self.iter = 0
        self.start_iter = 0
        self.max_iter = 0
        self.storage = EventStorage()
        self.meta: dict[str, Any] = {}
        self._finished = 0
        self._stop_request: str | None = None
        self._stop_reason: str | None = None
        self._partial_hooks: frozenset[str] = frozenset()
        self._rng = RankRng()
        self._exchange = ReportExchange()

    def register_hooks(
        self,
        hooks: Iterable[HookBase | None],
        *,
        before: HookBase | type[HookBase] | str | None = None,
        after: HookBase | type[HookBase] | str | None = None,
    ) -> None:
        """Add hooks; the order of registration is the order of execution.

        Args:
            hooks: the hooks, in order. None entries are left out.
            before: place them before this hook: an object, a class or a key.
            after: place them after this hook. At most one of the two may be given.

        Raises:
            TypeError: for something that is not a hook.
            ValueError: for a place that is not there, or two places.
        """
        self._hooks.register(self, hooks, before, after)

    @property
    def _hooks(self) -> HookList:
        return self._hook_list

    @_hooks.setter
    def _hooks(self, hooks: Iterable[HookBase]) -> None:
        # Scripts for detectron2 put its list into another order.
        self._hook_list = HookList()
        self.register_hooks(hooks)

    def describe_hooks(self) -> str:
        """A table of the hooks: who runs at which event, and in which order."""
        return self._hooks.describe()

    def on_every_rank(self, hook: HookBase) -> bool:
        """Whether this hook runs on every rank, so that it may call collectives."""
        return all(
            h is not hook for k, h in self._hooks.by_key().items() if k in self._partial_hooks
        )

    def train(self, start_iter: int | None = None, max_iter: int | None = None) -> None:
        """Run the iterations from ``start_iter`` up to, not including, ``max_iter``.

        Args:
            start_iter: the first iteration. None goes on after the last finished one: from 0 in a
                new trainer, after the loaded state in a resumed one.
            max_iter: where to end. With ``max_iter == start_iter`` nothing is left to do, and only
                ``before_train`` and ``after_train`` run, as at the end of any complete run.

        Raises:
            ValueError: if ``max_iter`` is missing or lies before ``start_iter``.
        """
        start = self._finished if start_iter is None else start_iter
        if max_iter is None:
            raise ValueError("train() needs max_iter, the iteration to end before")
        if not 0 <= start <= max_iter:
            raise ValueError(
                f"start_iter must lie between 0 and max_iter, but start_iter={start!r} "
                f"and max_iter={max_iter!r}"
            )
        logger.info("Starting training from iteration %d", start)
        if start != self._finished:
            self.storage = EventStorage(start)
        self.iter = self.start_iter = self._finished = start
        self.max_iter = max_iter
        self._begun = []
        self._stop_request = self._stop_reason = None
        self._exchange.start(start)
        with self.storage:
            try:
                self.before_train()
                self._run_iterations()
            except BaseException as error:
                if isinstance(error, Exception):
                    logger.exception("Exception during training:")
                # Also where nothing was left to do: iter == max_iter would claim success.
                self.iter = min(self.iter, self.max_iter - 1)
                try:
                    self.after_train()
                except Exception:
                    # The first error is the cause; this one must not hide it.
                    logger.exception("Exception while ending the failed run:")
                raise
            self.after_train()

    def _run_iterations(self) -> None:
        self.synchronize()  # a stop that was asked for before the first step
        self._rng.restore(self.start_iter)
        for iteration in range(self.start_iter, self.max_iter):
            if self._stop_reason is not None:
                self.max_iter = iteration
                self.synchronize()  # the period that the stop cuts short
                break
            self.iter = iteration
            self.before_step()
            self.run_step()
            self._finished = iteration + 1
            self.after_step()
        self.iter = self.max_iter

    def before_train(self) -> None:
        """Compare the hooks of the ranks, then call the hooks."""
        self.storage.iter = self.iter
        if comm.get_world_size() > 1:
            self._partial_hooks = hooks_of_some_ranks(list(self._hooks.by_key()), self.sync_period)
        for hook in self._hooks:
            hook.before_train()
            self._begun.append(hook)

    def after_train(self) -> None:
        """Call every hook whose ``before_train`` ran, whatever happens; the first error wins."""
        self.storage.iter = self.iter
        first: Exception | None = None
        for hook in self._begun:
            try:
                hook.after_train()
            except Exception as error:
                if first is None:
                    first = error
                    # The hooks after it end a failed run: other ranks may wait elsewhere.
                    self.iter = min(self.iter, self.max_iter - 1)
                else:
                    logger.exception("A further hook failed in after_train:")
        if first is not None:
            raise first

    def before_step(self) -> None:
        """Call the hooks; the metrics of this iteration are stamped with its number."""
        self.storage.iter = self.iter
        for hook in self._hook_list.acting_at("before_step"):
            hook.before_step()

    def run_step(self) -> None:
        """One iteration. The subclass defines it, and calls :meth:`after_backward` inside."""
        raise NotImplementedError(f"{type(self).__qualname__} must define run_step")

    def after_backward(self) -> None:
        """Call the hooks between backward and update."""
        for hook in self._hook_list.acting_at("after_backward"):
            hook.after_backward()

    def after_step(self) -> None:
        """Bring the ranks together where the period ends, then call the hooks."""
        done = self.iter + 1
        if done % self.sync_period == 0 or done == self.max_iter:
            self.synchronize()
        for hook in self._hook_list.acting_at("after_step"):
            hook.after_step()

    def request_stop(self, reason: str) -> None:
        """Ask for an early, orderly end of the run, from any hook or rank.

        The current iteration is completed. Then all ranks stop at the same boundary: at once in a
        single process, else at the next exchange, every ``sync_period`` iterations. ``max_iter``
        becomes the number of finished iterations, so the final checkpoint, evaluation and logs
        happen as at any end.
        """
        if self._stop_request is None:
            logger.info("Stop requested at iteration %d: %s", self.iter, reason)
            self._stop_request = reason
        if comm.get_world_size() == 1:
            self._stop_reason = self._stop_request

    @property
    def stop_reason(self) -> str | None:
        """Why the run is ending early, once all ranks agree; None in a run that goes on."""
        return self._stop_reason

    def synchronize(self) -> None:
        """Exchange the ranks' reports. A collective: every rank calls it at the same iteration."""
        if comm.get_world_size() > 1:
            self.merge_reports(self._exchange.exchange(self.rank_report(), self._finished))

    def rank_report(self) -> dict[str, Any]:
        """What this rank tells the others; if a subclass adds entries, all get every report."""
        return {"stop": self._stop_request}

    def merge_reports(self, reports: list[dict[str, Any]]) -> None:
        """Take in what all ranks reported, in the same way on each of them.

        Args:
            reports: in the order of ranks; or one with their means, if they hold nothing but
                metrics of the same names.
        """
        for rank, report in enumerate(reports):
            if report["stop"] is not None and self._stop_reason is None:
                self._stop_reason = report["stop"]
                logger.info("Stopping, as rank %d asked: %s", rank, self._stop_reason)

    def prepare_checkpoint(self) -> None:
        """Fetch what a checkpoint needs from the other ranks. A collective."""
        self.synchronize()
        self._rng.gather()

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, in tensors and plain types.

        ``iteration`` is the last finished iteration, -1 before the first.
        """
        return {
            "iteration": self._finished - 1,
            "hooks": self._hooks.state_dict(),
            "storage": self.storage.state_dict(),
            "rng": self._rng.state_dict(),
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
        """Take back what :meth:`state_dict` gave, so that ``train`` goes on after it.

        Args:
            state_dict: the state. Parts that a file of detectron2 lacks are left as they are.
            only: the names of the parts to load; None loads all.

        Raises:
            ValueError: if the state of a hook would be lost since no such hook is registered, or
                for an unknown name in ``only``.
        """
        chosen = set(self.state_parts() if only is None else only)
        if unknown := chosen - set(self.state_parts()):
            raise ValueError(
                f"unknown parts {sorted(unknown)} of the trainer's state; "
                f"there are {sorted(self.state_parts())}"
            )
        state = {key: value for key, value in state_dict.items() if key in chosen}
        # First, since it is what can refuse: a refused state changes nothing.
        if "hooks" in chosen:
            self._hooks.load_state_dict(state.get("hooks", {}))
        if "iteration" in state:
            self.iter = int(state["iteration"])
            self._finished = self.iter + 1
            self.storage.iter = max(self.iter, 0)
        if "storage" in state:
            self.storage.load_state_dict(state["storage"])
        if "rng" in state:
            self._rng.load_state_dict(state["rng"])

    def state_parts(self) -> list[str]:
        """The names of the parts of the state that can be loaded one by one."""
        return ["iteration", "hooks", "storage", "rng"]
