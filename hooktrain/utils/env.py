"""Seeds of the global random number generators."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from hashlib import blake2b
from operator import index
from struct import Struct
from typing import Any

import numpy as np
import torch

# Each generator on the CPU takes a seed of 32 bits.
_FOUR_SEEDS = Struct("<IIII")

_training = threading.RLock()  # held by the thread that trains


@contextmanager
def in_one_thread() -> Iterator[None]:
    """Refuse to train while another thread of this process trains.

    Raises:
        RuntimeError: if another thread is training.
    """
    if not _training.acquire(blocking=False):
        raise RuntimeError(
            "another thread of this process is training, and both would draw from the same random "
            "generators: train in separate processes, or one after the other"
        )
    try:
        yield
    finally:
        _training.release()


def seed_all_rng(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch, on the CPU and on all devices.

    Args:
        seed: the seed, from 0 to 2^32 - 1.

    Raises:
        ValueError: if the seed is out of range; nothing is seeded then.
    """
    np.random.seed(seed)  # first, since it refuses a seed that is out of range
    random.seed(seed)
    torch.manual_seed(seed)


def seed_on_host(counter: int, *stream: int | str) -> int:
    """Seed the CPU's global generators of Python, numpy and torch, in about 10 microseconds.

    Each generator gets its own seed, a hash of the arguments.

    Args:
        counter: the number of a step or a sample, from 0.
        stream: the name of the counter and its further numbers, such as ``"step"``, the seed and
            the rank.

    Returns:
        Another seed, for the generator of a device.
    """
    hashed = _hash(*stream).copy()
    hashed.update(counter.to_bytes(8, "little"))
    for_torch, for_numpy, for_python, for_device = _FOUR_SEEDS.unpack(hashed.digest())
    # torch.manual_seed would also seed every kind of device, which takes longer than a small step
    # of training.
    torch.default_generator.manual_seed(for_torch)
    np.random.seed(for_numpy)
    random.seed(for_python)
    return for_device  # type: ignore[no-any-return]


@lru_cache
def _hash(*stream: int | str) -> Any:
    # The repr of a numpy number differs from that of the same Python number.
    plain = tuple(part if isinstance(part, str) else index(part) for part in stream)
    return blake2b(repr(plain).encode(), digest_size=_FOUR_SEEDS.size)


def seed_step(seed: int, iteration: int, rank: int, event: str = "step") -> None:
    """Seed the global generators for one iteration of one rank.

    The random numbers of the iteration are then a function of the arguments.

    Args:
        seed: the seed of the run, any integer.
        iteration: the iteration, from 0.
        rank: the rank of this process.
        event: the name of the code that draws the numbers: a step, or an event between steps such
            as an evaluation.
    """
    for_device = seed_on_host(iteration, event, seed, rank)
    module = device_module()
    # Some kinds of devices (mps) are always initialised and have no such function.
    if module is not None and getattr(module, "is_initialized", lambda: True)():
        # The model may be on another device than the current one, or on several.
        getattr(module, "manual_seed_all", module.manual_seed)(for_device)


@cache
def device_module() -> Any:
    """The module of the current accelerator, such as ``torch.cuda``; None if there is none."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return device and torch.get_device_module(device)
