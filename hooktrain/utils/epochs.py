"""Numbers of iterations that are given in epochs, such as a period of ``"1 epoch"``."""

import math
import re
from fractions import Fraction
from functools import lru_cache

EPOCHS = re.compile(r"(\d+|\d*\.\d+) epochs?")  # the text of a number of epochs


@lru_cache  # hooks ask at each iteration
def in_iterations(number: int | str, epoch_length: int | None) -> int:
    """The iterations that a number of iterations, or a text such as ``"0.5 epochs"``, stands for.

    >>> in_iterations(20, None), in_iterations("1 epoch", 23), in_iterations("0.5 epochs", 23)
    (20, 23, 12)

    Args:
        number: iterations, or epochs as a text.
        epoch_length: the iterations of an epoch; None if that is not known.

    Raises:
        ValueError: for another text, or for epochs if their length is not known.
    """
    if not isinstance(number, str):
        return number
    match = EPOCHS.fullmatch(number)
    if match is None:
        raise ValueError(
            f"give a number of iterations, or a text like '1 epoch', not {number!r}"
        )
    if epoch_length is None:
        raise ValueError(
            f"nobody knows how many iterations {number!r} are: the loader has no length. "
            "Set trainer.epoch_length, or train.epoch_length"
        )
    return math.ceil(Fraction(match[1]) * epoch_length)
