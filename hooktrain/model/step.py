"""The training and prediction step of models that own it: the one implementation that all share."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn

from hooktrain.model.anomalous_params import detect_anomalous_params

__all__ = ["parse_losses", "predict_step", "train_step"]


class _OptimWrapper(Protocol):
    """What a step needs of an optimizer; :class:`~hooktrain.solver.OptimWrapper` has it."""

    def sync_context(self, model: Any) -> AbstractContextManager[Any]: ...

    def precision_context(self) -> AbstractContextManager[Any]: ...

    def update_params(self, loss: Tensor) -> Any: ...


def train_step(
    model: Any,
    data: Any,
    optim_wrapper: _OptimWrapper,
    ddp: nn.Module | None = None,
    detect_anomalous: bool = False,
) -> dict[str, Tensor]:
    """One batch: preprocess it, compute the losses, and hand their sum to the optimizer.

    Forward and backward stand together inside the context that decides whether ranks communicate;
    preprocessing and forward alone inside the one that decides on the precision.

    Args:
        model: the model. Its ``data_preprocessor(data, True)`` gives the arguments of its
            forward with ``mode="loss"``, and its ``parse_losses`` takes what that returns.
        data: a batch, as the data loader gives it.
        optim_wrapper: the optimizer in its wrapper.
        ddp: the DistributedDataParallel around the model, which is called in its place and
            communicates; None if there is none.
        detect_anomalous: log the parameters that the loss does not depend on; see
            :func:`detect_anomalous_params`.

    Returns:
        The values to log, without gradient and on the device; see :func:`parse_losses`.

    Raises:
        TypeError: if the preprocessor returns neither dict, list nor tuple.
    """
    forward = model if ddp is None else ddp
    log_vars: dict[str, Tensor]
    with optim_wrapper.sync_context(forward):
        with optim_wrapper.precision_context():
            losses = _call(forward, model.data_preprocessor(data, True), mode="loss")
        total, log_vars = model.parse_losses(losses)
        if detect_anomalous:
            detect_anomalous_params(total, model)
        optim_wrapper.update_params(total)
    return log_vars


def predict_step(model: Any, data: Any) -> Any:
    """One batch of validation or test: preprocess it, and predict.

    It neither changes the model's mode nor turns gradients off: the evaluation around it does.

    Args:
        model: the model. Its ``data_preprocessor(data, False)`` gives the arguments of its
            forward with ``mode="predict"``.
        data: a batch, as the data loader gives it.

    Returns:
        What the forward returns.

    Raises:
        TypeError: if the preprocessor returns neither dict, list nor tuple.
    """
    return _call(model, model.data_preprocessor(data, False), mode="predict")


def parse_losses(losses: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum of the losses, and the values to log.

    Every entry that has "loss" anywhere in its name is added up; the others, such as an accuracy,
    are logged only.

    >>> total, log_vars = parse_losses({"loss_a": torch.ones(4), "loss_b": [torch.ones(2)] * 2,
    ...                                 "accuracy": torch.tensor(0.5)})
    >>> total, log_vars
    (tensor(3.), {'loss': tensor(3.), 'loss_a': tensor(1.), 'loss_b': tensor(2.), 'accuracy': ...})

    Args:
        losses: by name a tensor, of which the mean is taken, or a list or tuple of tensors, of
            which the means are added up.

    Returns:
        The sum, and all values by name without gradient. The sum stands first as ``loss``; where
        the model has an entry of that name beside other losses, it is ``total_loss``.

    Raises:
        TypeError: if ``losses`` is not a dict, or one of its values something else.
        ValueError: if no name has "loss" in it, or there is no name left for the sum.
    """
    if not isinstance(losses, Mapping):
        raise TypeError(
            f"forward with mode='loss' must return a dict of losses, but returned {losses!r}"
        )
    values = {name: _mean(name, value) for name, value in losses.items()}
    terms = [value for name, value in values.items() if "loss" in name]
    if not terms:
        raise ValueError(
            f"none of the losses has 'loss' in its name, such as 'loss_cls': {list(losses)}"
        )
    total = sum(terms[1:], start=terms[0])
    total_name = "loss"
    if "loss" in values and len(terms) > 1:
        total_name = "total_loss"
        if total_name in values:
            raise ValueError(
                f"the losses {list(losses)} are added up: leave out 'total_loss', which is the "
                "name of the sum"
            )
    detached = {name: value.detach() for name, value in values.items()}
    return total, {total_name: total.detach(), **detached}


def _call(forward: Callable[..., Any], data: Any, mode: str) -> Any:
    if isinstance(data, Mapping):
        return forward(**data, mode=mode)
    if isinstance(data, list | tuple):
        return forward(*data, mode=mode)
    raise TypeError(
        "data_preprocessor must return the arguments of forward, a dict of those by name or a "
        f"list or tuple, but returned an object of type {type(data).__name__}"
    )


def _mean(name: str, value: Any) -> Tensor:
    parts = [value] if isinstance(value, Tensor) else value
    if (
        not isinstance(parts, list | tuple)
        or not parts
        or not all(isinstance(part, Tensor) for part in parts)
    ):
        raise TypeError(
            f"the loss {name!r} must be a tensor or a list or tuple of tensors, but got {value!r}"
        )
    # What is only counted, such as correct answers, may come in whole numbers or as booleans.
    means = [(part if part.is_floating_point() else part.float()).mean() for part in parts]
    total: Tensor = sum(means[1:], start=means[0])
    return total
