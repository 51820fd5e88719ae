"""Trainers with a step, for models that return losses."""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from operator import length_hint
from typing import Any

import torch
from torch import Tensor, nn

from hooktrain.engine.batches import Batches
from hooktrain.engine.losses import LOOK_AGAIN, LossRecorder, parse_losses
from hooktrain.engine.preflight import check_parts
from hooktrain.engine.train_loop import TrainerBase
from hooktrain.model import init_weights_once
from hooktrain.model.wrappers import unwrap_model
from hooktrain.solver import (
    AmpOptimWrapper,
    OptimWrapper,
    OptimWrapperDict,
    build_optim_wrapper,
)
from hooktrain.solver.optim_state import parameter_names, without_schedules
from hooktrain.solver.optim_wrapper import wrappers_by_name
from hooktrain.utils.epochs import in_iterations
from hooktrain.utils.tensors import mover_to, non_finite, shard_like

logger = logging.getLogger(__name__)


class ModelTrainer(TrainerBase):
    """What trainers with a step share: a model, its data and its optimizer.

    Args:
        model: the model. It is put into training mode.
        data_loader: an iterable of batches. A finite one starts again when it is exhausted, after
            a call of ``set_epoch`` of its sampler or batch sampler, if there is one.
        optimizer: a torch optimizer, or an :class:`~hooktrain.solver.OptimWrapper` around one; or
            several of either, in a dict or an :class:`~hooktrain.solver.OptimWrapperDict`.
        gather_metric_period: with several ranks, the values of their metrics are brought together
            every so many iterations, or every ``"1 epoch"``. Until then they cannot be read.
        zero_grad_before_forward: free the gradients before the forward pass, not after it.
        async_write_metrics: never check a loss inside the step. On the CPU the loss is checked
            before each update by default. With this it is checked at the end of the period, as
            it always is on accelerators and with several ranks.

    Attributes:
        optim_wrapper: the wrapper; ``optimizer`` is the torch optimizer inside it.
        updating: in ``after_backward``, the wrapper whose update comes next.

    Raises:
        TypeError: if ``model`` is no module, or ``optimizer`` is neither a torch optimizer nor a
            wrapper, or is several for a step that makes one update.
        ValueError: for a period below 1.
    """

    state_parts = (*TrainerBase.state_parts, "optimizer", "data")
    optim_wrapper: (
        Any  # OptimWrapper; where a model owns its step also OptimWrapperDict
    )

    def __init__(
        self,
        model: nn.Module,
        data_loader: Iterable[Any],
        optimizer: Any,
        gather_metric_period: int | str = 20,
        zero_grad_before_forward: bool = False,
        async_write_metrics: bool = False,
    ) -> None:
        super().__init__()
        unwrap_model(model)  # refuses what is no model
        optimizer = build_optim_wrapper(None, optimizer)
        is_simple = (
            getattr(self, "_kind", type(self)).run_step is SimpleTrainer.run_step
        )
        if is_simple and isinstance(optimizer, OptimWrapperDict):
            raise TypeError(
                "SimpleTrainer has one optimizer: for several take StepTrainer"
            )
        if self.epoch_length is None and (length := length_hint(data_loader, 0)):
            self.epoch_length = -(
                -length // (optimizer.accumulative_counts if is_simple else 1)
            )
        self.sync_period = in_iterations(gather_metric_period, self.epoch_length)
        if self.sync_period < 1:
            text = f"gather_metric_period must be at least 1, but got {gather_metric_period!r}"
            raise ValueError(f"{text} (train.log_period)")
        self.model = init_weights_once(model).train()
        self._batches = Batches(data_loader)
        self.optim_wrapper = self.updating = optimizer
        optimizer.name_parameters(model)
        self.zero_grad_before_forward = zero_grad_before_forward
        self.async_write_metrics = async_write_metrics
        self._losses = LossRecorder(check_at_once=not async_write_metrics)
        self._move: Callable[[Any], Any] | None = None
        self._meant_so: set[str] | None = (
            None  # such as masks: not finite when the run began
        )

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer. Another one can take its place between two runs."""
        return self.optim_wrapper.optimizer  # type: ignore[no-any-return]

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if self._begun is not None:
            raise RuntimeError(
                "replace the optimizer between two runs: schedules hold this one"
            )
        self.optim_wrapper.optimizer = optimizer

    @property
    def data_loader(self) -> Iterable[Any]:
        """The loader. Another one is used from the next batch on."""
        return self._batches.loader

    @data_loader.setter
    def data_loader(self, data_loader: Iterable[Any]) -> None:
        self._batches = Batches(data_loader)

    @property
    def _data_loader_iter(self) -> Batches:
        return (
            self._batches
        )  # detectron2's name, for steps of your own: next(...) of it

    def reset_data_loader(
        self, data_loader_builder: Callable[[], Iterable[Any]]
    ) -> None:
        """Replace the loader during training. The old one is freed before the new one is built.

        Args:
            data_loader_builder: makes the new loader.
        """
        self.data_loader = []
        self.data_loader = data_loader_builder()

    def _prepare(self) -> None:
        """See that the parts belong together."""
        check_parts(self)

    def before_train(self) -> None:
        """Call the hooks, then start the loader: starting some loaders draws random numbers."""
        super().before_train()
        self._meant_so = non_finite(self.model.state_dict())
        self._move = None  # the model may have been moved between two runs
        if self.start_iter < self.max_iter:
            self._batches.start()

    def prepare_batch(self, data: Any) -> Any:
        """Bring a batch to the model's device; see :func:`~hooktrain.utils.tensors.mover_to`.

        Override it to do more. A ``run_step`` of your own decides by itself whether to call it.
        """
        self._move = self._move or mover_to(self.model)
        return self._move(data)

    def _check_mode(self) -> None:
        if not self.model.training:
            raise RuntimeError(
                "the model is in evaluation mode; whoever called model.eval() during training "
                "must call model.train() afterwards"
            )

    def tolerate_losses(self) -> None:
        """Let the losses of this iteration be infinite or NaN, since no update is made of them.

        For a hook, at the latest in ``after_backward``, and on all ranks alike.
        """
        self._losses.tolerate(self.iter)

    def _check_finite(self) -> None:
        self._losses.check(self.storage, self._finished)
        if self._meant_so is None:  # no run has begun
            return
        if broken := non_finite(self.model.state_dict()) - self._meant_so:
            iteration = self._finished - 1
            raise FloatingPointError(
                f"Weights or buffers became infinite or NaN at or before iteration={iteration}, "
                f"and are not saved: {sorted(broken)[:10]}\n{LOOK_AGAIN}"
            )

    def state_dict(self) -> dict[str, Any]:
        """That of :class:`TrainerBase`, with the optimizer and the position in the data.

        Raises:
            FloatingPointError: if a loss was not finite, or a parameter or buffer of the model's
                state is not that was so when the run began.
        """
        return {
            **super().state_dict(),
            "optimizer": self.optim_wrapper.state_dict(),
            "data": self._batches.state_dict(),
        }

    def load_state_dict(
        self, state_dict: Mapping[str, Any], *, only: Collection[str] | None = None
    ) -> None:
        """Load what :meth:`state_dict` returned; the states of detectron2's trainers load too.

        Without ``"hooks"`` schedules begin anew. Then learning rates and whatever else was
        scheduled are not loaded with the optimizer.

        Raises:
            ValueError: see :meth:`TrainerBase.load_state_dict`; also if the state has no
                optimizer though it was to be loaded, or belongs to other data.
        """
        # detectron2's DefaultTrainer nests an inner trainer's state.
        state = {**state_dict.get("_trainer", {}), **state_dict}
        chosen = set(self.state_parts if only is None else only)
        if "optimizer" in chosen and "optimizer" not in state:
            raise ValueError(
                f"there is no optimizer in the state, only {sorted(state)}"
            )
        if (
            "data" in chosen
        ):  # first, since other data is refused: then nothing has changed
            begun = state.get("iteration", -1) >= 0
            self._batches.load_state_dict(state.get("data", {}), begun=begun)
        super().load_state_dict(state, only=only)
        if "optimizer" in chosen:
            # detectron2's AMPTrainer keeps the scaler's state beside the optimizer's.
            scaler = (
                {"grad_scaler": state["grad_scaler"]} if "grad_scaler" in state else {}
            )
            optimizer = {**scaler, **state["optimizer"]}
            if "hooks" not in chosen:  # schedules that begin anew
                optimizer = without_schedules(optimizer)
            self.optim_wrapper.load_state_dict(optimizer)


class SimpleTrainer(ModelTrainer):
    """The training of one model by one optimizer.

    An iteration is one update: it takes a batch from the loader (``accumulative_counts`` batches
    where the wrapper accumulates), computes the losses, goes backward and updates. The model, in
    training mode, takes what the loader yields and returns a loss, or a dict of losses to add up,
    perhaps with metrics beside them: :func:`~hooktrain.engine.losses.parse_losses` has the rule.

    For anything else write a subclass with your own :meth:`run_step`. The arguments are those of
    :class:`ModelTrainer`.
    """

    def run_step(self) -> None:
        """Batches, losses, gradients, hooks, metrics, update."""
        self._check_mode()
        wrapper = self.optim_wrapper
        losses, data_time = self._accumulate()
        wrapper.unscale_gradients()
        self.after_backward()
        self._write_metrics(losses, data_time)
        wrapper.step()

    def _accumulate(self) -> tuple[dict[str, Tensor], float]:
        """The gradients of one update: mean losses of its batches, and seconds spent on data."""
        wrapper = self.optim_wrapper
        count = wrapper.accumulative_counts
        wrapper.start_accumulation()
        means: dict[str, Tensor] = {}
        data_time = 0.0
        for batch in range(count):
            start = time.perf_counter()
            data = self.prepare_batch(next(self._batches))
            data_time += time.perf_counter() - start
            if batch == 0 and self.zero_grad_before_forward:
                wrapper.zero_grad()
            with wrapper.optim_context(self.model):
                loss, losses = parse_losses(self.model(data))
            if batch == 0 and not self.zero_grad_before_forward:
                wrapper.zero_grad()
            wrapper.backward(wrapper.scale_loss(loss))
            if count == 1:
                return losses, data_time
            for name, value in losses.items():
                part = value.detach() / count
                means[name] = means[name] + part if name in means else part
        return means, data_time

    def _write_metrics(
        self,
        loss_dict: Mapping[str, Any],
        data_time: float,
        prefix: str = "",
        iter: int | None = None,
    ) -> None:
        """Record the losses of an iteration. Call it once in a step of your own, before the update.

        Args:
            loss_dict: losses by name. Their sum is recorded as ``total_loss``, unless that is one
                of them.
            data_time: seconds that the step waited for data.
            prefix: put before each name.
            iter: the iteration; None is the current one.

        Raises:
            FloatingPointError: if the sum is not finite, where it costs nothing to know.
            ValueError: for a name that the trainer itself writes.
        """
        if prefix:
            loss_dict = {prefix + name: value for name, value in loss_dict.items()}
        iteration = self.iter if iter is None else iter
        self._losses.record(
            self.storage, iteration, loss_dict, data_time, prefix + "total_loss"
        )


class AMPTrainer(SimpleTrainer):
    """A :class:`SimpleTrainer` in mixed precision.

    It wraps the optimizer in an :class:`~hooktrain.solver.AmpOptimWrapper`. Give such a wrapper
    to ``SimpleTrainer`` for accumulation or clipping.

    Args:
        grad_scaler: the scaler; None makes one where ``precision`` is float16.
        precision: ``torch.float16`` or ``torch.bfloat16``.
        log_grad_scaler: record the scale at each iteration, as ``[metric]grad_scaler``. It costs
            a host-device synchronisation.

    The other arguments are those of :class:`ModelTrainer`.
    """

    def __init__(
        self,
        model: nn.Module,
        data_loader: Iterable[Any],
        optimizer: torch.optim.Optimizer,
        gather_metric_period: int | str = 20,
        zero_grad_before_forward: bool = False,
        grad_scaler: torch.amp.GradScaler | None = None,
        precision: torch.dtype = torch.float16,
        log_grad_scaler: bool = False,
        async_write_metrics: bool = False,
    ) -> None:
        wrapper = AmpOptimWrapper(
            optimizer, precision, loss_scale=grad_scaler or "dynamic"
        )
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


class StepTrainer(ModelTrainer):
    """The training of a model with ``train_step(data, optim_wrapper)``.

    An iteration is one call of it with one batch. The model decides what is updated, how often and
    by which optimizer; it returns a dict of values to log, or None. ``accumulative_counts`` counts
    calls of ``update_params``, and the hooks' ``after_backward`` runs in each update.

    A model that returns both ``loss`` and ``log_vars``, as those for MMCV's runner do, has left the
    update to the trainer.

    The arguments are those of :class:`ModelTrainer`. The check for losses that are not finite comes
    after the update, and always before a checkpoint.

    Attributes:
        last_batch: the batch of the last step, for hooks.
        last_outputs: the values to log that it returned.
    """

    last_batch: Any = None
    last_outputs: Mapping[str, Any] | None = None
    _gradients: Mapping[str, Tensor] | None = (
        None  # of a checkpoint, for the first step
    )

    def _wrappers(self) -> Mapping[str, OptimWrapper]:
        return wrappers_by_name(self.optim_wrapper)

    @property
    def can_save(self) -> bool:
        """Whether no gradients are being accumulated: they are not saved."""
        return all(wrapper.should_update() for wrapper in self._wrappers().values())

    def state_dict(self) -> dict[str, Any]:
        """That of :class:`ModelTrainer`, and the gradients that live on after ``train_step``.

        The next backward passes add to them, unless it begins with ``optim_wrapper.zero_grad()``.
        To keep them out of checkpoints, end ``train_step`` with that.
        """
        state = super().state_dict()
        # Their after_backward is set while this trainer makes the steps.
        if self.can_save and any(
            wrapper.after_backward for wrapper in self._wrappers().values()
        ):
            names = parameter_names(self.model)
            state["gradients"] = {
                n: p.grad for p, n in names.items() if p.grad is not None
            }
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], *, only: Collection[str] | None = None
    ) -> None:
        """Load what :meth:`state_dict` returned; see :class:`ModelTrainer`."""
        super().load_state_dict(state_dict, only=only)
        if only is None or "optimizer" in only:
            self._gradients = state_dict.get("gradients")

    def run_step(self) -> None:
        """One batch for the model's own step."""
        self._check_mode()
        is_first = self.iter == self.start_iter
        if is_first:
            self._begin_run()
            counts = {name: w.inner_count for name, w in self._wrappers().items()}
        start = time.perf_counter()
        self.last_batch = data = next(self._batches)
        data_time = time.perf_counter() - start
        self.last_outputs = outputs = self._call_step(data)
        if is_first and all(
            w.inner_count == counts[name] for name, w in self._wrappers().items()
        ):
            logger.warning(
                "train_step has not called update_params: nothing may be trained"
            )
        self._losses.record(self.storage, self.iter, outputs, data_time, total=None)

    def _begin_run(self) -> None:
        """Set the wrappers up. What a step that broke off has left is forgotten."""
        self.optim_wrapper.initialize_count_status(self.model, self.iter, self.max_iter)
        self.optim_wrapper.zero_grad()
        loaded, self._gradients = self._gradients or {}, None
        for parameter, name in parameter_names(self.model).items():
            if name in loaded:
                parameter.grad = shard_like(
                    loaded[name].to(parameter.device), parameter
                )
        for wrapper in self._wrappers().values():
            wrapper.after_backward = partial(self._before_update, wrapper)

    def _call_step(self, data: Any) -> Mapping[str, Any]:
        outputs = self.model.train_step(data, self.optim_wrapper)  # type: ignore[operator]
        if outputs is None:
            return {}
        if not isinstance(outputs, Mapping):
            raise TypeError(
                f"train_step must return a dict of values to log: {type(outputs)}"
            )
        if "log_vars" not in outputs:
            return outputs
        # What MMCV's runner and its optimizer hook do after a model's train_step.
        log_vars = dict(outputs["log_vars"])
        if "loss" in outputs:
            self.optim_wrapper.update_params(outputs["loss"])
            log_vars.setdefault("loss", outputs["loss"])
        return log_vars

    def _before_update(self, wrapper: OptimWrapper) -> None:
        self.updating = wrapper
        self.after_backward()

    def after_train(self) -> None:
        """Call the hooks; say so if the last accumulation made no update."""
        try:
            super().after_train()
        finally:
            for wrapper in self._wrappers().values():
                wrapper.after_backward = None
        if self.succeeded and not self.can_save:
            logger.warning(
                "The run ended inside of an accumulation: its last backward passes made no "
                "update, and are lost"
            )
