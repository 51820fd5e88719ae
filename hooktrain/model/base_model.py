"""The base of models that own their training step."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hooktrain.model.preprocessor import BaseDataPreprocessor
from hooktrain.model.step import parse_losses, predict_step, train_step
from hooktrain.utils.registry import MODELS

__all__ = ["BaseModel"]


class BaseModel(nn.Module, ABC):
    """A model with steps for training, validation and test; a subclass writes the forward.

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

    Each method may be overridden. A model with a :meth:`train_step` of its own is made parallel by
    :class:`~hooktrain.model.SeparateDistributedDataParallel`, or by a subclass of
    :class:`~hooktrain.model.StepDistributedDataParallel` that has it too.

    Args:
        data_preprocessor: turns a batch into the arguments of :meth:`forward`: a module called with
            the batch and whether it is for training; or a dict to build one from, with its
            ``type`` in ``MODELS`` and its arguments. None is :class:`BaseDataPreprocessor`.

    Attributes:
        data_preprocessor: the module.

    Raises:
        TypeError: if ``data_preprocessor`` is something else.
    """

    def __init__(self, data_preprocessor: nn.Module | Mapping[str, Any] | None = None) -> None:
        super().__init__()
        if data_preprocessor is None:
            data_preprocessor = BaseDataPreprocessor()
        elif isinstance(data_preprocessor, Mapping):
            data_preprocessor = MODELS.build(data_preprocessor)
        if not isinstance(data_preprocessor, nn.Module):
            raise TypeError(
                f"data_preprocessor must be a module, a dict to build one from, or None, but got "
                f"{data_preprocessor!r}"
            )
        self.data_preprocessor = data_preprocessor

    @abstractmethod
    def forward(self, inputs: Any, data_samples: Any = None, mode: str = "tensor") -> Any:
        """Compute losses, predictions or raw outputs.

        The arguments before ``mode`` are what the data preprocessor returns, and may be others.

        Args:
            inputs: the inputs of a batch.
            data_samples: what belongs to them, such as labels.
            mode: ``"loss"`` returns a dict as :meth:`parse_losses` takes it; ``"predict"`` returns
                what the evaluator takes; ``"tensor"`` returns whatever is useful.
        """

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        """Train on one batch; see :func:`hooktrain.model.step.train_step`.

        Returns:
            The values to log.
        """
        return train_step(self, data, optim_wrapper)

    def val_step(self, data: Any) -> Any:
        """Predict for one batch; see :func:`hooktrain.model.step.predict_step`."""
        return predict_step(self, data)

    def test_step(self, data: Any) -> Any:
        """Predict for one batch; see :func:`hooktrain.model.step.predict_step`."""
        return predict_step(self, data)

    def parse_losses(self, losses: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss to optimise and the values to log; see :mod:`hooktrain.model.step`."""
        return parse_losses(losses)
