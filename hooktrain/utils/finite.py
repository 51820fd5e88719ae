"""Which tensors are finite."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from hooktrain.utils.dtensor import local_tensor


def non_finite(tensors: Mapping[str, Any]) -> set[str]:
    """The names of the tensors that hold infinity or NaN, of a sharded one in this rank's shard.

    Tensors without data, sparse ones and those of one byte a number are not looked at.

    Args:
        tensors: by name. What is no tensor is left out.
    """
    found = {
        name: local
        for name, tensor in tensors.items()
        if _has_numbers(tensor) and (local := local_tensor(tensor)).numel()
    }
    if not found:
        return set()
    # The largest numbers, since a norm of large ones may overflow.
    largest = torch._foreach_norm(list(found.values()), math.inf)
    together = torch.stack([norm.to(largest[0].device) for norm in largest])
    finite = together.isfinite().tolist()  # host-device synchronisation
    return {name for name, good in zip(found, finite, strict=True) if not good}


def _has_numbers(tensor: Any) -> bool:
    if not isinstance(tensor, Tensor) or is_lazy(tensor) or tensor.is_meta:
        return False
    is_inexact = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return is_inexact and tensor.dtype.itemsize > 1 and tensor.layout is torch.strided
