"""Functions of detectron2's ``comm`` that hooktrain itself does not need."""

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hooktrain.utils import comm

_T = TypeVar("_T")


def gather(data: _T, dst: int = 0, group: ProcessGroup | None = None) -> list[_T]:
    """Gather every rank's picklable object on one rank, in the order of the ranks. Collective.

    Args:
        data: the object of this rank, with tensors on the CPU.
        dst: the rank that gets the objects.
        group: the ranks that take part; None is all ranks.

    Returns:
        The objects of all ranks on rank ``dst``, and an empty list on the others.
    """
    if comm.get_world_size() == 1:
        return [data]
    group = group or comm.object_group()
    size = dist.get_world_size(group) if comm.get_rank() == dst else 0
    gathered: list[Any] = [None] * size
    dist.gather_object(data, gathered or None, dst=dst, group=group)
    return gathered


def reduce_dict(
    input_dict: dict[str, Tensor], average: bool = True
) -> dict[str, Tensor]:
    """Average or sum tensors by name over all ranks. Collective.

    Args:
        input_dict: tensors of the same shape on the same device. The keys are the same on every
            rank, in any order.
        average: whether to divide the sums by the number of ranks.

    Returns:
        A new dictionary, in the order of the sorted keys.
    """
    if not input_dict:
        return {}
    # Ranks may have filled their dictionaries in different orders.
    names = sorted(input_dict)
    values = torch.stack([input_dict[name].detach() for name in names])
    if comm.get_world_size() > 1:
        dist.all_reduce(values)
    if average:
        values = values / comm.get_world_size()
    return dict(zip(names, values.unbind(), strict=True))
