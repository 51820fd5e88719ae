"""The functions of detectron2's ``comm`` that only its scripts call."""

from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hooktrain.utils import comm

_T = TypeVar("_T")

# The keys are default groups, so that no entry outlives destroy_process_group().
_local_groups: WeakKeyDictionary[Any, ProcessGroup] = WeakKeyDictionary()


def create_local_process_group(num_workers_per_machine: int) -> None:
    """Say which ranks share a machine, where neither ``launch()`` nor torchrun has said so.

    :func:`get_local_process_group` makes the group when it is called first.

    Args:
        num_workers_per_machine: how many successive ranks run on each machine. The last one may
            have fewer.
    """
    rank = comm.get_rank() % num_workers_per_machine
    first = comm.get_rank() - rank
    size = min(num_workers_per_machine, comm.get_world_size() - first)
    comm.set_local_part(rank, size)
    _local_groups.pop(dist.group.WORLD, None)


def get_local_process_group() -> ProcessGroup:
    """The process group of this machine. The first call is collective.

    Raises:
        RuntimeError: if it is unknown which ranks share a machine.
    """
    world = dist.group.WORLD
    rank, size = comm.local_part()
    if world not in _local_groups:
        first = comm.get_rank() - rank
        # Each rank makes the group of its own machine only: NCCL splits its communicator
        # for each group that a rank makes.
        _local_groups[world] = dist.new_group(  # type: ignore[assignment, unused-ignore]
            range(first, first + size), use_local_synchronization=True
        )
    return _local_groups[world]


def gather(data: _T, dst: int = 0, group: ProcessGroup | None = None) -> list[_T]:
    """Bring every rank's picklable object to one rank, in the order of the ranks. Collective.

    Args:
        data: the object of this rank, with tensors on the CPU.
        dst: the rank that gets the objects.
        group: the ranks that take part; None is all of them.

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
