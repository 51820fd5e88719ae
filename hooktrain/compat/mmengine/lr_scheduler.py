"""The hook that steps MMEngine's schedulers."""

from typing import Any

from torch.optim import Optimizer

from hooktrain.compat.mmengine.hook import PRIORITIES
from hooktrain.compat.mmengine.param_scheduler import adapted
from hooktrain.engine import hooks
from hooktrain.engine.hooks.evaluation import log_missing_evaluations


class LRScheduler(hooks.LRScheduler):
    """:class:`hooktrain.engine.hooks.LRScheduler` that also steps MMEngine's schedulers.

    A scheduler with ``by_epoch`` steps at the end of each epoch, any other after each iteration.
    mmengine's ``ReduceOnPlateauLR`` also steps after each evaluation that returns its ``monitor``.
    As in MMEngine the hook has a low priority: your hooks see the learning rate of this iteration.

    Args:
        args: see the base class. ``scheduler`` may be the result of
            :func:`build_param_scheduler`; a list may mix all kinds of schedulers.
        kwargs: see the base class.
    """

    phase = "run"
    _order = PRIORITIES["LOW"]

    def before_step(self) -> None:
        """Record the rates of this iteration now, since hooks may change them before its end."""
        super()._record_rates()

    def _record_rates(self) -> None:
        pass  # done already

    def begin(self, scheduler: Any, optimizer: Optimizer) -> Any:
        """Decide when a schedule steps."""
        if not hasattr(scheduler, "param_name"):  # the core's or torch's
            return super().begin(scheduler, optimizer)
        scheduler.__class__ = adapted(type(scheduler))
        self.drive(scheduler, optimizer, scheduler.param_name)
        if getattr(scheduler, "need_val_args", False):  # it reduces on a plateau
            metric = scheduler.monitor
            log_missing_evaluations(self, metric)
            self._watched.append(
                (metric, lambda value: scheduler.step({metric: value}))
            )
        self.step_every(scheduler, scheduler.by_epoch)
        return scheduler
