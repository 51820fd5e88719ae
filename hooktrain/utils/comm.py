"""The ranks of a run: the number of this process, and collectives.

A single process is rank 0 of 1. All ranks must call the collective functions, in the same order.
Otherwise the ranks wait for each other until the timeout.
"""

import logging
import os
import pickle
import reprlib
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hooktrain.utils import timer
from hooktrain.utils.background import BackgroundWorker

T = TypeVar("T")

# The ranks that take part in a collective; None means all ranks.
Group: TypeAlias = ProcessGroup | None

_BEAT_SECONDS = 1.0

# The keys are default process groups, so that no entry outlives destroy_process_group().
_object_groups: WeakKeyDictionary[Any, ProcessGroup] = WeakKeyDictionary()
_data_shares: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()


def get_world_size() -> int:
    """The number of processes; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def get_rank() -> int:
    """The rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_main_process() -> bool:
    """Whether this is rank 0."""
    return get_rank() == 0


def set_data_part(rank: int, size: int) -> None:
    """Set the part of the data that this process reads. By default each rank has its own part.

    A strategy calls it if several ranks compute one batch together, as in tensor
    parallelism. Ranks with the same part read the same batches and draw the same random numbers.

    Args:
        rank: the number of the part, from 0.
        size: the number of parts.
    """
    _data_shares[dist.group.WORLD] = (rank, size)


def data_parallel_rank() -> int:
    """The number of the part of the data that this process reads; see :func:`set_data_part`."""
    return _data_share()[0]


def data_parallel_size() -> int:
    """The number of parts of the data; see :func:`set_data_part`."""
    return _data_share()[1]


def _data_share() -> tuple[int, int]:
    if not dist.is_initialized():
        return 0, 1
    own = (get_rank(), get_world_size())
    return _data_shares.get(dist.group.WORLD, own)


def get_local_rank() -> int:
    """The rank of this process on its machine, from ``LOCAL_RANK``.

    torchrun, the strategies and :func:`hooktrain.engine.launch` set the variable. A script that
    initialises its own process group must set it, and ``LOCAL_WORLD_SIZE``.

    Raises:
        RuntimeError: if there are several processes, but the variable is not set.
    """
    return _local_number("LOCAL_RANK", alone=0)


def get_local_size() -> int:
    """The number of processes on this machine, from ``LOCAL_WORLD_SIZE``."""
    return _local_number("LOCAL_WORLD_SIZE", alone=1)


def _local_number(variable: str, alone: int) -> int:
    if variable in os.environ:
        return int(os.environ[variable])
    if get_world_size() == 1:
        return alone
    raise RuntimeError(
        "it is unknown which ranks share a machine: start them by launch() or torchrun, or set "
        "LOCAL_RANK and LOCAL_WORLD_SIZE"
    )


def synchronize() -> None:
    """Wait until every rank has called this. It does not wait for accelerators. Collective."""
    any_rank(False)


def all_gather(data: T, group: Group = None) -> list[T]:
    """Gather the picklable objects of all ranks on every rank. Collective.

    Args:
        data: the object of this rank, with tensors on the CPU.
        group: the ranks that take part; None is all ranks.

    Returns:
        The objects in the order of the ranks. A single process gets its own object, not a copy.
    """
    if get_world_size() == 1:
        return [data]
    group = group or object_group()
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, data, group=group)
    return gathered


def meet(place: str) -> None:
    """Wait for all ranks. Collective.

    Args:
        place: the place in the code.

    Raises:
        RuntimeError: if another rank exchanges other data, so that it is at another place.
    """
    places = all_gather(place)
    if any(each != place for each in places):
        raise RuntimeError(
            f"this rank is at {place}, but others exchange data: {reprlib.repr(places)}. Each rank "
            "must run the same code, also the evaluation, not only the main process"
        )


def broadcast(obj: T, src: int = 0) -> T:
    """Send the object of rank ``src`` to every rank. Collective."""
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
        ``values``, equal on all ranks to the last bit.
    """
    if get_world_size() > 1:
        group = object_group() if values.is_cpu else None
        dist.all_reduce(values, group=group)
    return values


def max_and_sum(values: Tensor, maxima: int) -> None:
    """Reduce the first values to their maxima over the ranks, and the rest to sums. Collective.

    Args:
        values: a tensor of one dimension on the CPU. It is changed in place, and is then equal on
            all ranks to the last bit.
        maxima: the number of values to reduce to maxima.
    """
    rows = values.new_empty(get_world_size(), len(values))
    dist.all_gather(list(rows), values, object_group())
    values[:maxima] = rows[:, :maxima].amax(0)
    # Numpy adds row by row, whereas the order of Tensor.sum depends on the processor.
    values[maxima:] = torch.from_numpy(rows[:, maxima:].numpy().sum(axis=0))


def any_rank(flag: bool, device: torch.device | str = "cpu") -> bool:
    """Whether the flag is true on any rank. Collective.

    Args:
        flag: the flag of this rank.
        device: the device to exchange it on. Accelerators are faster than gloo.
    """
    # Host-device synchronisation on an accelerator.
    return all_reduce(torch.tensor(int(flag), device=device)).item() > 0


def shared_random_seed() -> int:
    """A number in [0, 2^31), drawn from torch's global generator on rank 0. Collective."""
    return broadcast(int(torch.randint(2**31, (), device="cpu")))


def object_group(timeout: Any = None) -> ProcessGroup:
    """The gloo group of all ranks, which exchanges CPU memory. The first call is collective.

    Args:
        timeout: a timedelta, for the first call; None is torch's default of 30 minutes.
    """
    world = dist.group.WORLD
    assert world is not None
    # gloo may be one of several backends, as in cpu:gloo,cuda:nccl.
    if "cpu:gloo" in dist.get_backend_config(world):
        return world
    if world not in _object_groups:
        _object_groups[world] = dist.new_group(backend="gloo", timeout=timeout)  # type: ignore[assignment, unused-ignore]
    return _object_groups[world]


def on_all_ranks(function: Callable[[], T], group: Group = None) -> list[T]:
    """Call a function on every rank. If it fails on any rank, all ranks raise. Collective.

    Args:
        function: a function that calls no collective and returns a picklable object.
        group: a group of all ranks; None is :func:`object_group`. A thread needs its own group.

    Returns:
        The results in the order of the ranks.

    Raises:
        Exception: the error of the lowest rank that failed.
    """
    if get_world_size() == 1:
        return [function()]
    outcome: Any = None
    error: Exception | None = None
    try:
        outcome = function()
    except Exception as problem:  # raised below, once all ranks have it
        error = problem
    everywhere = all_gather((outcome, _portable(error)), group)
    for _, first in everywhere:
        if first is not None:
            raise first from error
    return [outcome for outcome, _ in everywhere]


def on_main_process(function: Callable[[], T], group: Group = None) -> T:
    """Call a function on the main process only; see :func:`on_all_ranks`. Collective.

    Returns:
        Its result, on every rank.
    """
    own: Any = function if is_main_process() else lambda: None
    return on_all_ranks(own, group)[0]  # type: ignore[no-any-return]


def on_all_ranks_patiently(function: Callable[[], object]) -> None:
    """Call a function that may take hours; see :func:`on_all_ranks`. Collective.

    The function runs in a thread while the ranks exchange a message every second, so neither the
    timeout of the process group nor a watchdog ends the run.
    """
    worker = BackgroundWorker("long work", logging.DEBUG)  # its error is raised here
    worker.submit(function, daemon=True)
    while not all(on_all_ranks(partial(worker.wait, _BEAT_SECONDS))):
        timer.beat()


def _portable(error: Exception | None) -> Exception | None:
    """The error, or a RuntimeError with its message if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
