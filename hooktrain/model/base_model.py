"""The base class of models that own their training step, and that of their preprocessors."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from hooktrain.model.losses import parse_losses
from hooktrain.utils.tensors import to_device

# The values of a step to log.
Values: TypeAlias = dict[str, Tensor]


class BaseDataPreprocessor(nn.Module):
    """Moves a batch to the device of the preprocessor.

    ``to``, ``cuda``, ``cpu`` and so on of the model that it is a part of move it too. It has no
    state. Override :meth:`forward` to do more.

    Attributes:
        device: the device that batches are moved to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.get_default_device()

    def cast_data(self, data: Any) -> Any:
        """Move a batch to the device; see :func:`hooktrain.utils.tensors.to_device`."""
        return to_device(data, self.device)

    def forward(self, data: Any, training: bool = False) -> Any:
        """Turn a batch into the arguments of the model's forward.

        Args:
            data: the batch.
            training: whether the batch is for training; it makes a difference in subclasses only.

        Returns:
            A dict of arguments by name, or a list or tuple of arguments. Here it is the batch, on
            the device.
        """
        return self.cast_data(data)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # Every method that moves a module calls this. A buffer would be moved without it, but
        # DistributedDataParallel would broadcast a buffer in every step.
        probe = torch.empty(0, device=self.device)
        self.device = fn(probe).device
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


class BaseModel(nn.Module, ABC):
    """A model with steps for training, validation and test. A subclass defines the forward.

    Example::

        class Classifier(BaseModel):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(64, 10)

            def forward(self, inputs, data_samples=None, mode="tensor"):
                scores = self.linear(inputs)
                if mode == "loss":
                    return {"loss": F.cross_entropy(scores, data_samples)}
                if mode == "predict":
                    return scores.argmax(1)
                return scores

    Each method may be overridden. On several ranks a model with its own :meth:`train_step` needs
    :class:`hooktrain.model.SeparateDistributedDataParallel`, or a subclass of
    :class:`hooktrain.model.StepDistributedDataParallel` that has the same step.

    Args:
        data_preprocessor: a module that turns a batch into the arguments of :meth:`forward`. It is
            called with the batch and with whether it is for training. None is
            :class:`BaseDataPreprocessor`.

    Attributes:
        data_preprocessor: the module.
    """

    def __init__(self, data_preprocessor: nn.Module | None = None) -> None:
        super().__init__()
        if data_preprocessor is None:
            data_preprocessor = BaseDataPreprocessor()
        self.data_preprocessor = data_preprocessor

    @abstractmethod
    def forward(
        self, inputs: Any, data_samples: Any = None, mode: str = "tensor"
    ) -> Any:
        """Compute losses, predictions or raw outputs.

        The data preprocessor returns the arguments before ``mode``. A subclass may have others.

        Args:
            inputs: the inputs of a batch.
            data_samples: what belongs to the inputs, such as labels.
            mode: with ``"loss"`` the result is a dict as :meth:`parse_losses` takes it, with
                ``"predict"`` what the evaluator takes, with ``"tensor"`` whatever is useful.
        """

    def train_step(self, data: Any, optim_wrapper: Any) -> Values:
        """Preprocess one batch, compute the losses, and give their sum to the optimizer.

        Preprocessing and forward run inside ``optim_context``, which decides on the precision, and
        on whether the ranks communicate in the next backward pass.

        Args:
            data: a batch of the data loader.
            optim_wrapper: the :class:`hooktrain.solver.OptimWrapper`.

        Returns:
            The values to log, without gradient, on the device.

        Raises:
            TypeError: if the preprocessor returns neither dict, list nor tuple.
        """
        with optim_wrapper.optim_context(self):
            arguments = self.data_preprocessor(data, True)
            losses = self._run_forward(arguments, mode="loss")
        loss, values = self.parse_losses(losses)
        optim_wrapper.update_params(loss)
        return values

    def val_step(self, data: Any) -> Any:
        """Preprocess one batch and predict.

        The evaluation that calls it puts the model into evaluation mode and turns gradients off;
        this method does neither.

        Returns:
            What the forward returns.
        """
        arguments = self.data_preprocessor(data, False)
        return self._run_forward(arguments, mode="predict")

    def test_step(self, data: Any) -> Any:
        """Do what :meth:`val_step` of this class does, also where a subclass overrides that."""
        return BaseModel.val_step(self, data)

    def _run_forward(self, data: Any, mode: str) -> Any:
        # It has MMEngine's name, since models of MMEngine override it.
        if isinstance(data, Mapping):
            return self(**data, mode=mode)
        if isinstance(data, list | tuple):
            return self(*data, mode=mode)
        raise TypeError(
            f"data_preprocessor must return a dict, list or tuple, not {type(data)}"
        )

    def parse_losses(self, losses: Any) -> tuple[Tensor, Values]:
        """Split what the forward returned into the loss and the values to log.

        Args:
            losses: see :func:`hooktrain.model.losses.parse_losses`, which decides what is a loss.

        Returns:
            The loss to go backward from, and all values by name, without gradient; the loss comes
            first, as ``total_loss``.
        """
        loss, values = parse_losses(losses)
        return loss, {name: value.detach() for name, value in values.items()}


def init_weights_once(model: nn.Module) -> nn.Module:
    """Call ``init_weights`` of a model whose attribute ``is_init`` is False, and set it."""
    if getattr(model, "is_init", True) is False:
        model.init_weights()  # type: ignore[operator]
        model.is_init = True  # type: ignore[assignment]
    return model
