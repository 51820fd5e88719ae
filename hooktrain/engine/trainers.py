"""Trainers with a step: one loss, one optimizer, and a model that returns its losses."""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hooktrain.engine.batches import Batches
from hooktrain.engine.metrics import LossRecorder, as_loss_dict, sum_losses
from hooktrain.engine.train_loop import TrainerBase
from hooktrain.solver import AmpOptimWrapper, OptimWrapper, OptimWrapperDict

__all__ = ["AMPTrainer", "SimpleTrainer"]

logger = logging.getLogger(__name__)


class SimpleTrainer(TrainerBase):
    """The training of one model by one optimizer.

    An iteration is one update: it takes a batch from the loader (``accumulative_counts`` batches
    where the wrapper accumulates), computes the losses, goes backward and updates. The model, in
    training mode, takes what the loader yields and returns a loss, or a dict of losses to add up.

    For anything else subclass it and write your own :meth:`run_step`.

    Args:
        model: the model. It is put into training mode.
        data_loader: an iterable of batches. A finite one starts again when it is exhausted, after
            a call of ``sampler.set_epoch`` if it has that.
        optimizer: a torch optimizer, or an :class:`~hooktrain.solver.OptimWrapper` around one.
        gather_metric_period: with several ranks, their metrics are brought together every so many
            iterations, all values of the period at once; until then they cannot be read.
        zero_grad_before_forward: free the gradients before the forward pass, not after it.
        async_write_metrics: never wait for a loss inside the step. On the CPU the loss is checked
            before each update by default; with this it is checked at the end of the period, as
            it always is on accelerators and with several ranks.

    Attributes:
        optim_wrapper: the wrapper; ``optimizer`` is the torch optimizer inside it.

    Raises:
        TypeError: if ``optimizer`` is neither a torch optimizer nor a wrapper.
        ValueError: for a period below 1.
    """

    def __init__(
        self,
        model: nn.Module,
        data_loader: Iterable[Any],
        optimizer: torch.optim.Optimizer | OptimWrapper,
        gather_metric_period: int = 20,
        zero_grad_before_forward: bool = False,
        async_write_metrics: bool = False,
    ) -> None:
        super().__init__()
        if gather_metric_period < 1:
            raise ValueError(
                f"gather_metric_period must be at least 1, but got {gather_metric_period!r}"
            )
        model.train()
        self.model = model
        self._batches = Batches(data_loader)
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer = OptimWrapper(optimizer)
        elif not isinstance(optimizer, OptimWrapper | OptimWrapperDict):
            raise TypeError(
                f"optimizer must be a torch optimizer or a wrapper, but got {optimizer!r}"
            )
        self.optim_wrapper = optimizer
        self.sync_period = gather_metric_period
        self.zero_grad_before_forward = zero_grad_before_forward
        self.async_write_metrics = async_write_metrics
        self._losses = LossRecorder(check_at_once=not async_write_metrics)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer."""
        return self.optim_wrapper.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self.optim_wrapper.optimizer = optimizer

    @property
    def data_loader(self) -> Iterable[Any]:
        """The loader; another one is used from the next batch on."""
        return self._batches.loader

    @data_loader.setter
    def data_loader(self, data_loader: Iterable[Any]) -> None:
        self._batches.loader = data_loader

    @property
    def _data_loader_iter(self) -> Batches:
        return self._batches  # detectron2's name, for steps of your own: next(...) of it

    def run_step(self) -> None:
        """Batches, losses, gradients, hooks, metrics, update."""
        self._check_mode()
        wrapper = self.optim_wrapper
        losses, data_time = self._accumulate()
        wrapper.unscale_gradients()
        self.after_backward()
        self._write_metrics(losses, data_time)
        wrapper.step()

    def _check_mode(self) -> None:
        if not self.model.training:
            raise RuntimeError(
                "the model is in evaluation mode; whoever called model.eval() during training "
                "must call model.train() afterwards"
            )

    def _accumulate(self) -> tuple[dict[str, Tensor], float]:
        """The gradients of one update: mean losses of its batches, and seconds spent on data."""
        wrapper = self.optim_wrapper
        wrapper.start_window()
        count = wrapper.accumulative_counts
        means: dict[str, Tensor] = {}
        data_time = 0.0
        for batch in range(count):
            start = time.perf_counter()
            data = next(self._batches)
            data_time += time.perf_counter() - start
            if batch == 0 and self.zero_grad_before_forward:
                wrapper.zero_grad()
            with wrapper.sync_context(self.model):
                with wrapper.precision_context():
                    losses = as_loss_dict(self.model(data))
                    loss = sum_losses(losses)
                if batch == 0 and not self.zero_grad_before_forward:
                    wrapper.zero_grad()
                wrapper.backward(wrapper.scale_loss(loss))
            if count == 1:
                return losses, data_time
            for name, value in losses.items():
                part = value.detach() / count
                means[name] = means[name] + part if name in means else part
        return means, data_time

    def reset_data_loader(self, data_loader_builder: Callable[[], Iterable[Any]]) -> None:
        """Replace the loader during training; the old one is freed before the new one is built.

        Args:
            data_loader_builder: makes the new loader.
        """
        self._batches.replace(data_loader_builder)

    def before_train(self) -> None:
        """Call the hooks, then start the loader before the random state is restored."""
        self._losses.rewind(self.start_iter - 1)
        super().before_train()
        if self.start_iter < self.max_iter:
            self._batches.start()  # starting some loaders draws random numbers

    def _write_metrics(
        self,
        loss_dict: Mapping[str, Any],
        data_time: float,
        prefix: str = "",
        iter: int | None = None,
    ) -> None:
        """Record the losses of an iteration; a step of your own calls it once, before the update.

        Args:
            loss_dict: losses by name. Their sum is recorded as ``total_loss``.
            data_time: seconds that the step waited for data.
            prefix: put before each name.
            iter: the iteration; None is the current one.

        Raises:
            FloatingPointError: if the sum is not finite, where it costs nothing to know.
            ValueError: for a name that the trainer itself writes.
        """
        iteration = self.iter if iter is None else iter
        self._losses.record(self.storage, iteration, loss_dict, data_time, prefix)

    @property
    def updating(self) -> OptimWrapper:
        """In ``after_backward``: the wrapper whose update comes next."""
        return self.optim_wrapper

    def tolerate_losses(self) -> None:
        """Let the losses of this iteration be infinite or NaN, since no update is made of them.

        For a hook, at the latest in ``after_backward``, and on all ranks alike.
        """
        self._losses.tolerate(self.iter)

    def synchronize(self) -> None:
        """Exchange the ranks' metrics and requests, and check the losses of the period."""
        super().synchronize()
        self._losses.check(self.storage)

    def rank_report(self) -> dict[str, Any]:
        """The metrics of the period, beside the requests."""
        return {**super().rank_report(), "metrics": self._losses.take_period()}

    def merge_reports(self, reports: list[dict[str, Any]]) -> None:
        """Record the means over the ranks."""
        super().merge_reports(reports)
        self._losses.merge(self.storage, [report["metrics"] for report in reports])

    def state_dict(self) -> dict[str, Any]:
        """That of :class:`TrainerBase`, with the optimizer and the position in the data.

        Raises:
            FloatingPointError: if a loss was not finite, so that no checkpoint holds its update.
        """
        self._losses.check(self.storage)
        return {
            **super().state_dict(),
            "optimizer": self.optim_wrapper.state_dict(),
            "data": self._batches.state_dict(),
        }

    def state_parts(self) -> list[str]:
        """Those of :class:`TrainerBase`, ``optimizer`` and ``data``."""
        return [*super().state_parts(), "optimizer", "data"]

    def load_state_dict(
        self, state_dict: Mapping[str, Any], *, only: Collection[str] | None = None
    ) -> None:
        """Take back what :meth:`state_dict` gave; detectron2's trainers' states load too.

        Raises:
            ValueError: see :meth:`TrainerBase.load_state_dict`; also if the state has no
                optimizer though it was to be loaded, or belongs to other data.
        """
        # detectron2's DefaultTrainer nests an inner trainer's state.
        state = {**state_dict.get("_trainer", {}), **state_dict}
        chosen = set(self.state_parts() if only is None else only)
        if "optimizer" in chosen and "optimizer" not in state:
            raise ValueError(
                f"the trainer's state has no optimizer, only {sorted(state)}; choose the parts to "
                f"load to go on without it"
            )
        super().load_state_dict(state, only=only)
        if "optimizer" in chosen:
            # detectron2's AMPTrainer keeps the scaler's state beside the optimizer's.
            scaler = {"grad_scaler": state["grad_scaler"]} if "grad_scaler" in state else {}
            self.optim_wrapper.load_state_dict({**scaler, **state["optimizer"]})
        if "data" in chosen:
            self._batches.load_state_dict(state.get("data", {}), begun=self.iter >= 0)
        self._losses.reset(self.iter)


class AMPTrainer(SimpleTrainer):
    """A :class:`SimpleTrainer` in mixed precision.

    It is one whose optimizer is wrapped in an :class:`~hooktrain.solver.AmpOptimWrapper`; give
    that to ``SimpleTrainer`` for accumulation or clipping.

    Args:
        grad_scaler: the scaler; None makes one where ``precision`` is float16.
        precision: ``torch.float16`` or ``torch.bfloat16``.
        log_grad_scaler: record the scale at each iteration, as ``[metric]grad_scaler``. It costs
            a host-device synchronisation.

    The other arguments are those of :class:`SimpleTrainer`.
    """

    def __init__(
        self,
        model: nn.Module,
        data_loader: Iterable[Any],
        optimizer: torch.optim.Optimizer,
        gather_metric_period: int = 20,
        zero_grad_before_forward: bool = False,
        grad_scaler: torch.amp.GradScaler | None = None,
        precision: torch.dtype = torch.float16,
        log_grad_scaler: bool = False,
        async_write_metrics: bool = False,
    ) -> None:
        wrapper = AmpOptimWrapper(optimizer, precision, loss_scale=grad_scaler or "dynamic")
        options = (gather_metric_period, zero_grad_before_forward, async_write_metrics)
        super().__init__(model, data_loader, wrapper, *options)
        self.grad_scaler, self.precision = wrapper.grad_scaler, precision
        self.log_grad_scaler = log_grad_scaler

    def after_backward(self) -> None:
        """Record the scale if asked to, then call the hooks."""
        if self.log_grad_scaler:
            # Host-device synchronisation, at each iteration.
            scale = self.grad_scaler.get_scale()
            self.storage.put_scalar("[metric]grad_scaler", scale)
        super().after_backward()
