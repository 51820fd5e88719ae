"""The base of models that own their training step, and of what prepares their data."""

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
    """Moves a batch to the device where the preprocessor is.

    It moves with the model that it is a part of, by ``to``, ``cuda``, ``cpu`` and so on.
    It has no state. Override :meth:`forward` to do more.

    Attributes:
        device: where batches are moved to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.get_default_device()

    def cast_data(self, data: Any) -> Any:
        """Move a batch; its containers are copied. See hooktrain.utils.tensors.to_device."""
        return to_device(data, self.device)

    def forward(self, data: Any, training: bool = False) -> Any:
        """Turn a batch into the arguments of the model's forward.

        Args:
            data: the batch.
            training: whether it is for training. Subclasses may care.

        Returns:
            A dict of arguments by name, or a list or tuple of arguments. Here it is the
            batch, on the device.
        """
        return self.cast_data(data)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # Everything that moves a module calls this. A buffer would know its device too,
        # but DistributedDataParallel would broadcast it in every step.
        probe = torch.empty(0, device=self.device)
        self.device = fn(probe).device
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


class BaseModel(nn.Module, ABC):
    """A model with steps for training, validation and test. A subclass has the forward.

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

    Each method may be overridden. A model with its own :meth:`train_step` needs
    :class:`hooktrain.model.SeparateDistributedDataParallel` on several ranks, or a
    subclass of :class:`hooktrain.model.StepDistributedDataParallel` that has this step
    too.

    Args:
        data_preprocessor: turns a batch into the arguments of :meth:`forward`: a module
            called with the batch and whether it is for training. None is
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

        The arguments before ``mode`` are what the data preprocessor returns, and may be
        others.

        Args:
            inputs: the inputs of a batch.
            data_samples: what belongs to them, such as labels.
            mode: ``"loss"`` returns a dict as :meth:`parse_losses` takes it;
                ``"predict"`` returns what the evaluator takes; ``"tensor"`` returns
                whatever is useful.
        """

    def train_step(self, data: Any, optim_wrapper: Any) -> Values:
        """One batch: preprocess it, compute the losses, and give their sum to the optimizer.

        Preprocessing and forward are inside the context that decides on the precision,
        and if ranks communicate in the backward pass that follows.

        Args:
            data: a batch, as the data loader gives it.
            optim_wrapper: the :class:`hooktrain.solver.OptimWrapper`.

        Returns:
            The values to log, without gradient and on the device.

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

        It neither changes the model's mode nor turns gradients off: the evaluation
        around it does.

        Returns:
            What the forward returns.
        """
        arguments = self.data_preprocessor(data, False)
        return self._run_forward(arguments, mode="predict")

    def test_step(self, data: Any) -> Any:
        """The same as :meth:`val_step`, whatever a subclass makes of that."""
        return BaseModel.val_step(self, data)

    def _run_forward(self, data: Any, mode: str) -> Any:
        # MMEngine's name: models override it.
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
        to_log = {"total_loss": loss, **values}
        return loss, {name: value.detach() for name, value in to_log.items()}


def init_weights_once(model: nn.Module) -> nn.Module:
    """Call ``init_weights`` of a model whose ``is_init`` says that it was not called."""
    if getattr(model, "is_init", True) is False:
        model.init_weights()  # type: ignore[operator]
        model.is_init = True  # type: ignore[assignment]
    return model
