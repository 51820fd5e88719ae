"""What a model returns in training: which of its values are losses, and what their sum is."""

from collections.abc import Mapping
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from hooktrain.utils.names import is_loss


def parse_losses(output: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Split what a model returned in training into the loss and the values to record.

    - A tensor is the loss. So is the attribute ``loss`` of an object, as Hugging Face's models
      return it.
    - The losses in a dict are added up. A value is a loss if it has a gradient or "loss" in its
      name. The others, such as an accuracy, are metrics.

    Returns:
        The loss to go backward from, and all values by name. If there are metrics among them, the
        sum of the losses comes first, as ``total_loss``.

    Raises:
        TypeError: without a loss, or for a value that is not a tensor with one element.
        ValueError: if no loss has a gradient, or ``total_loss`` is one of several values.
    """
    if isinstance(output, Tensor) and output.numel() == 1 and output.requires_grad:
        return output, {"total_loss": output}
    values = _values_by_name(output)
    if "total_loss" in values and len(values) > 1:
        raise ValueError(
            f"'total_loss' is the name of the sum: leave it out of {list(values)}"
        )
    if not values:
        raise _no_loss(output)
    losses = []
    for name, value in values.items():
        if not isinstance(value, Tensor) or value.numel() != 1:
            shapes = {name: getattr(v, "shape", v) for name, v in values.items()}
            raise _no_loss(shapes)
        if value.requires_grad or is_loss(name):
            losses.append(value)
    loss = reduce(add, losses) if losses else torch.zeros(())
    if not loss.requires_grad:
        raise ValueError(
            "no loss has a gradient (is this under no_grad, or is all of the model frozen?): "
            f"{output!r:.300}"
        )
    if len(losses) < len(values):
        values = {"total_loss": loss, **values}
    return loss, values


def _values_by_name(output: Any) -> dict[str, Any]:
    if isinstance(output, Tensor):
        return {"total_loss": output}
    # Some dicts have an attribute for each item. Only one of their class is meant.
    owner = type(output) if isinstance(output, Mapping) else output
    if hasattr(owner, "loss"):
        return {"total_loss": output.loss}
    return dict(output) if isinstance(output, Mapping) else {}


def _no_loss(found: Any) -> TypeError:
    return TypeError(
        "a model in training must return a loss or a dict of losses, tensors of one element "
        f"each, not {found!r:.300}. Hugging Face's models need labels, those with train_step "
        "need StepTrainer"
    )
