"""The time of the last sign of progress, which the watchdog looks at, and who else hangs."""

import time
from typing import Any

import torch.distributed as dist

from hooktrain.utils import comm

last_beat = 0.0  # when beat() was called last, by time.monotonic()


def beat() -> None:
    """Say that the main thread makes progress, in loops that take long."""
    global last_beat
    last_beat = time.monotonic()


def ranks_at(
    place: str,
    seconds: float,
) -> tuple[list[int], ...]:
    """Say that this rank hangs at a place, and hear who else does.

    It needs no other rank, as it goes over the store of the process group.

    Args:
        place: any text.
        seconds: how long to wait for others.

    Returns:
        The ranks that have said the same, the first one first; and all other ranks.
    """
    size = comm.get_world_size()
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    if size > 1:
        store = dist.distributed_c10d._get_default_store()
    store.append(place, f"{comm.get_rank()} ")
    time.sleep(seconds)
    here = list(map(int, store.get(place).split()))
    return here, sorted(set(range(size)).difference(here))
