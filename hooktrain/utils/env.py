"""The seeds of the global generators of random numbers."""

import logging
import os
import random
from functools import cache
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)

_python_generator = random._inst
_seed_python = super(random.Random, _python_generator).seed


def seed_all_rng(seed: int | None = None) -> int:
    """Seed the global generators of Python, numpy and torch, on the CPU and on all devices.

    Args:
        seed: from 0 to 2^32 - 1; None draws one from the operating system and logs it.

    Returns:
        The seed that was used.

    Raises:
        ValueError: the seed is out of range; nothing is seeded then.
    """
    if seed is None:
        seed = int.from_bytes(os.urandom(4), "little")
        logger.info("Seeding with the randomly drawn seed %d", seed)
    np.random.seed(seed)  # first, since it refuses what is out of range
    random.seed(seed)
    torch.manual_seed(seed)
    return seed


def seed_on_host(seed: int) -> None:
    """Seed the global generators of Python and numpy, and torch's of the CPU, at little cost.

    ``torch.manual_seed`` visits every kind of device, which takes longer than a small step.

    Args:
        seed: from 0 to 2^63 - 1.
    """
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    # As random.seed(seed), which first checks the type of its argument at some length.
    _seed_python(seed)
    _python_generator.gauss_next = None  # type: ignore[attr-defined]


def seed_step(
    seed: int,
    iteration: int,
    rank: int,
) -> None:
    """Seed the global generators for one iteration of one rank.

    What is random in a step is then a function of these three numbers.

    Args:
        seed: of the run, any integer.
        iteration: the iteration.
        rank: the rank of this process.
    """
    mixed = (
        seed * 0x9E3779B97F4A7C15
        + iteration * 0xBF58476D1CE4E5B9
        + rank * 0x94D049BB133111EB
    )
    mixed &= 0x7FFFFFFFFFFFFFFF
    mixed ^= mixed >> 32  # torch's generator of the CPU and numpy use the lower 32 bits
    seed_on_host(mixed)
    module = device_module()
    # Some kinds of device (mps) have no state of being uninitialised.
    if module is not None and getattr(module, "is_initialized", lambda: True)():
        module.manual_seed(mixed)


@cache
def device_module() -> Any:
    """The module of the current accelerator, such as ``torch.cuda``; None if there is none."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return device and torch.get_device_module(device)
