"""The ranks of a run: which one this process is, and how it communicates with the others.

A single process is rank 0 of 1. Every rank must call a collective function, and all ranks in the
same order. Otherwise the others wait for it until the timeout.
"""

import os
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hooktrain.utils import timer
from hooktrain.utils.background import BackgroundWorker

T = TypeVar("T")

_BEAT_SECONDS = 1.0

# The keys are default groups, so that no entry outlives destroy_process_group().
_object_groups: WeakKeyDictionary[Any, ProcessGroup] = WeakKeyDictionary()
# The rank on the machine, and how many ranks it has.
_local_parts: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()
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
    """Set which part of the data this process reads. Without this call each rank reads its own.

    A strategy calls it where several ranks compute one batch together, as in tensor and context
    parallelism. Ranks with the same part read the same batches and draw the same numbers.

    Args:
        rank: the number of the part, from 0.
        size: how many parts there are.
    """
    _data_shares[dist.group.WORLD] = (rank, size)


def data_parallel_rank() -> int:
    """The number of the part of the data that this process reads; see :func:`set_data_part`."""
    return _data_share()[0]


def data_parallel_size() -> int:
    """The number of parts that the data is divided into; see :func:`set_data_part`."""
    return _data_share()[1]


def _data_share() -> tuple[int, int]:
    if not dist.is_initialized():
        return 0, 1
    own = (get_rank(), get_world_size())
    return _data_shares.get(dist.group.WORLD, own)


def set_local_part(rank: int, size: int) -> None:
    """Set the place of this process on its machine, where nobody has set ``LOCAL_RANK``.

    Args:
        rank: its number on the machine, from 0. Ranks of a machine follow each other.
        size: how many ranks the machine has.
    """
    _local_parts[dist.group.WORLD] = (rank, size)


def local_part() -> tuple[int, int]:
    """What :func:`set_local_part` has set; 0 and 1 for a single process.

    Raises:
        RuntimeError: if nobody has set it.
    """
    if get_world_size() == 1:
        return 0, 1
    if dist.group.WORLD not in _local_parts:
        raise RuntimeError(
            "it is unknown which ranks share a machine: start them by launch() or torchrun, or "
            "call comm.set_local_part()"
        )
    return _local_parts[dist.group.WORLD]


def get_local_rank() -> int:
    """The rank of this process on its machine: torchrun's, or else what its launcher has said."""
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    return local_part()[0]


def get_local_size() -> int:
    """The number of processes on this machine: torchrun's, or else what its launcher has said."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        return int(os.environ["LOCAL_WORLD_SIZE"])
    return local_part()[1]


def synchronize() -> None:
    """Wait until every rank has called this. It does not wait for accelerators. Collective."""
    any_rank(False)


def all_gather(data: T, group: ProcessGroup | None = None) -> list[T]:
    """Bring every rank's picklable object to every rank. Collective.

    Args:
        data: the object of this rank, with tensors on the CPU.
        group: the ranks that take part; None is all of them.

    Returns:
        The objects of all ranks, in the order of the ranks. A single process gets its own object,
        not a copy.
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


def all_reduce(values: Tensor) -> Tensor:
    """Sum a tensor over all ranks, in place and on its device. Collective.

    Args:
        values: a contiguous tensor of the same shape on every rank.

    Returns:
        ``values``, which are the same on every rank to the last bit.
    """
    if get_world_size() == 1:
        return values
    if values.is_cpu:
        max_and_sum(values.view(-1), maxima=0)
    else:
        dist.all_reduce(values)
    return values


def max_and_sum(values: Tensor, maxima: int) -> None:
    """Take the maxima of the first values over the ranks, and the sums of the others. Collective.

    The ranks swap what they have in pairs, and then each has the values of twice as many. So N
    ranks wait for log2(N) messages, one after the other, where a sum by gloo waits for 2 (N - 1).

    Args:
        values: of one dimension, on the CPU. They are changed in place, and are then the same on
            every rank to the last bit.
        maxima: how many of them to take the maxima of.
    """
    group, rank, size = object_group(), get_rank(), get_world_size()
    received = values.clone()

    def swap(partner: int) -> None:
        sending = dist.isend(values, partner, group)
        dist.recv(received, partner, group)
        sending.wait()  # type: ignore[union-attr]
        values[:maxima].clamp_(min=received[:maxima])
        values[maxima:] += received[maxima:]

    # A rank from the largest power of two on only meets the one that takes its values along.
    rounds = size.bit_length() - 1
    partner = rank ^ 1 << rounds
    if partner < size:
        swap(partner)
    if rank < partner:
        for i in range(rounds):
            swap(rank ^ 1 << i)
    if partner < size:
        pass_on = dist.send if rank < partner else dist.recv
        pass_on(values, partner, group)


def any_rank(flag: bool, device: torch.device | str = "cpu") -> bool:
    """Whether the flag is true on any rank. Collective.

    Args:
        flag: of this rank.
        device: where to exchange it. Between accelerators that is faster than over gloo.
    """
    # A host-device synchronisation, if it is an accelerator.
    return all_reduce(torch.tensor(int(flag), device=device)).item() > 0


def shared_random_seed() -> int:
    """A number in [0, 2^31) from numpy's global generator of rank 0. Collective."""
    return broadcast(int(np.random.randint(2**31)))


def object_group(timeout: Any = None) -> ProcessGroup:
    """The group of all ranks with gloo, which sends CPU memory. The first call is collective.

    Args:
        timeout: a timedelta, for the first call; None is torch's, of 30 minutes.
    """
    world = dist.group.WORLD
    assert world is not None
    # It may be one of several, as in cpu:gloo,cuda:nccl.
    if "cpu:gloo" in dist.get_backend_config(world):
        return world
    if world not in _object_groups:
        _object_groups[world] = dist.new_group(backend="gloo", timeout=timeout)  # type: ignore[assignment, unused-ignore]
    return _object_groups[world]


def on_all_ranks(
    function: Callable[[], T], group: ProcessGroup | None = None
) -> list[T]:
    """Call a function on every rank. If it fails anywhere, all ranks raise the error. Collective.

    Args:
        function: a function that calls nothing collective and returns something picklable.
        group: a group of all ranks; None is :func:`object_group`. A thread needs one of its own.

    Returns:
        What the function returned on each rank, in the order of the ranks.

    Raises:
        Exception: the error of the first rank that failed.
    """
    if get_world_size() == 1:
        return [function()]
    outcome: Any = None
    error: Exception | None = None
    try:
        outcome = function()
    except Exception as problem:  # it is raised below, when all ranks know of it
        error = problem
    everywhere = all_gather((outcome, _portable(error)), group)
    for _, first in everywhere:
        if first is not None:
            raise first from error
    return [outcome for outcome, _ in everywhere]


def on_main_process(function: Callable[[], T], group: ProcessGroup | None = None) -> T:
    """Call a function on the main process only; see :func:`on_all_ranks`. Collective.

    Returns:
        What the function returned there, on every rank.
    """

    def on_rank_0() -> Any:
        return function() if is_main_process() else None

    result: T = on_all_ranks(on_rank_0, group)[0]
    return result


def on_all_ranks_patiently(function: Callable[[], T]) -> list[T]:
    """Call a function that may take hours; see :func:`on_all_ranks`. Collective.

    It is called in a thread, and the ranks meet every second. So the timeout of the process group
    does not end the others, nor a watchdog this process.
    """
    outcome: list[T] = []
    worker = BackgroundWorker("long work")
    worker.submit(lambda: outcome.append(function()), daemon=True)
    while not all(on_all_ranks(partial(worker.wait, _BEAT_SECONDS))):
        timer.beat()
    return all_gather(outcome[0])


def _portable(error: Exception | None) -> Exception | None:
    """The error, or its text if it cannot be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
