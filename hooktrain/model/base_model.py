"""The base of models that own their training step, and that step."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hooktrain.model.preprocessor import BaseDataPreprocessor
from hooktrain.utils.registry import MODELS

logger = logging.getLogger(__name__)


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

    Each method may be overridden. A model with its own :meth:`train_step` needs
    :class:`~hooktrain.model.SeparateDistributedDataParallel` on several ranks, or a subclass of
    :class:`~hooktrain.model.StepDistributedDataParallel` that has this step too.

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
            raise TypeError(f"data_preprocessor must be a module or a dict: {data_preprocessor!r}")
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
        """Train on one batch; see :func:`hooktrain.model.base_model.train_step`.

        Returns:
            The values to log.
        """
        return train_step(self, data, optim_wrapper)

    def val_step(self, data: Any) -> Any:
        """Preprocess one batch and predict.

        It neither changes the model's mode nor turns gradients off: the evaluation around it does.

        Returns:
            What the forward returns.
        """
        return self._run_forward(self.data_preprocessor(data, False), mode="predict")

    def test_step(self, data: Any) -> Any:
        """The same as :meth:`val_step`."""
        return self._run_forward(self.data_preprocessor(data, False), mode="predict")

    def _run_forward(self, data: Any, mode: str) -> Any:  # MMEngine's name: models override it
        if isinstance(data, Mapping):
            return self(**data, mode=mode)
        if isinstance(data, list | tuple):
            return self(*data, mode=mode)
        raise TypeError(f"data_preprocessor must return a dict, list or tuple, not {type(data)}")

    def parse_losses(self, losses: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of the losses, and the values to log.

        Every entry that has "loss" anywhere in its name is added up; the others, such as an
        accuracy, are only logged.

        Args:
            losses: by name a tensor, of which the mean is taken, or a list or tuple of tensors, of
                which the means are added up.

        Returns:
            The sum, and all values by name without gradient. The sum is first, as ``loss``; if
            the model has an entry of that name beside other losses, it is ``total_loss``.

        Raises:
            TypeError: if a value is something else, or there is no dict.
            ValueError: if no name has "loss" in it, or there is no name left for the sum.
        """
        if not isinstance(losses, Mapping):
            raise TypeError(f"mode='loss' must return a dict of losses, not a {type(losses)}")
        values = {name: _mean(name, value) for name, value in losses.items()}
        terms = [value for name, value in values.items() if "loss" in name]
        if not terms:
            raise ValueError(f"no loss has 'loss' in its name, such as 'loss_cls': {list(losses)}")
        total_name = "total_loss" if "loss" in values and len(terms) > 1 else "loss"
        if total_name in values and len(terms) > 1:
            raise ValueError(f"'total_loss' is the name of the sum, leave it out: {list(losses)}")
        total = sum(terms[1:], start=terms[0])
        detached = {name: value.detach() for name, value in values.items()}
        return total, {total_name: total.detach(), **detached}


def train_step(
    model: Any, data: Any, optim_wrapper: Any, ddp: nn.Module | None = None, check: bool = False
) -> dict[str, Tensor]:
    """One batch: preprocess it, compute the losses, and give their sum to the optimizer.

    Preprocessing and forward are inside the context that decides on the precision, and if ranks
    communicate in the backward pass that follows.

    Args:
        model: the model. Its ``data_preprocessor(data, True)`` gives the arguments of its
            forward with ``mode="loss"``, and its ``parse_losses`` takes what that returns.
        data: a batch, as the data loader gives it.
        optim_wrapper: the :class:`~hooktrain.solver.OptimWrapper`.
        ddp: the DistributedDataParallel around the model, which is called instead of the model and
            communicates; None if there is none.
        check: log the parameters that the loss does not depend on, see
            :func:`detect_anomalous_params`.

    Returns:
        The values to log, without gradient and on the device.

    Raises:
        TypeError: if the preprocessor returns neither dict, list nor tuple.
    """
    forward = model if ddp is None else ddp
    log_vars: dict[str, Tensor]
    with optim_wrapper.optim_context(forward):
        losses = compute_losses(model, data, forward)
    loss, log_vars = model.parse_losses(losses)
    if check:
        detect_anomalous_params(loss, model)
    optim_wrapper.update_params(loss)
    return log_vars


def compute_losses(model: Any, data: Any, forward: Any) -> Any:
    """The losses of one batch in training, as the model returns them.

    Args:
        model: see :func:`train_step`.
        data: a batch, as the data loader gives it.
        forward: what is called: the model, or a
            :class:`~hooktrain.model.StepDistributedDataParallel` around it.
    """
    return forward._run_forward(model.data_preprocessor(data, True), mode="loss")


def init_weights_once(model: nn.Module) -> nn.Module:
    """Call ``init_weights`` of a model whose ``is_init`` says that this was not done yet."""
    if getattr(model, "is_init", True) is False:
        logger.info("%s initialises its weights", type(model).__name__)
        model.init_weights()  # type: ignore[operator]
        model.is_init = True  # type: ignore[assignment]
    return model


def detect_anomalous_params(loss: Any, model: nn.Module) -> list[str]:
    """Log, as errors, the trainable parameters that get no gradient from a loss.

    They were not used in the forward pass, or what was computed from them was not used for the
    loss. DistributedDataParallel waits for the gradients of all parameters, and fails if some do
    not come. Call it before or after the backward pass. It does not see what reentrant activation
    checkpointing computes, and wrongly reports those parameters.

    Args:
        loss: a tensor, or dicts, lists or tuples of tensors, nested in any way.
        model: the model.

    Returns:
        The names of the parameters.
    """
    tensors = [leaf for leaf in tree_leaves(loss) if isinstance(leaf, Tensor)]
    reached = {id(tensor) for tensor in tensors}
    # Not recursive: a graph may be deeper than Python's stack.
    pending: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if hasattr(node, "variable"):  # the node that accumulates the gradient of a leaf
            reached.add(id(node.variable))
        parents = {parent for parent, _ in node.next_functions if parent is not None} - seen
        seen |= parents
        pending += parents
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    missed = {name: p.size() for name, p in trained.items() if id(p) not in reached}
    for name, size in missed.items():
        logger.error("%s with shape %s is not in the computational graph", name, size)
    return list(missed)


def _mean(name: str, value: Any) -> Tensor:
    parts = value if isinstance(value, list | tuple) else [value]
    if not parts or not all(isinstance(part, Tensor) for part in parts):
        raise TypeError(f"the loss {name!r} must be a tensor or a list of tensors: {value!r}")
    # What is only counted, such as correct answers, may be whole numbers or booleans.
    means = [(part if part.is_floating_point() else part.float()).mean() for part in parts]
    total: Tensor = sum(means[1:], start=means[0])
    return total
