"""Trainers with a step, for models that return losses."""

import time
from collections.abc import Callable, Collection, Iterable
from operator import length_hint
from typing import Any

import torch
from torch import Tensor, nn

from hooktrain.data.batches import Batches
from hooktrain.engine.losses import LOOK_AGAIN
from hooktrain.engine.preflight import check_parts, log_size, versions, warn_of_idle
from hooktrain.engine.train_loop import State, TrainerBase
from hooktrain.model import init_weights_once
from hooktrain.model.losses import parse_losses
from hooktrain.model.wrappers import call_model
from hooktrain.solver import as_optim_wrapper
from hooktrain.solver.optim_state import without_schedules
from hooktrain.solver.optim_wrapper_dict import wrappers_by_name
from hooktrain.utils.periods import in_iterations
from hooktrain.utils.tensors import map_leaves, mover_to, non_finite


class ModelTrainer(TrainerBase):
    """What trainers with a step share: a model, its data and its optimizer.

    Args:
        model: the model, which is put into training mode.
        data_loader: an iterable of batches; see :class:`hooktrain.data.batches.Batches`.
        optimizer: a torch optimizer, an :class:`hooktrain.solver.OptimWrapper`, or a dict
            of either.
        gather_metric_period: the ranks exchange metrics every so many iterations, or every
            ``"1 epoch"``. Until then they cannot be read.
        zero_grad_before_forward: free the gradients before the forward pass, not after it.
        async_write_metrics: check the losses at the end of a period, also where it is free
            to check them before each update.

    Attributes:
        optim_wrapper: the wrapper; ``optimizer`` is the torch optimizer inside it.
        updating: in ``after_backward``, the wrapper whose update comes next.

    Raises:
        TypeError: for another model or optimizer.
        ValueError: for a period below 1.
    """

    optim_wrapper: Any  # an OptimWrapper or OptimWrapperDict

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
        log_size(model)  # refuses what is no model
        self.optim_wrapper = self.updating = as_optim_wrapper(optimizer)
        self.optim_wrapper.name_parameters(model)
        length = length_hint(data_loader, 0)
        if length:
            self.epoch_length = -(-length // self.batches_per_step)  # rounded up
        self.sync_period = in_iterations(gather_metric_period, self.epoch_length)
        if self.sync_period < 1:
            raise ValueError(
                "gather_metric_period (train.log_period) must be at least 1, but got "
                f"{gather_metric_period!r}"
            )
        self.model = init_weights_once(model).train()
        self.data_loader = data_loader
        self.zero_grad_before_forward = zero_grad_before_forward
        self.async_write_metrics = async_write_metrics
        # Such as masks: what is not finite when the run begins.
        self._not_finite_before: set[str] | None = None

    @property
    def batches_per_step(self) -> int:
        """How many batches of the loader an iteration takes."""
        return 1

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer. It can be replaced between two runs."""
        return self.optim_wrapper.optimizer  # type: ignore[no-any-return]

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self.optim_wrapper.optimizer = optimizer

    @property
    def data_loader(self) -> Iterable[Any]:
        """The loader."""
        return self._data_loader_iter.loader

    @data_loader.setter
    def data_loader(self, data_loader: Iterable[Any]) -> None:
        # detectron2's name: next(self._data_loader_iter).
        self._data_loader_iter = Batches(data_loader)

    def reset_data_loader(
        self, data_loader_builder: Callable[[], Iterable[Any]]
    ) -> None:
        """Replace the loader. The old one is freed first."""
        self.data_loader = []
        self.data_loader = data_loader_builder()

    def prepare_batch(self, data: Any) -> Any:
        """Bring a batch to the model's device. Override it to do more."""
        return self._move(data)

    def preflight(self) -> None:
        """See that model and optimizers belong together."""
        check_parts(self.model, self.optim_wrapper)

    def begin_steps(self) -> None:
        """Note how things are at first. Start the loader, which may draw random numbers."""
        self._move = mover_to(self.model)  # which may have moved since the last run
        self._not_finite_before = non_finite(self.model.state_dict())
        if self.start_iter < self.max_iter:
            self._data_loader_iter.start()
        wrappers = wrappers_by_name(self.optim_wrapper)
        self._at_first = {name: versions(each) for name, each in wrappers.items()}

    def end_period(self) -> None:
        """Name an optimizer that was idle in the first period."""
        wrappers = wrappers_by_name(self.optim_wrapper)
        for name, before in self._at_first.items():
            warn_of_idle(wrappers[name], name, before)
        self._at_first = {}

    def _check_mode(self) -> None:
        if not self.model.training:
            raise RuntimeError(
                "the model is in evaluation mode: after model.eval() call model.train()"
            )

    def check_weights(self) -> None:
        """Refuse what has become infinite or NaN in this run: weights, the optimizer."""
        if self._not_finite_before is None:  # no run has begun
            return
        saved = dict(self.model.state_dict())

        def add(keys: tuple[Any, ...], leaf: Any) -> None:
            saved[".".join(map(str, keys))] = leaf

        map_leaves(add, self.optim_wrapper.state_dict(), ("optimizer",))
        broken = non_finite(saved) - self._not_finite_before
        if broken:
            raise FloatingPointError(
                f"Infinite or NaN at iteration={self.iter}, and not saved: "
                f"{sorted(broken)[:10]}\n{LOOK_AGAIN}"
            )

    def step_state_dict(self) -> dict[str, Any]:
        """The optimizer, and the position in the data."""
        return {
            "optimizer": self.optim_wrapper.state_dict(),
            "data": self._data_loader_iter.state_dict(),
        }

    def check_step_state(self, state: State, parts: Collection[str]) -> None:
        """Refuse the state of another optimizer or of other data."""
        if "optimizer" in parts:
            if "optimizer" not in state:
                raise ValueError(f"the state has no optimizer, only {sorted(state)}")
            self.optim_wrapper.check_state_dict(state["optimizer"])
        if "data" in parts:
            self._data_loader_iter.check_state_dict(state.get("data", {}))

    def load_step_state(self, state: State, parts: Collection[str]) -> None:
        """Load optimizer and position; without ``"hooks"`` no scheduled settings."""
        if "data" in parts and "data" in state:
            self._data_loader_iter.load_state_dict(state["data"])
        if "optimizer" in parts:
            optimizer = dict(state["optimizer"])
            # detectron2's AMPTrainer keeps it beside the optimizer's state.
            if "grad_scaler" in state:
                optimizer.setdefault("grad_scaler", state["grad_scaler"])
            if "hooks" not in parts:
                optimizer = without_schedules(optimizer)
            self.optim_wrapper.load_state_dict(optimizer)


class SimpleTrainer(ModelTrainer):
    """The training of one model, by one optimizer or several together.

    An iteration is one update, of ``accumulative_counts`` batches. The model takes a batch
    and returns what :func:`hooktrain.model.losses.parse_losses` understands. For another
    loss override :meth:`compute_loss`, for another step :meth:`run_step`.

    The arguments are those of :class:`ModelTrainer`.
    """

    @property
    def batches_per_step(self) -> int:
        """As many as make one update."""
        return self.optim_wrapper.accumulative_counts  # type: ignore[no-any-return]

    def run_step(self) -> None:
        """Batches, losses, gradients, hooks, metrics, update."""
        self._check_mode()
        wrapper = self.optim_wrapper
        losses, data_time = self._accumulate()
        wrapper.unscale_gradients()
        self.after_backward()
        self._write_metrics(losses, data_time)
        wrapper.step()

    def compute_loss(self, data: Any) -> Any:
        """What the model returns for a batch, or for a dict of its arguments.

        Override it for a loss that the model does not compute.
        """
        return call_model(self.model, data)

    def _accumulate(self) -> tuple[dict[str, Tensor], float]:
        """One update's gradients; its mean losses, and the seconds spent on data."""
        wrapper = self.optim_wrapper
        count = wrapper.accumulative_counts
        wrapper.start_accumulation()
        means: dict[str, Tensor] = {}
        data_time = 0.0
        for batch in range(count):
            start = time.perf_counter()
            data = self.prepare_batch(next(self._data_loader_iter))
            data_time += time.perf_counter() - start
            if batch == 0 and self.zero_grad_before_forward:
                wrapper.zero_grad()
            with wrapper.optim_context(self.model):
                loss, losses = parse_losses(self.compute_loss(data))
            if batch == 0 and not self.zero_grad_before_forward:
                wrapper.zero_grad()
            wrapper.backward(wrapper.scale_loss(loss))
            if count == 1:  # nothing to add up, so no copies
                return losses, data_time
            for name, value in losses.items():
                part = value.detach() / count
                means[name] = means[name] + part if name in means else part
        return means, data_time

    def _write_metrics(
        self,
        loss_dict: State,
        data_time: float,
        prefix: str = "",
        iter: int | None = None,
    ) -> None:
        """Record the losses of an iteration, before its update.

        Args:
            loss_dict: losses by name. Their sum becomes ``total_loss``, if none of them is.
            data_time: seconds that the step waited for data.
            prefix: put before each name.
            iter: the iteration; None is the current one.

        Raises:
            FloatingPointError: if the sum is not finite, where that is free to know.
        """
        if prefix:
            loss_dict = {prefix + name: value for name, value in loss_dict.items()}
        self._losses.record(
            self.storage.iter if iter is None else iter,
            loss_dict,
            data_time,
            total=prefix + "total_loss",
            check_now=not self.async_write_metrics,
        )
