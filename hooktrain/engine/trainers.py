"""Trainers of a model that returns its losses, or that has its own training step."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from inspect import signature
from operator import length_hint
from typing import Any

import torch
from torch import nn

from hooktrain.data.batches import (
    Batches,
    warn_about_equal_batches,
    warn_about_equal_samples,
)
from hooktrain.engine.hook_list import hook_states
from hooktrain.engine.losses import NONFINITE_HINT
from hooktrain.engine.preflight import (
    check_accumulation,
    check_parts,
    log_iteration_size,
    log_metrics_that_differ,
    log_modes,
    log_unsaved_attributes,
    log_zero_gradients,
    set_modes,
    trainable,
    unsaved_attributes,
    warn_about_calls_in_loss,
    warn_about_missing_calls,
    warn_about_rank_differences,
    warn_about_untrained_modules,
    without_masks,
)
from hooktrain.engine.train_loop import TrainerBase
from hooktrain.evaluation.evaluator import computes_together
from hooktrain.model import init_weights_once
from hooktrain.model.losses import parse_losses
from hooktrain.model.wrappers import call_model
from hooktrain.solver import AmpOptimWrapper, OptimWrapper, as_optim_wrapper
from hooktrain.solver.checks import versions, warn_about_idle_optimizers
from hooktrain.solver.optim_state import without_schedules
from hooktrain.solver.optim_wrapper import weights_over_mean
from hooktrain.solver.optim_wrapper_dict import by_name
from hooktrain.utils.comm import on_all_ranks
from hooktrain.utils.names import State, add_note, check_count, refuse_overrides
from hooktrain.utils.periods import PeriodLike, in_iterations
from hooktrain.utils.tensors import Tensors, mover_to, non_finite, types_of

logger = logging.getLogger(__name__)


class ModelTrainer(TrainerBase):
    """The base class of trainers with a model, its data and its optimizer.

    Args:
        model: the model. If it is entirely in evaluation mode, it is put into training mode.
            Otherwise each layer keeps its mode, such as a frozen BatchNorm, and the log names the
            layers in evaluation mode.
        data_loader: an iterable of batches; see :class:`hooktrain.data.batches.Batches`. Give None
            if the step makes its own data, as in reinforcement learning; each batch is then None.
        optimizer: a torch optimizer, an :class:`hooktrain.solver.OptimWrapper`, or a dict
            of either by name.
        gather_metric_period: the period in which the ranks exchange metrics, in iterations or as
            ``"1 epoch"``. The metrics of a period cannot be read before it ends.
        zero_grad_before_forward: whether to free the gradients before the forward pass rather than
            after it.
        async_write_metrics: whether to check losses only at the end of a period, even if checking
            them before each update would cost nothing.

    Attributes:
        optim_wrapper: the wrapper of the optimizer; ``optimizer`` is the torch optimizer in it.
        updating: the wrapper that is about to update, for hooks in ``after_backward``.
        losses: this rank's losses of the iteration, for hooks in ``after_backward``; empty if the
            step does not know them before the update, as in :class:`StepTrainer`.
        checkpointer: the Checkpointer that :func:`hooktrain.engine.build_trainer` built for this
            trainer; else None.

    Raises:
        TypeError: if ``model`` is not a module, or ``optimizer`` is not an optimizer.
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
        set_modes(model)  # raises an error unless it is a module
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
        """The torch optimizer. It can be replaced between two runs, but not during one."""
        return self.optim_wrapper.optimizer  # type: ignore[no-any-return]

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._refuse_in_run(
            "the optimizer cannot be set",
            "the schedules use it, so replace it between two runs",
        )
        self.optim_wrapper.optimizer = optimizer

    @property
    def data_loader(self) -> Any:
        """The data loader."""
        return self._data_loader_iter.loader

    @data_loader.setter
    def data_loader(self, data_loader: Any) -> None:
        self._data_loader_iter = Batches(data_loader)  # the name is detectron2's
        self._loader_length = length_hint(data_loader)

    def prepare_batch(self, data: Any) -> Any:
        """Move a batch to the model's device. A subclass may do more."""
        return self._move(data)

    def next_batch(self) -> Any:
        """The next batch, on the model's device. Your own ``run_step`` begins by calling this."""
        return self.prepare_batch(next(self._data_loader_iter))

    def before_train(self) -> None:
        """Check that model and optimizers match, begin the run, and start the loader."""
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
        run.attributes = unsaved_attributes(self.model)
        if self.start_iter < self.max_iter:
            log_iteration_size(self)
            warn_about_calls_in_loss(self)
            warn_about_equal_samples(self.data_loader)
            # The loader starts last, since its start may draw random numbers.
            self._data_loader_iter.start()

    def end_period(self) -> None:
        """Exchange metrics, and check for mistakes. A collective."""
        run = self._run
        if run.trainable is not None:
            trained = trainable(self.model)
            if not trained.keys() <= run.trainable.keys():  # new, or no longer frozen
                run.trainable |= trained
                check_parts(self.model, self.optim_wrapper)
        super().end_period()
        self._data_loader_iter.log_stale_copies()
        if run.versions:
            if type(self).run_step.__module__ != __name__:
                warn_about_missing_calls(self)
            elif run.trainable is not None:
                log_zero_gradients(self.model)
            warn_about_untrained_modules(self)
            warn_about_idle_optimizers(self.model, self.optim_wrapper, run.versions)
            warn_about_rank_differences(self.model)
            log_unsaved_attributes(self.model, run.attributes)
            log_metrics_that_differ(self.storage)
            warn_about_equal_batches(self._data_loader_iter)
            run.versions = {}

    def _check_mode(self) -> None:
        if self._run.begun is None:
            raise RuntimeError(
                "no run has begun: call train() or, in your own loop, before_train() first"
            )
        if not self.model.training:
            raise RuntimeError(
                "the model is in evaluation mode: call model.train() after model.eval()"
            )

    def record_losses(self, losses: Mapping[str, Any]) -> None:
        """Record the losses of an iteration.

        In your own ``run_step``, call it before the update, so that a loss that is not finite
        changes no weights.

        Args:
            losses: losses by name. Their sum is recorded as ``total_loss``, unless one of them has
                this name, or the trainer is a :class:`StepTrainer`.

        Raises:
            FloatingPointError: if the sum, or a loss of a StepTrainer, is not finite. With several
                ranks or on an accelerator, this is checked at the end of a period.
        """
        batches = self._data_loader_iter
        data_time, batches.waited = batches.waited, 0.0
        self._write_metrics(losses, data_time)

    def _write_metrics(
        self,
        loss_dict: Mapping[str, Any],
        data_time: float,
        prefix: str = "",
        iter: int | None = None,
    ) -> None:
        """Record losses. Subclasses may override this method, as in detectron2.

        Args:
            loss_dict: see :meth:`record_losses`.
            data_time: the seconds that the step waited for data.
            prefix: prepended to each name.
            iter: the iteration; None takes the current one.
        """
        if prefix:
            loss_dict = {prefix + name: value for name, value in loss_dict.items()}
        if iter is None:
            iter = self.storage.iter
        total = prefix + "total_loss" if self._adds_up else None
        self._losses.record(
            iter, loss_dict, data_time, total, not self.async_write_metrics
        )

    def prepare_save(self) -> None:
        """Check before a save that everything is finite on every rank. A collective.

        Warn if the ranks have different weights. The next :meth:`state_dict` of this iteration
        does not check the weights again.

        Raises:
            FloatingPointError: on all ranks, if a loss or a weight of any rank is not finite.
        """
        super().prepare_save()
        # Outside on_all_ranks, since the state_dict of a hook may be a collective.
        on_all_ranks(partial(self._refuse, self._find_non_finite()))
        warn_about_rank_differences(self.model)
        self._run.confirmed = self.done

    def _find_non_finite(self) -> set[str]:
        """The names of the tensors to save that became infinite or NaN in this run.

        They are tensors of the model, the optimizer and the hooks, such as averaged weights.
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
                f"Infinite or NaN at iteration={self.iter}, so not saved: "
                f"{sorted(broken)[:10]}\n{NONFINITE_HINT}"
            )

    def state_dict(self) -> State:
        """The state of the loop and of the optimizer, and the position in the data.

        Raises:
            FloatingPointError: if a loss or a weight is not finite.
        """
        state = super().state_dict()  # this checks the losses
        if self._run.confirmed != self.done:
            self._refuse(self._find_non_finite())
        self._run.confirmed = -1
        return {
            **state,
            "optimizer": self.optim_wrapper.state_dict(),
            "data": self._data_loader_iter.state_dict(),
        }

    def check_state_dict(self, state_dict: State) -> None:
        """Refuse a state that :meth:`load_state_dict` could not load; change nothing.

        Raises:
            ValueError: if it belongs to a hook that is not registered, or to another optimizer or
                data.
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
            logger.info(
                "The checkpoint has no optimizer state, so the optimizer keeps its own"
            )


def _flat(state_dict: State) -> State:
    """The state without the nesting that detectron2's DefaultTrainer adds in its files."""
    return {**state_dict.get("_trainer", {}), **state_dict}


class SimpleTrainer(ModelTrainer):
    """Trains a model that returns its losses.

    An iteration is one update, computed from ``accumulative_counts`` batches. The model takes a
    batch and returns an output that :func:`hooktrain.model.losses.parse_losses` accepts. Override
    :meth:`compute_loss` to change the loss, :meth:`run_step` to change the step, and
    :meth:`weight` if batches have unequal sizes.

    The arguments are those of :class:`ModelTrainer`.

    Attributes:
        parse_losses: splits the output of :meth:`compute_loss` into the loss and the values to
            record; a function like :func:`hooktrain.model.losses.parse_losses`.
        replay: a function that is called instead of :meth:`compute_gradients`, for hooks that
            compute the gradients of a step more than once; None for none.

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
                f"{cls.__qualname__}.compute_loss must be compute_loss(self, data), where data is "
                f"a batch; the model is self.model: {error}"
            ) from None

    @property
    def batches_per_step(self) -> int:
        """The number of batches that make one update."""
        # Each of several optimizers has its own count, and only their run_step knows how they
        # share batches.
        return getattr(self.optim_wrapper, "accumulative_counts", 1)

    def run_step(self) -> None:
        """Run one iteration: take batches, compute losses and gradients, and update.

        Before the update the hooks are called and the losses recorded; see
        :meth:`hooktrain.solver.OptimWrapper.step`.
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
        """The losses of a batch; by default, the model's output for it.

        Override it for a loss that the model does not compute itself.

        Args:
            data: the batch, on the model's device. A dict may hold the model's arguments by name.
        """
        try:
            return call_model(self.model, data)
        except Exception as error:
            add_note(
                error,
                f"the batch is {types_of(data)!r:.300}; labels count from 0. A tuple is passed as "
                "one argument. To call the model differently, override the trainer's "
                "compute_loss(data) (a model with train_step needs StepTrainer; with unused "
                "parameters, several ranks need create_ddp_model(model, "
                "find_unused_parameters=True))",
            )
            raise

    def weight(self, data: Any) -> Any:
        """The weight of a batch's losses among those of the same iteration; by default 1.

        If batches have unequal numbers of tokens, boxes or pixels, and the loss is a mean over
        these, return their number. The accumulated passes of all ranks then give the gradients and
        losses of one large batch. If ``w`` holds the weights of all batches of the iteration on
        all ranks, the loss of the i-th batch, and all values recorded with it, are multiplied by
        ``w[i] / mean(w)``, and then averaged over passes and ranks as usual.

        The mean must be known before the first backward pass, so all batches of an iteration are
        taken from the loader first, and the ranks exchange one number, between CPUs. None of this
        happens unless this method is overridden.

        Args:
            data: the batch as the loader returned it, not yet moved to a device.

        Returns:
            A number of at least 0, or a tensor with one element. It may be 0 if the loss is finite
            all the same. If all weights of an iteration are 0, a warning says so, once per run.
        """
        return 1

    def compute_gradients(self, batches: Iterator[Any]) -> Tensors:
        """Compute the gradients of one update; :meth:`run_step` calls it.

        Args:
            batches: the iterator to take ``accumulative_counts`` batches from.

        Returns:
            The losses, averaged over these batches.
        """
        wrapper = self.optim_wrapper
        count = wrapper.accumulative_counts
        wrapper.start_accumulation()
        if self.zero_grad_before_forward:
            wrapper.zero_grad()
        means: Tensors = {}
        factors: list[float] = []
        if type(self).weight is not SimpleTrainer.weight:
            taken = [next(batches) for _ in range(count)]
            factors = weights_over_mean(map(self.weight, taken))
            batches = iter(taken)
        for batch in range(count):
            data = self.prepare_batch(next(batches))
            with wrapper.optim_context(self.model):
                loss, losses = self.parse_losses(self.compute_loss(data))
            if count > 1 and self.iter == self.start_iter and not factors:
                check_accumulation(data, losses, count)
            if factors:
                loss = loss * factors[batch]
                losses = {name: each * factors[batch] for name, each in losses.items()}
            if batch == 0 and not self.zero_grad_before_forward:
                wrapper.zero_grad()
            wrapper.backward(wrapper.scale_loss(loss))
            if count == 1:  # nothing to add up, so nothing is copied
                return losses
            # Division by a float32 makes the means of bfloat16 and float16 losses float32.
            divisor = torch.tensor(count, dtype=torch.float32)
            for name, value in losses.items():
                part = value.detach() / divisor
                means[name] = means[name] + part if name in means else part
        return means

    def _before_update(self, losses: State) -> None:
        """Call the hooks, then record the losses: a hook may have decided to tolerate NaNs."""
        self.updating = self.optim_wrapper
        self.losses = losses
        self.after_backward()
        self.losses = {}  # frees their graph
        self.record_losses(losses)


class AMPTrainer(SimpleTrainer):
    """A :class:`SimpleTrainer` in mixed precision, with detectron2's arguments.

    For accumulation or clipping, pass an :class:`hooktrain.solver.AmpOptimWrapper` to
    ``SimpleTrainer`` instead. The other arguments are those of :class:`ModelTrainer`.

    Args:
        grad_scaler: the scaler; None creates one for float16.
        precision: ``torch.float16`` or ``torch.bfloat16``.
        log_grad_scaler: whether to record the scale as ``[metric]grad_scaler``.
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
            # A tensor, which is not waited for; a disabled scaler has none.
            scale = getattr(self.grad_scaler, "_scale", 1.0)
            self.storage.put_scalar("[metric]grad_scaler", scale)
        super().after_backward()


class StepTrainer(ModelTrainer):
    """Trains a model that has its own ``train_step(data, optim_wrapper)``.

    Each iteration calls this method once, with one batch. The model decides which parameters to
    update, how often and with which optimizer, and returns a dict of values to log, or None.
    ``accumulative_counts`` counts calls of ``update_params``, and each update calls the hooks'
    ``after_backward``.

    The arguments are those of :class:`ModelTrainer`. Losses are checked after the update,
    and always before a checkpoint. Gradients are not saved: a resumed run is exact if no
    gradient is carried over from one step to the next.

    Attributes:
        last_batch: the batch of the last step, for hooks.
        last_outputs: the values that the last step returned for logging.

    Raises:
        TypeError: when a subclass is defined that overrides a method only SimpleTrainer calls.
    """

    _adds_up = False  # only the model knows which of the values add up
    last_batch: Any = None
    last_outputs: Mapping[str, Any] | None = None

    def __init_subclass__(cls) -> None:
        if cls.run_step is StepTrainer.run_step:
            instead = "the model computes and weighs losses in its train_step"
            refuse_overrides(cls, {"compute_loss": instead, "weight": instead})

    @property
    def can_save(self) -> bool:
        """Whether no accumulation is in progress, since accumulated gradients are not saved."""
        return all(wrapper.should_update() for wrapper in self._wrappers())

    def before_train(self) -> None:
        """Begin the run, and prepare the wrappers. Leftover gradients are dropped."""
        super().before_train()
        # As in MMEngine, one call of update_params per iteration is assumed, so the last
        # accumulation may be shorter. With several optimizers the number of calls is unknown.
        done = getattr(self.optim_wrapper, "inner_count", 0)
        self.optim_wrapper.initialize_count_status(self.model, done, self.max_iter)
        self.optim_wrapper.zero_grad()
        for wrapper in self._wrappers():
            wrapper.after_backward = partial(self._before_update, wrapper)

    def run_step(self) -> None:
        """Pass one batch to the model's ``train_step``, and record the values it returns."""
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
                f"train_step must return a dict of values to log, not {type(outputs)}"
            )
        return outputs

    def after_train(self) -> None:
        """Release the wrappers, and call the hooks. Warn about gradients that were not used."""
        for wrapper in self._wrappers():
            wrapper.after_backward = None
        if self.succeeded and not self.can_save:
            logger.warning(
                "The run ended inside a gradient accumulation, so the gradients of its last "
                "backward passes were not used"
            )
        super().after_train()

    def _wrappers(self) -> Iterable[OptimWrapper]:
        return by_name(self.optim_wrapper).values()

    def _before_update(self, wrapper: OptimWrapper) -> None:
        self.updating = wrapper
        self.after_backward()
