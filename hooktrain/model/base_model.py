"""The base classes of models with their own training step, and of their data preprocessors."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hooktrain.model.losses import Values, parse_losses
from hooktrain.utils.tensors import to_device


class BaseDataPreprocessor(nn.Module):
    """Moves a batch to the device of the model.

    The device follows ``to``, ``cuda``, ``cpu`` and similar calls of the model that contains the
    preprocessor. It has no state. Override :meth:`forward` to do more.

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
            training: whether the batch is for training. Only subclasses use it.

        Returns:
            A dict of arguments by name, or a list or tuple of arguments. This class returns the
            batch, on the device.
        """
        return self.cast_data(data)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # Every method that moves a module calls this one. A buffer would be moved automatically,
        # but DistributedDataParallel would broadcast it in every step.
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

    Each method may be overridden. On several ranks, a model that overrides :meth:`train_step` needs
    :class:`hooktrain.model.SeparateDistributedDataParallel`, or a subclass of
    :class:`hooktrain.model.StepDistributedDataParallel` with the same step.

    Args:
        data_preprocessor: a module that turns a batch into the arguments of :meth:`forward`. It is
            called with the batch and a flag that says whether the batch is for training. None
            takes a :class:`BaseDataPreprocessor`.

    Attributes:
        data_preprocessor: the module.
    """

    def __init__(self, data_preprocessor: nn.Module | None = None) -> None:
        super().__init__()
        self.data_preprocessor = data_preprocessor or BaseDataPreprocessor()

    @abstractmethod
    def forward(
        self, inputs: Any, data_samples: Any = None, mode: str = "tensor"
    ) -> Any:
        """Compute losses, predictions or raw outputs.

        The arguments before ``mode`` come from the data preprocessor. A subclass may have others.

        Args:
            inputs: the inputs of a batch.
            data_samples: the labels or other annotations of the inputs.
            mode: ``"loss"`` returns a dict for :meth:`parse_losses`, ``"predict"`` the predictions
                for the evaluator, and ``"tensor"`` raw outputs of any kind.
        """

    def train_step(self, data: Any, optim_wrapper: Any) -> Values:
        """Preprocess one batch, compute the losses, and update the parameters.

        Preprocessing and forward pass run inside ``optim_context``, which sets the precision, and
        decides whether the ranks exchange gradients in the next backward pass.

        Args:
            data: a batch of the data loader.
            optim_wrapper: the :class:`hooktrain.solver.OptimWrapper`.

        Returns:
            The metrics, without gradient, on the device.

        Raises:
            TypeError: if the preprocessor does not return a dict, list or tuple.
        """
        with optim_wrapper.optim_context(self):
            arguments = self.data_preprocessor(data, True)
            losses = self._run_forward(arguments, mode="loss")
        loss, values = self.parse_losses(losses)
        optim_wrapper.update_params(loss)
        return values

    def val_step(self, data: Any) -> Any:
        """Preprocess one batch and predict.

        The caller puts the model into evaluation mode and turns gradients off; this method does
        neither.

        Returns:
            The predictions, as :meth:`forward` returns them.
        """
        arguments = self.data_preprocessor(data, False)
        return self._run_forward(arguments, mode="predict")

    def test_step(self, data: Any) -> Any:
        """Preprocess one batch and predict, even if a subclass overrides :meth:`val_step`."""
        return BaseModel.val_step(self, data)

    def _run_forward(self, data: Any, mode: str) -> Any:
        # The name is MMEngine's, whose models override this method.
        if isinstance(data, Mapping):
            return self(**data, mode=mode)
        if isinstance(data, list | tuple):
            return self(*data, mode=mode)
        raise TypeError(
            f"data_preprocessor must return a dict, list or tuple, not {type(data)}"
        )

    def parse_losses(self, losses: Any) -> tuple[Tensor, Values]:
        """Split the output of the forward pass into the loss to differentiate and the metrics.

        Args:
            losses: see :func:`hooktrain.model.losses.parse_losses`, which tells losses from other
                metrics.

        Returns:
            The total loss, and all metrics by name, without gradient. The first of these is
            ``total_loss``.
        """
        loss, values = parse_losses(losses)
        return loss, {name: value.detach() for name, value in values.items()}


def init_weights_once(model: nn.Module) -> nn.Module:
    """Call ``init_weights`` of a model whose attribute ``is_init`` is False, and set it."""
    if getattr(model, "is_init", True) is False:
        model.init_weights()  # type: ignore[operator]
        model.is_init = True  # type: ignore[assignment]
    return model
