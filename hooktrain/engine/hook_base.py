"""The base class of hooks, which a trainer calls around its steps."""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from hooktrain.utils.file_io import AnyPath
from hooktrain.utils.names import Numbers, State

if TYPE_CHECKING:  # a trainer has hooks, and a hook knows its trainer
    from hooktrain.engine.trainers import ModelTrainer

EVENTS = (
    "before_train",
    "before_step",
    "after_backward",
    "after_step",
    "after_evaluation",
    "after_train",
)

# The hooks run in the order of their phases.
PHASES = ("time", "update", "run", "evaluate", "write", "save", "end")

logger = logging.getLogger(__name__)


class HookBase:
    """The base class of hooks: code that a trainer runs around its steps.

    A subclass overrides the events that it needs::

        hook.before_train()
        for iter in range(start_iter, max_iter):
            hook.before_step()
            trainer.run_step()    # calls hook.after_backward() before the update
            hook.after_step()     # an evaluation calls hook.after_evaluation(results)
        hook.after_train()

    At each event the hooks run in the order of their phases, and within a phase in the order of
    their registration:

    - ``"time"``: timers;
    - ``"update"``: schedules, averages of the weights, statistics of batch norm;
    - ``"run"``: your own hooks, unless they set another phase;
    - ``"evaluate"``: evaluations;
    - ``"write"``: writers of metrics;
    - ``"save"``: checkpoints;
    - ``"end"``: summaries of the run.

    So weights that a hook in ``"run"`` changes, and metrics that it records, are evaluated,
    written and saved in the same iteration. It receives the results in ``after_evaluation``.

    Register a hook on every rank. A hook that only the main process has must not call collectives.

    Attributes:
        trainer: a weak proxy of the trainer. ``register_hooks`` sets it.
        phase: one of the names above.
        key: the hook's name in checkpoints; None takes the name of its class.
        on_every_rank: whether all ranks have the hook; known from ``before_train`` on.
        needs_every_rank: whether the hook calls collectives. A run refuses such a hook if only
            some ranks have it.
    """

    trainer: "ModelTrainer" = cast(Any, None)
    phase: str = "run"
    # The place within the phase: a smaller number comes first. compat/mmengine has priorities.
    _order: int = 50
    key: str | None = None
    on_every_rank: bool = True
    needs_every_rank: bool = False

    def before_train(self) -> None:
        """Called once before the first iteration."""

    def after_train(self) -> None:
        """Called once at the end, even after an error."""

    def before_step(self) -> None:
        """Called before each iteration."""

    def after_backward(self) -> None:
        """Called before each update, once the gradients are computed."""

    def after_step(self) -> None:
        """Called after each iteration."""

    def after_evaluation(self, results: Numbers) -> None:
        """Called after each evaluation, on all ranks with the main process's results.

        Args:
            results: the numbers by their names, such as ``"bbox/AP"``.
        """

    def run_files(self) -> Iterable[AnyPath]:
        """The paths of the files that another machine needs to continue the run.

        Those in the folder of the checkpoints are uploaded to the store with each checkpoint.
        Missing files are skipped; a folder of shards is uploaded whole.
        """
        return ()

    def state_dict(self) -> State:
        """The state that a resumed run needs, in tensors and plain types."""
        return {}

    def check_state_dict(self, state_dict: State) -> None:
        """Raise a ValueError if ``load_state_dict`` could not load a state; change nothing.

        A resume calls it on all hooks, on all ranks, before it loads anything.
        """

    def load_state_dict(self, state_dict: State) -> None:
        """Load what ``state_dict`` returned."""
        logger.warning(
            "%s saves a state but has no load_state_dict, so it starts anew",
            type(self).__qualname__,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the trainer, so that a copy or a pickle does not contain it."""
        return {k: value for k, value in vars(self).items() if k != "trainer"}
