"""Splits the output of a model in training into losses, their sum, and metrics to record."""

import logging
from collections.abc import Mapping
from functools import lru_cache, reduce
from operator import add
from typing import Any

from torch import Tensor

from hooktrain.utils.names import is_loss
from hooktrain.utils.tensors import types_of

logger = logging.getLogger(__name__)

# The losses and metrics of a step by name.
Values = dict[str, Tensor]

# Names that other trainers give to the sum of all losses.
_SUMS = {"loss", "total_loss", "loss_total", "loss_sum", "total"}


def parse_losses(output: Any) -> tuple[Tensor, Values]:
    """Split the output of a model in training into the loss and the values to record.

    - A tensor is the loss. So is the attribute ``loss`` of an object, such as the outputs of
      Hugging Face's models.
    - The values of a dict that have a gradient are losses, and are added up. The others, such as
      an accuracy, are only recorded.

    Returns:
        The loss to call ``backward`` on, and all values by name. The loss comes first, as
        ``total_loss``.

    Raises:
        TypeError: if there is no loss, or if a value is not a tensor with one element.
        ValueError: if no value has a gradient; or if it is unclear which values to add up: a
            ``loss`` or ``total_loss`` beside others with a gradient may be their sum, and a value
            without "loss" in its name, beside some with it, may be a metric.
    """
    if isinstance(output, Tensor) and output.numel() == 1 and output.requires_grad:
        return output, {"total_loss": output}
    values = values_by_name(output)
    losses = {name: value for name, value in values.items() if value.requires_grad}
    if not losses:
        raise ValueError(
            "no loss has a gradient (is this under no_grad, or is the whole model frozen?): "
            f"{output!r:.300}"
        )
    if len(values) > 1:
        _check_names(tuple(losses), tuple(values.keys() - losses.keys()))
    loss = reduce(add, losses.values())
    if values.get("total_loss", loss) is not loss:
        raise ValueError(
            "'total_loss' is the name of the sum, but this one has no gradient: leave it out of "
            f"{list(values)}"
        )
    return loss, {"total_loss": loss, **values}


@lru_cache
def _check_names(names: tuple[str, ...], recorded: tuple[str, ...]) -> None:
    """Log which values are added up and which are only recorded; refuse unclear names.

    The cache makes later steps with the same names skip this.

    Args:
        names: the names of the values with a gradient.
        recorded: the names of the others.
    """
    sums = [name for name in names if name in _SUMS]
    others = [name for name in names if not is_loss(name)]
    if sums and len(names) > 1:
        raise ValueError(
            f"{sums[0]!r} and other values of {list(names)} have a gradient. If it is their sum, "
            "detach() the others, so that they are only recorded. If it is one of several losses "
            "to add up, give it another name, such as 'loss_main'"
        )
    if 0 < len(others) < len(names):
        raise ValueError(
            f"{others} of {list(names)} have a gradient, but no 'loss' in their names. To only "
            "record them, detach() them; to add them to the loss, put 'loss' in each name"
        )
    logger.info(
        "The loss is the sum of %s; only recorded, since they have no gradient (after detach(), "
        "for example): %s",
        list(names),
        sorted(recorded),
    )


def values_by_name(output: Any) -> Values:
    """The values in the output of a model in training, by name.

    Raises:
        TypeError: if there are none, or if one is not a tensor with one element.
    """
    values = _items(output)
    are_scalars = [isinstance(v, Tensor) and v.numel() == 1 for v in values.values()]
    if not values or not all(are_scalars):
        raise TypeError(
            "a model in training (or compute_loss) must return a loss or a dict of losses, all of "
            f"them tensors with one element, not {types_of(output)!r:.300}. Hugging Face's models "
            "need labels, models with train_step need StepTrainer, and batches without a loss "
            "must be left out of the data"
        )
    return values


def _items(output: Any) -> dict[str, Any]:
    if isinstance(output, Tensor):
        return {"total_loss": output}
    # Some dicts expose each item as an attribute. Only an attribute of the class counts.
    owner = type(output) if isinstance(output, Mapping) else output
    if hasattr(owner, "loss"):
        return {"total_loss": output.loss}
    return dict(output) if isinstance(output, Mapping) else {}
