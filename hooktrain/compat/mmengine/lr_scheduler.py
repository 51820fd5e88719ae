"""The hook that steps MMEngine's schedulers."""

from typing import Any

from torch.optim import Optimizer

from hooktrain.compat.mmengine.param_scheduler import INF, GroupParamScheduler
from hooktrain.compat.mmengine.schedulers import ReduceOnPlateauParamScheduler
from hooktrain.engine import hooks


class LRScheduler(hooks.LRScheduler):
    """:class:`hooktrain.engine.hooks.LRScheduler` that also steps MMEngine's schedulers.

    One of them steps at the end of each epoch if it has ``by_epoch``, else after each iteration.
    One that reduces on a plateau also steps after each new value of its ``monitor``, so register
    this hook after the one that evaluates.

    Args:
        args: see there. ``scheduler`` may be what :func:`build_param_scheduler` returns; a list
            may have schedulers of all kinds.
        kwargs: see there.
    """

    def begin(self, scheduler: Any, optimizer: Optimizer) -> Any:
        """Decide when a schedule steps."""
        if not isinstance(scheduler, GroupParamScheduler):
            return super().begin(scheduler, optimizer)
        self.drive(scheduler, optimizer, scheduler.param_name)
        if isinstance(scheduler, ReduceOnPlateauParamScheduler):
            metric = scheduler.monitor
            self.watch(metric, lambda value: scheduler.step({metric: value}))
            if (scheduler.begin, scheduler.end) == (0, INF):  # it needs no epochs
                return scheduler
        self.step_every(scheduler, scheduler.by_epoch)
        return scheduler
