"""Averages the weights, and measures exact batch-norm statistics."""

import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from hooktrain.checkpoint.loading import load_model_state
from hooktrain.data.batches import Batches
from hooktrain.engine.hook_base import HookBase
from hooktrain.events import EventStorage
from hooktrain.model import BaseAveragedModel, ExponentialMovingAverage, update_bn_stats
from hooktrain.solver.checks import model_mismatch
from hooktrain.utils.names import State
from hooktrain.utils.periods import Period, PeriodLike

logger = logging.getLogger(__name__)


class EMA(HookBase):
    """Updates an average of the model's weights after each iteration.

    The average starts from the weights at the start of training, and is saved as the state of
    this hook. The model itself keeps the raw weights, in checkpoints too. To evaluate or export
    the average::

        ema = hooks.EMA(model)
        with ema.swap():
            evaluate(model)

    To use another average, here stochastic weight averaging at the end of a run::

        hooks.EMA(model, average=StochasticWeightAverage(model, interval=50), begin_iter=1000)

    Args:
        model: the model, which may be wrapped, as by DDP.
        decay: the fraction of the average that an update keeps, in [0, 1).
        warmup: whether the decay starts small and grows, so that the average soon forgets the
            random initial weights.
        average: another average, in place of one with ``decay`` and ``warmup``.
        begin_iter: the number of iterations after which the average is first updated. Until then
            it is a copy of the weights. 0 and 1 are the same.

    Attributes:
        average: the :class:`hooktrain.model.BaseAveragedModel`; ``average.module`` is the
            averaged model.

    Raises:
        ValueError: if ``1 - decay``, the momentum, is not in (0, 1]; when training starts, if
            ``model`` is not the trainer's.
    """

    phase = "update"

    def __init__(
        self,
        model: nn.Module,
        decay: float = 0.999,
        warmup: bool = True,
        *,
        average: BaseAveragedModel | None = None,
        begin_iter: int = 0,
    ) -> None:
        if average is None:
            average = ExponentialMovingAverage(model, 1 - decay, warmup=warmup)
        self._model = model
        self.average = average
        self.begin_iter = begin_iter

    def before_train(self) -> None:
        """Check the model; start from its weights, unless an updated average was loaded."""
        _check_model(self, self._model)
        if not self.average.steps:  # host-device synchronisation, once a run
            self.average.reset(self._model)
        # A warm-up, or an average with equal weights, soon forgets the initial weights.
        average: Any = self.average
        weight = 1.0 if getattr(average, "warmup", True) else average.momentum
        updates = (self.trainer.max_iter - self.begin_iter) / average.interval
        if weight * updates < 0.7:
            logger.warning(
                "The run ends before the average has forgotten the initial weights: lower the "
                "decay or begin_iter (%d), or pass warmup=True",
                self.begin_iter,
            )
        logger.info(
            "Evaluations outside EMA.swap() see the raw weights, and the best model has these "
            "unless its metric is named ema/..."
        )

    def after_step(self) -> None:
        """Update the average with the new weights."""
        if self.trainer.done < self.begin_iter:
            self.average.reset(self._model)
        else:
            self.average.update_parameters(self._model)

    def swap(self) -> AbstractContextManager[None]:
        """A context in which the model has the averaged weights; then its raw ones return."""
        if not (self.average.steps or self.trainer):
            logger.warning(
                "No trainer updates this average, which still has the initial weights: register "
                "the hook, or load the average"
            )
        return self.average.swap(self._model)

    def state_dict(self) -> State:
        """Return the averaged weights and the number of updates."""
        return self.average.state_dict()

    def check_state_dict(self, state_dict: State) -> None:
        """Refuse the average of a model with other parameters."""
        load_model_state(self.average, state_dict, strict=True, check_only=True)

    def load_state_dict(self, state_dict: State) -> None:
        """Load what :meth:`state_dict` returned; a sharded model also accepts whole tensors."""
        load_model_state(self.average, state_dict, strict=True)


class PreciseBN(HookBase):
    """Replaces the running statistics of batch norm by exact ones for the current weights.

    See :func:`hooktrain.model.update_bn_stats`. This matters after few iterations, when the
    initial statistics, a mean of 0 and a variance of 1, still have the weight
    ``(1 - momentum) ** iterations``.

    Args:
        period: in iterations, or like ``"1 epoch"``; 0 measures in the last iteration only.
        model: the model, whose BatchNorm layers in training mode, if any, are measured. None takes
            the trainer's model, which suits configurations.
        data_loader: the batches to measure on. A finite loader starts again when it is exhausted.
            The trainer's own loader is refused if it saves its position.
        num_iter: the number of batches to measure on.

    Raises:
        ValueError: when training starts, if ``model`` is not the trainer's, or if ``data_loader``
            is the trainer's and saves its position.
    """

    needs_every_rank = True
    phase = "update"

    def __init__(
        self,
        period: PeriodLike,
        model: nn.Module | None,
        data_loader: Iterable[Any],
        num_iter: int,
    ) -> None:
        self._period = Period(period)
        self._model: Any = model
        self._batches = Batches(data_loader, "data of PreciseBN")
        self._num_iter = num_iter

    def before_train(self) -> None:
        """Check the model; refuse a loader whose batches training would then miss."""
        if self._model is None:
            self._model = self.trainer.model
        _check_model(self, self._model)
        loader = self._batches.loader
        if loader is self.trainer.data_loader and hasattr(loader, "state_dict"):
            raise ValueError(
                "PreciseBN would advance the trainer's data_loader: build a second one for it"
            )

    def after_step(self) -> None:
        """Measure if a period ends, and in the last iteration."""
        if self._period.is_due_or_last(self.trainer):
            self.update_stats()

    def update_stats(self) -> None:
        """Measure now."""
        logger.info("Measuring batch-norm statistics on %d batches", self._num_iter)
        # Metrics that the model records meanwhile do not belong to the run.
        with EventStorage(self.trainer.iter):
            update_bn_stats(self._model, self._batches, self._num_iter)

    def state_dict(self) -> State:
        """Return the position in the data, if the loader has one."""
        return self._batches.state_dict()

    def check_state_dict(self, state_dict: State) -> None:
        """Let the loader refuse a position in other data."""
        self._batches.check_state_dict(state_dict)

    def load_state_dict(self, state_dict: State) -> None:
        """Load what :meth:`state_dict` returned."""
        self._batches.load_state_dict(state_dict)


def _check_model(hook: HookBase, model: nn.Module) -> None:
    trained = getattr(hook.trainer, "model", model)
    problem = model_mismatch(type(hook).__name__, model.parameters(), trained)
    if problem:
        raise ValueError(problem)
