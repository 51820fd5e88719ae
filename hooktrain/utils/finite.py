"""Which tensors are finite."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from hooktrain.utils.dtensor import is_sharded, local_tensor

_REAL = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_DTYPES = _REAL | {torch.complex64, torch.complex128}
_LAYOUTS = (torch.strided, torch.sparse_coo)


def non_finite(tensors: Mapping[str, Any]) -> set[str]:
    """The names of the tensors that hold infinity or NaN, of a sharded one in this rank's shard.

    Tensors without data and those of one byte a number are not looked at.

    Args:
        tensors: by name. What is no tensor is left out.
    """
    found = {
        name: values
        for name, tensor in tensors.items()
        if isinstance(tensor, Tensor) and tensor.dtype in _DTYPES and not is_lazy(tensor)
        if tensor.layout in _LAYOUTS and not tensor.is_meta
        for local in [local_tensor(tensor) if is_sharded(tensor) else tensor]
        if (values := local.coalesce().values() if local.is_sparse else local).numel()
    }
    if not found:
        return set()
    # The largest numbers, since a norm of large ones may overflow.
    largest = torch._foreach_norm(list(found.values()), math.inf)
    together = torch.stack([norm.to(largest[0].device) for norm in largest])
    finite = together.isfinite().tolist()  # host-device synchronisation
    return {name for name, good in zip(found, finite, strict=True) if not good}
