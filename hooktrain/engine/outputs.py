"""What comes out of a model in training: which values are losses. What went in, in few words."""

import logging
import reprlib
from collections.abc import Mapping
from functools import reduce
from operator import add
from traceback import walk_tb
from typing import Any

from torch import Tensor

logger = logging.getLogger(__name__)


def parse_losses(output: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """What a model returned in training, as the loss to go backward from and the values to record.

    A tensor is the loss. Of an object with ``loss``, such as the outputs of Hugging Face's models,
    only that is. Of a dict all tensors are added up, as in detectron2, but for those that have
    neither a gradient nor "loss" in their names: these are metrics, as in MMEngine, such as an
    accuracy.

    Returns:
        The loss, and all values by name. The sum is among them where metrics are.

    Raises:
        TypeError: if there is no loss, or a value is not a tensor with one element.
        ValueError: if the loss has no gradient; or if the sum is among several values, so that all
            would count twice.
    """
    if isinstance(output, Tensor):
        if output.numel() == 1 and output.requires_grad:
            return output, {"total_loss": output}
        values: dict[str, Tensor] = {"total_loss": output}
    # A dict may have an attribute for each item; that of a class is another matter.
    elif hasattr(type(output) if isinstance(output, Mapping) else output, "loss"):
        values = {"total_loss": output.loss}
    else:
        values = dict(output) if isinstance(output, Mapping) else {}
    if "total_loss" in values and len(values) > 1:
        raise ValueError(f"'total_loss' is the name of the sum: leave it out of {list(values)}")
    for value in values.values() or [None]:
        if not isinstance(value, Tensor) or value.numel() != 1:
            text = "a model in training must return a loss or a dict of losses, of one element each"
            raise TypeError(f"{text}, not {describe(output)}")
    losses = [value for name, value in values.items() if value.requires_grad or "loss" in name]
    if not any(loss.requires_grad for loss in losses):
        raise ValueError(f"no loss has a gradient: {describe(output)}")
    loss = reduce(add, losses)
    return loss, values if len(losses) == len(values) else {"total_loss": loss, **values}


def note_batch(error: Exception) -> None:
    """Let an error of a step say what the last batch was: types, keys and shapes."""
    for frame, _ in walk_tb(error.__traceback__):
        if frame.f_code.co_name in ("run_step", "_accumulate") and "data" in frame.f_locals:
            text = f"The last batch: {describe(frame.f_locals['data'])}"
            getattr(error, "add_note", logger.error)(text)  # there are notes since Python 3.11


class _Describer(reprlib.Repr):
    """Short texts of nested values; of a tensor its shape and more, never the elements."""

    def repr_instance(self, x: Any, level: int) -> str:
        if isinstance(x, Mapping):
            return f"{type(x).__name__}({self.repr_dict(dict(x), level)})"
        if isinstance(x, Tensor):
            return f"{type(x).__name__}({tuple(x.shape)}, {x.dtype}, {x.device})"
        return repr(x) if x is None or isinstance(x, float) else f"<{type(x).__name__}>"


describe = _Describer().repr
