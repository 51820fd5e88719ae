"""The ranks of a run: which one this process is, and how it talks to the others.

A single process is rank 0 of 1. Every rank must call what is collective, in the same
order; else the others wait until the timeout.
"""

import os
import pickle
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

T = TypeVar("T")

# By the default group, so that nothing outlives destroy_process_group().
_object_groups: WeakKeyDictionary[Any, ProcessGroup] = WeakKeyDictionary()
_local_groups: WeakKeyDictionary[Any, ProcessGroup] = WeakKeyDictionary()
_data_shares: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()


def get_world_size() -> int:
    """The number of processes; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def get_rank() -> int:
    """The number of this process, from 0; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_main_process() -> bool:
    """Whether this is rank 0."""
    return get_rank() == 0


def set_data_part(rank: int, size: int) -> None:
    """Say which part of the data this process computes; else it is one of its own.

    A strategy does, where several ranks compute one batch together, as those of tensor
    and context parallelism. They have one number, and so the same batches and seeds.

    Args:
        rank: the number of the part, from 0.
        size: how many parts there are.
    """
    _data_shares[dist.group.WORLD] = (rank, size)


def data_parallel_rank() -> int:
    """The number of this process's part of the data: see :func:`set_data_part`."""
    return _data_share()[0]


def data_parallel_size() -> int:
    """The number of parts of the data: see :func:`set_data_part`."""
    return _data_share()[1]


def _data_share() -> tuple[int, int]:
    if not dist.is_initialized():
        return 0, 1
    own = (get_rank(), get_world_size())
    return _data_shares.get(dist.group.WORLD, own)


def create_local_process_group(num_workers_per_machine: int) -> None:
    """Make a group of so many successive ranks for each machine, as ``launch()`` does.

    Collective. The world size must be a multiple.
    """
    group, _ = dist.new_subgroups(num_workers_per_machine)
    _local_groups[dist.group.WORLD] = group


def get_local_process_group() -> ProcessGroup:
    """The group of the processes on this machine; a RuntimeError if there is none."""
    group = _local_groups.get(dist.group.WORLD)
    if group is None:
        raise RuntimeError(
            "which ranks share a machine? Start by launch() or torchrun, or call "
            "comm.create_local_process_group()"
        )
    return group


def get_local_rank() -> int:
    """The number of this process on its machine: torchrun's, else that of the group."""
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    if get_world_size() == 1:
        return 0
    return dist.get_rank(get_local_process_group())


def get_local_size() -> int:
    """The number of processes on this machine: torchrun's, else that of the group."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        return int(os.environ["LOCAL_WORLD_SIZE"])
    if get_world_size() == 1:
        return 1
    return dist.get_world_size(get_local_process_group())


def synchronize() -> None:
    """Wait until every rank has come here; not for accelerators. Collective."""
    any_rank(False)


def all_gather(data: T, group: ProcessGroup | None = None) -> list[T]:
    """Bring every rank's picklable object to every rank, in their order. Collective.

    Args:
        data: with tensors on the CPU; not copied in a single process.
        group: None is all ranks.
    """
    if get_world_size() == 1:
        return [data]
    group = group or object_group()
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, data, group=group)
    return gathered


def broadcast(obj: T, src: int = 0) -> T:
    """Give every rank the object of rank ``src``. Collective."""
    if get_world_size() == 1:
        return obj
    box = [obj]
    dist.broadcast_object_list(box, src, object_group())
    return box[0]


def all_reduce(values: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Sum a tensor in CPU memory over all ranks, in place. Collective.

    Args:
        values: of the same shape on every rank, where they get the same bits.
        op: another ``torch.distributed.ReduceOp``, such as ``MAX``.
    """
    if get_world_size() > 1:
        dist.all_reduce(values, op, group=object_group())
    return values


def any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank. Collective."""
    return all_reduce(torch.tensor(int(flag))).item() > 0


def shared_random_seed() -> int:
    """A number in [0, 2^31) from numpy's global generator of rank 0. Collective."""
    return broadcast(int(np.random.randint(2**31)))


def object_group(timeout: Any = None) -> ProcessGroup:
    """All ranks, through gloo, which moves CPU memory. Collective when called first.

    Args:
        timeout: a timedelta, if it has to be made; None is torch's, of 30 minutes.
    """
    world = dist.group.WORLD
    assert world is not None
    if dist.get_backend(world) == "gloo":
        return world
    if world not in _object_groups:
        _object_groups[world] = dist.new_group(backend="gloo", timeout=timeout)  # type: ignore[assignment, unused-ignore]
    return _object_groups[world]


def on_all_ranks(
    function: Callable[[], T], group: ProcessGroup | None = None
) -> list[T]:
    """Call a function on every rank; the first error is raised on all. Collective.

    Args:
        function: calls no collective, and returns something picklable.
        group: of all ranks; None is :func:`object_group`. A thread needs its own.

    Returns:
        What it returned on each rank, in their order.
    """
    if get_world_size() == 1:
        return [function()]
    outcome: Any = None
    error: Exception | None = None
    try:
        outcome = function()
    except Exception as problem:  # raised below, when all ranks know
        error = problem
    everywhere = all_gather((outcome, _portable(error)), group)
    for _, first in everywhere:
        if first is not None:
            raise first from error
    return [outcome for outcome, _ in everywhere]


def on_main_process(function: Callable[[], T], group: ProcessGroup | None = None) -> T:
    """As :func:`on_all_ranks`, but on the main process only; all return the same."""

    def only_there() -> Any:
        return function() if is_main_process() else None

    result: T = on_all_ranks(only_there, group)[0]
    return result


def _portable(error: Exception | None) -> Exception | None:
    """The error, or its text if it cannot be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
