"""The generators of random numbers of a process: seed them, save them, bring them back."""

import logging
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)


def seed_all_rng(seed: int | None = None) -> int:
    """Seed the global generators of Python, numpy and torch, on the CPU and on all devices.

    Args:
        seed: from 0 to 2^32 - 1; None draws one from the operating system and logs it.

    Returns:
        The seed that was used.

    Raises:
        ValueError: the seed is out of range.
    """
    if seed is None:
        seed = int.from_bytes(os.urandom(4), "little")
        logger.info("Seeding with the randomly drawn seed %d", seed)
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be in [0, 2**32), got {seed!r}")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return seed


def seed_step(seed: int, iteration: int, rank: int) -> None:
    """Seed the global generators for one iteration of one rank.

    What is random in a step is then a function of these three numbers. Each generator is seeded
    by its own cheapest means: `torch.manual_seed` visits every kind of device, which takes longer
    than a small step.

    Args:
        seed: of the run, any integer.
        iteration: the iteration.
        rank: the rank of this process.
    """
    mixed = seed * 0x9E3779B97F4A7C15 + iteration * 0xBF58476D1CE4E5B9 + rank * 0x94D049BB133111EB
    mixed &= 0x7FFFFFFFFFFFFFFF
    mixed ^= mixed >> 32  # torch's generator of the CPU and numpy use the lower 32 bits
    torch.default_generator.manual_seed(mixed)
    np.random.seed(mixed & 0xFFFFFFFF)
    random.seed(mixed)
    if (device := _device_in_use()) is not None:
        torch.get_device_module(device).manual_seed(mixed)


def get_rng_state() -> dict[str, Any]:
    """The state of the global generators of Python, numpy, torch, and the current device.

    Holds tensors and plain types only, so that `torch.load(..., weights_only=True)` reads it back.
    No device is initialised or waited for: one that has not been used has no state worth keeping.
    """
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    state = {
        "python": random.getstate(),
        "numpy": {
            # int64 holds numpy's uint32 exactly and is read by every version of torch.
            "key": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
            "pos": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
        "torch": torch.get_rng_state(),
    }
    if (device := _device_in_use()) is not None:
        state[device] = torch.get_device_module(device).get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Bring back what `get_rng_state` returned, in this or another process.

    The state of a kind of device that is not available here is left out, with a warning.
    """
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    numpy_state = state["numpy"]
    # Whatever map_location they were loaded with: states belong on the CPU.
    key = numpy_state["key"].cpu().numpy().astype(np.uint32)
    np.random.set_state(
        ("MT19937", key, numpy_state["pos"], numpy_state["has_gauss"], numpy_state["gauss"])
    )
    torch.set_rng_state(state["torch"].cpu())
    for device in state.keys() - {"python", "numpy", "torch"}:
        if device == _available_device():
            torch.get_device_module(device).set_rng_state(state[device].cpu())
        else:
            logger.warning("No device of type %r: the state of its generator is dropped", device)


@contextmanager
def preserved_rng_state() -> Iterator[None]:
    """Afterwards the global generators are as before, whatever was drawn or happened inside."""
    state = get_rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


def _available_device() -> str | None:
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    return None if device is None else device.type


def _device_in_use() -> str | None:
    device = _available_device()
    if device is None:
        return None
    # Some kinds of device (mps) have no state of being uninitialised.
    in_use = getattr(torch.get_device_module(device), "is_initialized", lambda: True)
    return device if in_use() else None
