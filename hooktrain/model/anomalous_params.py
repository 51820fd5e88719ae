"""Finds the parameters that a loss does not depend on."""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

__all__ = ["detect_anomalous_params"]

logger = logging.getLogger(__name__)


def detect_anomalous_params(loss: Any, model: nn.Module) -> list[str]:
    """Log, as errors, the trainable parameters that get no gradient from a loss.

    They were not used in the forward pass, or what was computed from them was not used for the
    loss. DistributedDataParallel waits for the gradients of all parameters, and fails if some do
    not come. To be called before or after the backward pass. What reentrant activation
    checkpointing computes is not seen, and so its parameters are wrongly reported.

    Args:
        loss: a tensor, or dicts, lists or tuples of tensors, nested as one likes: their graphs
            are looked at together.
        model: the model.

    Returns:
        The names of the parameters.

    Raises:
        TypeError: if there is something else in ``loss``.
    """
    reached = _leaves(list(_tensors(loss)))
    missed = [
        (name, parameter.size())
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in reached
    ]
    for name, size in missed:
        logger.error("%s with shape %s is not in the computational graph", name, size)
    return [name for name, _ in missed]


def _tensors(loss: Any) -> Iterator[Tensor]:
    if isinstance(loss, Tensor):
        yield loss
    elif isinstance(loss, Mapping):
        for value in loss.values():
            yield from _tensors(value)
    elif isinstance(loss, list | tuple):
        for value in loss:
            yield from _tensors(value)
    else:
        raise TypeError(f"loss must be tensors, or dicts or lists of tensors, but got {loss!r}")


def _leaves(tensors: list[Tensor]) -> set[int]:
    """The ids of the leaf tensors that some tensors were computed from."""
    leaves = {id(tensor) for tensor in tensors if tensor.is_leaf}
    # Not recursive: a graph may be deeper than Python's stack.
    pending: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if hasattr(node, "variable"):  # the node that accumulates the gradient of a leaf
            leaves.add(id(node.variable))
        parents = {parent for parent, _ in node.next_functions if parent is not None} - seen
        seen |= parents
        pending += parents
    return leaves
