"""The hook that steps MMEngine's schedulers."""

from typing import Any

from torch.optim import Optimizer

from hooktrain.compat.mmengine.hook import PRIORITIES
from hooktrain.compat.mmengine.param_scheduler import adapted
from hooktrain.engine import hooks
from hooktrain.engine.hooks.evaluation import tell_without_evaluation


class LRScheduler(hooks.LRScheduler):
    """:class:`hooktrain.engine.hooks.LRScheduler` that also steps MMEngine's schedulers.

    Each of them steps at the end of each epoch if it has ``by_epoch``, else after each iteration.
    A ``ReduceOnPlateauLR`` of mmengine also steps after each evaluation that gives its ``monitor``.
    As in MMEngine the hook has a low priority: hooks of your own see the rate of this iteration.

    Args:
        args: see there. ``scheduler`` may be what :func:`build_param_scheduler` returns; a list
            may have schedulers of all kinds.
        kwargs: see there.
    """

    phase = "run"
    _order = PRIORITIES["LOW"]

    def before_step(self) -> None:
        """Record the rates of this iteration: by the end of it hooks may have changed them."""
        super()._record_rates()

    def _record_rates(self) -> None:
        pass  # done already

    def begin(self, scheduler: Any, optimizer: Optimizer) -> Any:
        """Decide when a schedule steps."""
        if not hasattr(scheduler, "param_name"):  # one of the core's or of torch
            return super().begin(scheduler, optimizer)
        scheduler.__class__ = adapted(type(scheduler))
        self.drive(scheduler, optimizer, scheduler.param_name)
        if getattr(scheduler, "need_val_args", False):  # it reduces on a plateau
            metric = scheduler.monitor
            tell_without_evaluation(self, metric)
            self._watched.append(
                (metric, lambda value: scheduler.step({metric: value}))
            )
        self.step_every(scheduler, scheduler.by_epoch)
        return scheduler
