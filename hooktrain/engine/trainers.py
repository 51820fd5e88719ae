"""Trainers with a step: one update of a model, by its losses or by a step of its own."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from inspect import signature
from operator import length_hint
from typing import Any

import torch
from torch import nn

from hooktrain.data.batches import Batches, warn_of_equal_batches, warn_of_equal_samples
from hooktrain.engine.hook_list import hook_states
from hooktrain.engine.losses import NONFINITE_HINT
from hooktrain.engine.preflight import (
    check_parts,
    log_modes,
    log_units,
    set_modes,
    tell_of_early_gradients,
    trainable,
    warn_of_differences,
    warn_of_lost_calls,
    warn_of_unused_gradients,
    without_masks,
)
from hooktrain.engine.train_loop import TrainerBase
from hooktrain.evaluation.evaluator import computes_together
from hooktrain.model import init_weights_once
from hooktrain.model.losses import parse_losses
from hooktrain.model.wrappers import call_model
from hooktrain.solver import AmpOptimWrapper, OptimWrapper, as_optim_wrapper
from hooktrain.solver.checks import versions, warn_of_idle
from hooktrain.solver.optim_state import without_schedules
from hooktrain.solver.optim_wrapper import weights_over_mean
from hooktrain.solver.optim_wrapper_dict import by_name
from hooktrain.utils.comm import on_all_ranks
from hooktrain.utils.names import State, add_note, check_count, refuse_overrides
from hooktrain.utils.periods import PeriodLike, in_iterations
from hooktrain.utils.tensors import Tensors, mover_to, non_finite, types_of

logger = logging.getLogger(__name__)


class ModelTrainer(TrainerBase):
    """The base of trainers that have a model, its data and its optimizer.

    Args:
        model: the model. If all of it is in evaluation mode, it is put into training mode. Else
            its layers keep their modes, such as a frozen BatchNorm, and the log names those that
            are in evaluation mode.
        data_loader: an iterable of batches; see :class:`hooktrain.data.batches.Batches`. None is
            for steps that make their own data, as in reinforcement learning: each batch is None.
        optimizer: a torch optimizer, an :class:`hooktrain.solver.OptimWrapper`, or a dict
            of several of either by name.
        gather_metric_period: the ranks exchange their metrics every so many iterations, or
            every ``"1 epoch"``. The metrics of a period cannot be read before.
        zero_grad_before_forward: whether the gradients are freed before the forward pass; by
            default they are freed after it.
        async_write_metrics: whether losses are checked at the end of a period only, even if
            it costs nothing to check them before each update.

    Attributes:
        optim_wrapper: the wrapper of the optimizer; ``optimizer`` is the torch optimizer in it.
        updating: the wrapper whose update comes next, for hooks in ``after_backward``.
        losses: this rank's losses of the iteration, for hooks in ``after_backward``; empty where
            the step does not know them before the update, as in :class:`StepTrainer`.
        checkpointer: saves and loads this trainer, if :func:`hooktrain.engine.build_trainer` has
            made it; else None.

    Raises:
        TypeError: if ``model`` is not a module, or ``optimizer`` not an optimizer.
        ValueError: if the period is below 1.
    """

    optim_wrapper: Any  # an OptimWrapper or OptimWrapperDict
    checkpointer: Any = None
    _adds_up = True  # whether the sum of the losses is recorded, as "total_loss"

    def __init__(
        self,
        model: nn.Module,
        data_loader: Iterable[Any] | None,
        optimizer: Any,
        gather_metric_period: PeriodLike = 20,
        zero_grad_before_forward: bool = False,
        async_write_metrics: bool = False,
    ) -> None:
        super().__init__()
        set_modes(model)  # it refuses anything but a module
        self.optim_wrapper = self.updating = as_optim_wrapper(optimizer)
        self.optim_wrapper.name_parameters(model)
        self.data_loader = data_loader
        self.sync_period = in_iterations(gather_metric_period, self.epoch_length)
        check_count("gather_metric_period (train.log_period)", self.sync_period)
        self.model = init_weights_once(model)
        self.losses: State = {}
        self.zero_grad_before_forward = zero_grad_before_forward
        self.async_write_metrics = async_write_metrics

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer. It can be replaced between two runs, not in one."""
        return self.optim_wrapper.optimizer  # type: ignore[no-any-return]

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._refuse_in_run(
            "the optimizer", "the schedules keep theirs, so replace it between two runs"
        )
        self.optim_wrapper.optimizer = optimizer

    @property
    def data_loader(self) -> Any:
        """The loader."""
        return self._data_loader_iter.loader

    @data_loader.setter
    def data_loader(self, data_loader: Any) -> None:
        self._data_loader_iter = Batches(data_loader)  # the name is detectron2's
        self._loader_length = length_hint(data_loader)

    def prepare_batch(self, data: Any) -> Any:
        """Move a batch to the model's device. A subclass may do more."""
        return self._move(data)

    def next_batch(self) -> Any:
        """The next batch, on the model's device: what a ``run_step`` of your own begins with."""
        return self._take(self._data_loader_iter)

    def _take(self, batches: Iterator[Any]) -> Any:
        start = time.perf_counter()
        batch = self.prepare_batch(next(batches))
        self._losses.data_time += time.perf_counter() - start
        return batch

    def before_train(self) -> None:
        """Check that model and optimizers fit, begin the run, and start the loader."""
        check_parts(self.model, self.optim_wrapper)
        trained = trainable(self.model)
        log_modes(self.model)
        super().before_train()
        run = self._run
        # The forward pass of a sharded model exchanges its parameters.
        run.trainable = None if computes_together(self.model) else trained
        self._move = mover_to(self.model)  # the model may have moved since the last run
        run.non_finite = set()
        run.non_finite = self._find_non_finite()
        run.versions = versions(self.optim_wrapper)
        if self.start_iter < self.max_iter:
            log_units(self)
            tell_of_early_gradients(self)
            warn_of_equal_samples(self.data_loader)
            # The loader starts last, since it may draw random numbers as it starts.
            self._data_loader_iter.start()

    def after_step(self) -> None:
        """Exchange metrics, call the hooks, and look for mistakes after each period."""
        run = self._run
        if self.ends_period and run.trainable is not None:
            trained = trainable(self.model)
            if not trained.keys() <= run.trainable.keys():  # new, or frozen before
                run.trainable |= trained
                check_parts(self.model, self.optim_wrapper)
        super().after_step()
        if self.ends_period and run.versions:
            if type(self).run_step.__module__ != __name__:
                warn_of_lost_calls(self)
            warn_of_unused_gradients(self)
            warn_of_idle(self.optim_wrapper, run.versions)
            warn_of_differences(self.model, run.trainable is None)
            warn_of_equal_batches(self._data_loader_iter)
            run.versions = {}

    def _check_mode(self) -> None:
        if self._run.begun is None:
            raise RuntimeError(
                "no run has begun: train() calls run_step(); a loop of your own first calls "
                "before_train()"
            )
        if not self.model.training:
            raise RuntimeError(
                "the model is in evaluation mode: after model.eval() call model.train()"
            )

    def record_losses(self, losses: Mapping[str, Any]) -> None:
        """Record the losses of an iteration: what a ``run_step`` of your own ends with.

        Call it before the update, so that a loss that is not finite changes no weight.

        Args:
            losses: losses by name. Their sum is recorded as ``total_loss``, unless one of them has
                this name, or the trainer is a :class:`StepTrainer`.

        Raises:
            FloatingPointError: if the sum, or a loss of a StepTrainer, is not finite. With several
                ranks or an accelerator it is checked at the end of a period.
        """
        data_time = self._losses.data_time
        self._losses.data_time = 0.0
        self._write_metrics(losses, data_time)

    def _write_metrics(
        self,
        loss_dict: Mapping[str, Any],
        data_time: float,
        prefix: str = "",
        iter: int | None = None,
    ) -> None:
        """Record losses as detectron2's method of this name, which subclasses may override.

        Args:
            loss_dict: see :meth:`record_losses`.
            data_time: the seconds that the step waited for data.
            prefix: is put before each name.
            iter: the iteration; None is the current one.
        """
        if prefix:
            loss_dict = {prefix + name: value for name, value in loss_dict.items()}
        self._losses.record(
            self.storage.iter if iter is None else iter,
            loss_dict,
            data_time,
            total=prefix + "total_loss" if self._adds_up else None,
            check_now=not self.async_write_metrics,
        )

    def prepare_save(self) -> None:
        """Check before a save that everything is finite on every rank. A collective.

        The next :meth:`state_dict` of this iteration does not look at the weights again.

        Raises:
            FloatingPointError: on all ranks, if a loss or a weight of any rank is not finite.
        """
        super().prepare_save()
        # What is broken is found first, since hooks may gather their states.
        on_all_ranks(partial(self._refuse, self._find_non_finite()))
        self._run.confirmed = self.done

    def _find_non_finite(self) -> set[str]:
        """The names of the tensors of a checkpoint that became infinite or NaN in this run.

        They are those of the model, of the optimizer, and of the hooks, such as an average.
        """
        if self._run.non_finite is None:  # no run has begun
            return set()
        saved = {
            **self.model.state_dict(),
            "optimizer": self.optim_wrapper.state_dict(),
            "hooks": hook_states(self._hooks),
        }
        # Host-device synchronisation: one number for all tensors.
        broken = non_finite(saved) - self._run.non_finite
        return without_masks(self.model, broken) if broken else broken

    def _refuse(self, broken: set[str]) -> None:
        if broken:
            raise FloatingPointError(
                f"Infinite or NaN at iteration={self.iter}, and not saved: "
                f"{sorted(broken)[:10]}\n{NONFINITE_HINT}"
            )

    def state_dict(self) -> State:
        """The state of the loop, of the optimizer, and the position in the data.

        Raises:
            FloatingPointError: if a loss was not finite, or if weights are not.
        """
        state = super().state_dict()  # it checks the losses
        if self._run.confirmed != self.done:
            self._refuse(self._find_non_finite())
        self._run.confirmed = -1
        return {
            **state,
            "optimizer": self.optim_wrapper.state_dict(),
            "data": self._data_loader_iter.state_dict(),
        }

    def check_state_dict(self, state_dict: State) -> None:
        """Refuse what :meth:`load_state_dict` could not load; change nothing.

        Raises:
            ValueError: for a hook that is not registered, another optimizer or other data.
        """
        super().check_state_dict(state_dict)
        state = _flat(state_dict)
        if "optimizer" in state:
            self.optim_wrapper.check_state_dict(state["optimizer"])
        if "data" in state:
            self._data_loader_iter.check_state_dict(state["data"])

    def load_state_dict(self, state_dict: State) -> None:
        """Load what :meth:`state_dict` returned; see :meth:`TrainerBase.load_state_dict`."""
        # The base class comes first, since it checks all parts before it loads its own.
        super().load_state_dict(state_dict)
        state = _flat(state_dict)
        if "data" in state:
            self._data_loader_iter.load_state_dict(state["data"])
        if "optimizer" in state:
            optimizer = dict(state["optimizer"])
            # detectron2's AMPTrainer keeps the scaler beside the optimizer's state.
            if "grad_scaler" in state:
                optimizer.setdefault("grad_scaler", state["grad_scaler"])
            if "hooks" not in state:
                optimizer = without_schedules(optimizer)
            self.optim_wrapper.load_state_dict(optimizer)
        else:
            logger.info("The state has no optimizer, so the optimizer keeps its own")


def _flat(state_dict: State) -> State:
    """The state without the nesting of detectron2's DefaultTrainer, whose files load."""
    return {**state_dict.get("_trainer", {}), **state_dict}


class SimpleTrainer(ModelTrainer):
    """Trains a model that returns its losses.

    An iteration is one update, of ``accumulative_counts`` batches. The model takes a batch and
    returns what :func:`hooktrain.model.losses.parse_losses` understands. For another loss override
    :meth:`compute_loss`, for another step :meth:`run_step`. Batches of unequal sizes have a
    :meth:`weight`.

    The arguments are those of :class:`ModelTrainer`.

    Attributes:
        parse_losses: splits what :meth:`compute_loss` returned into the loss and the values to
            record; a function like :func:`hooktrain.model.losses.parse_losses`.
        replay: a function that takes the place of :meth:`compute_gradients`, for hooks that compute
            the gradients of a step more than once; None, if there is none.

    Raises:
        TypeError: when a subclass is defined whose :meth:`compute_loss` does not take one batch.
    """

    parse_losses = staticmethod(parse_losses)
    replay: Callable[[Iterator[Any]], Tensors] | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        try:
            signature(cls.compute_loss).bind("self", "data")
        except TypeError as error:
            raise TypeError(
                f"{cls.__qualname__}.compute_loss must be compute_loss(self, data), which gets a "
                f"batch; the model is self.model: {error}"
            ) from None

    @property
    def batches_per_step(self) -> int:
        """The number of batches that make one update."""
        # Several optimizers each have their own, and a run_step that knows it.
        return getattr(self.optim_wrapper, "accumulative_counts", 1)

    def run_step(self) -> None:
        """One iteration: batches, losses and gradients, then the wrapper's update.

        Between the gradients and the update the wrapper calls the hooks, and the metrics are
        recorded: see :meth:`hooktrain.solver.OptimWrapper.step`.
        """
        self._check_mode()
        compute = self.replay or self.compute_gradients
        losses = compute(self._data_loader_iter)
        wrapper = self.optim_wrapper
        wrapper.after_backward = partial(self._before_update, losses)
        try:
            wrapper.step()
        finally:
            wrapper.after_backward = None

    def compute_loss(self, data: Any) -> Any:
        """The losses of a batch: here what the model returns for it.

        Override it for a loss that the model does not compute.

        Args:
            data: the batch, on the model's device. A dict may hold the model's arguments by name.
        """
        try:
            return call_model(self.model, data)
        except (TypeError, AttributeError, RuntimeError, IndexError) as error:
            add_note(
                error,
                f"the batch is {types_of(data)!r:.300}; labels count from 0. A tuple "
                "is one argument. To call the model in another way, override compute_loss(data) of "
                "the trainer (a model with train_step needs StepTrainer, one of several ranks with "
                "unused parameters create_ddp_model(model, find_unused_parameters=True))",
            )
            raise

    def weight(self, data: Any) -> Any:
        """How much the losses of a batch count among those of the same iteration: here 1.

        If batches have unequal numbers of tokens, boxes or pixels, and the loss is a mean over
        these, return their number. Then the accumulated passes of all ranks give the gradients
        and the losses of one large batch: with ``w`` for the weights of all batches of the
        iteration on all ranks, the loss of the i-th, and what is recorded beside it, is multiplied
        by ``w[i] / mean(w)``, and the means over passes and ranks are taken as without weights.

        The mean must be known before the first backward pass. So the batches of an iteration are
        all taken from the loader first, and the ranks exchange one number, between their hosts.
        None of this happens unless this method is overridden.

        Args:
            data: the batch as the loader gives it, not yet moved to a device.

        Returns:
            A number of at least 0, or a tensor with one element. It may be 0, if the loss is finite
            then. If all weights of an iteration are 0, a warning says so, once a run.
        """
        return 1

    def compute_gradients(self, batches: Iterator[Any]) -> Tensors:
        """Compute the gradients of one update; :meth:`run_step` calls it.

        Args:
            batches: gives ``accumulative_counts`` batches.

        Returns:
            The means of the losses over its batches.
        """
        wrapper = self.optim_wrapper
        count = wrapper.accumulative_counts
        wrapper.start_accumulation()
        if self.zero_grad_before_forward:
            wrapper.zero_grad()
        means: Tensors = {}
        factors: list[float] = []
        if type(self).weight is not SimpleTrainer.weight:
            start = time.perf_counter()
            taken = [next(batches) for _ in range(count)]
            self._losses.data_time += time.perf_counter() - start
            factors = weights_over_mean(map(self.weight, taken))
            batches = iter(taken)
        for batch in range(count):
            data = self._take(batches)
            with wrapper.optim_context(self.model):
                loss, losses = self.parse_losses(self.compute_loss(data))
            if factors:
                loss = loss * factors[batch]
                losses = {name: each * factors[batch] for name, each in losses.items()}
            if batch == 0 and not self.zero_grad_before_forward:
                wrapper.zero_grad()
            wrapper.backward(wrapper.scale_loss(loss))
            if count == 1:  # there is nothing to add up, so nothing is copied
                return losses
            # Divided by a float32, means of losses in bfloat16 or float16 are float32.
            divisor = torch.tensor(count, dtype=torch.float32)
            for name, value in losses.items():
                part = value.detach() / divisor
                means[name] = means[name] + part if name in means else part
        return means

    def _before_update(self, losses: State) -> None:
        """Call the hooks, then record the losses, since a hook may tolerate a NaN among them."""
        self.updating = self.optim_wrapper
        self.losses = losses
        self.after_backward()
        self.losses = {}  # frees their graph
        self.record_losses(losses)


class AMPTrainer(SimpleTrainer):
    """A :class:`SimpleTrainer` in mixed precision, with detectron2's arguments.

    With accumulation or clipping, give an :class:`hooktrain.solver.AmpOptimWrapper` to
    ``SimpleTrainer``. The other arguments are those of :class:`ModelTrainer`.

    Args:
        grad_scaler: the scaler; None makes one for float16.
        precision: ``torch.float16`` or ``torch.bfloat16``.
        log_grad_scaler: record the scale as ``[metric]grad_scaler``.
    """

    def __init__(
        self,
        model: nn.Module,
        data_loader: Iterable[Any] | None,
        optimizer: torch.optim.Optimizer,
        gather_metric_period: PeriodLike = 20,
        zero_grad_before_forward: bool = False,
        grad_scaler: torch.amp.GradScaler | None = None,
        precision: torch.dtype = torch.float16,
        log_grad_scaler: bool = False,
        async_write_metrics: bool = False,
    ) -> None:
        wrapper = AmpOptimWrapper(optimizer, precision, grad_scaler=grad_scaler)
        super().__init__(
            model,
            data_loader,
            wrapper,
            gather_metric_period,
            zero_grad_before_forward,
            async_write_metrics,
        )
        self.grad_scaler = wrapper.grad_scaler
        self.precision = precision
        self.log_grad_scaler = log_grad_scaler

    def after_backward(self) -> None:
        """Record the scale, then call the hooks."""
        if self.log_grad_scaler:
            # A tensor, which nothing waits for; a disabled scaler has none.
            scale = getattr(self.grad_scaler, "_scale", 1.0)
            self.storage.put_scalar("[metric]grad_scaler", scale)
        super().after_backward()


class StepTrainer(ModelTrainer):
    """Trains a model that has a ``train_step(data, optim_wrapper)`` of its own.

    An iteration is one call of this method with one batch. The model decides what is updated,
    how often and by which optimizer, and returns a dict of values to log, or None.
    ``accumulative_counts`` counts calls of ``update_params``, and each update calls the hooks'
    ``after_backward``.

    The arguments are those of :class:`ModelTrainer`. Losses are checked after the update,
    and always before a checkpoint. Gradients are not saved: a resumed run is exact if no
    gradient is carried over from one step to the next.

    Attributes:
        last_batch: the batch of the last step, for hooks.
        last_outputs: the values to log that the last step returned.

    Raises:
        TypeError: when a subclass is defined that overrides what only SimpleTrainer calls.
    """

    _adds_up = False  # which of the values belong together, the model alone knows
    last_batch: Any = None
    last_outputs: Mapping[str, Any] | None = None

    def __init_subclass__(cls) -> None:
        if cls.run_step is StepTrainer.run_step:
            instead = "the model computes and weighs losses in its train_step"
            refuse_overrides(cls, {"compute_loss": instead, "weight": instead})

    @property
    def can_save(self) -> bool:
        """Whether no accumulation is unfinished, since accumulated gradients are not saved."""
        return all(wrapper.should_update() for wrapper in self._wrappers())

    def before_train(self) -> None:
        """Begin the run, and prepare the wrappers. Gradients from before are dropped."""
        super().before_train()
        # As in MMEngine, one call of update_params in each iteration is expected, so the last
        # update may have fewer passes. With several optimizers the number is unknown.
        done = getattr(self.optim_wrapper, "inner_count", 0)
        self.optim_wrapper.initialize_count_status(self.model, done, self.max_iter)
        self.optim_wrapper.zero_grad()
        for wrapper in self._wrappers():
            wrapper.after_backward = partial(self._before_update, wrapper)

    def run_step(self) -> None:
        """Give one batch to the model's own step, and record what it returns."""
        self._check_mode()
        self.last_batch = self.next_batch()
        self.last_outputs = self._call_step(self.last_batch)
        self.record_losses(self.last_outputs)

    def _call_step(self, data: Any) -> Mapping[str, Any]:
        outputs = self.model.train_step(data, self.optim_wrapper)  # type: ignore[operator]
        if outputs is None:
            return {}
        if not isinstance(outputs, Mapping):
            raise TypeError(
                f"train_step must return a dict of values to log: {type(outputs)}"
            )
        return outputs

    def after_train(self) -> None:
        """Release the wrappers, and call the hooks. Warn of gradients that made no update."""
        for wrapper in self._wrappers():
            wrapper.after_backward = None
        if self.succeeded and not self.can_save:
            logger.warning(
                "The run ended inside a gradient accumulation, so its last backward passes "
                "made no update"
            )
        super().after_train()

    def _wrappers(self) -> Iterable[OptimWrapper]:
        return by_name(self.optim_wrapper).values()

    def _before_update(self, wrapper: OptimWrapper) -> None:
        self.updating = wrapper
        self.after_backward()
