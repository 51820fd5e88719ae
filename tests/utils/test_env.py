import logging
import random

import numpy as np
import pytest
import torch

from hooktrain.utils import env
from hooktrain.utils.env import seed_all_rng, seed_on_host, seed_step


def draw() -> tuple[float, float, float, list[float]]:
    """Draw from each generator; after an odd number of normal draws, each holds one value back."""
    torch_values = torch.randn(3).tolist()
    return random.gauss(0, 1), random.random(), float(np.random.randn()), torch_values


@pytest.mark.parametrize("seed", [7, 2**32 - 1])
def test_the_seed_is_that_of_the_libraries_themselves(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    draw()
    with caplog.at_level(logging.DEBUG):
        seed_all_rng(seed)
    ours = draw()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    assert draw() == ours
    assert caplog.messages == []


def test_the_numbers_of_a_step_are_those_of_seed_iteration_and_rank() -> None:
    def drawn(*numbers: int) -> tuple[float, float, float, list[float]]:
        seed_step(*numbers)
        return draw()

    first = drawn(2**63 + 1, 7, 1)  # draw() leaves a second normal value waiting
    assert drawn(2**63 + 1, 7, 1) == first
    others = [
        drawn(4, 7, 1),
        drawn(2**63 + 1, 8, 1),
        drawn(2**63 + 1, 7, 0),
        drawn(-1, 0, 0),
    ]
    assert all(a != b for other in others for a, b in zip(other, first, strict=True))


def bits() -> list[int]:
    """Eight bits from each generator: torch's, numpy's and Python's."""
    drawn = []
    for draw_bit in (
        lambda: int(torch.randint(2, ())),
        lambda: int(np.random.randint(2)),
        lambda: random.getrandbits(1),
    ):
        drawn += [draw_bit() for _ in range(8)]
    return drawn


def test_bits_of_any_two_generators_steps_or_ranks_are_uncorrelated() -> None:
    rows = []
    for iteration in range(1001):
        row = []
        for rank in (0, 1):
            seed_step(0, iteration, rank)
            row += bits()
        rows.append(row)
    columns = np.array(rows).T
    # Correlations within an iteration, and between an iteration and the next.
    found = np.corrcoef(np.vstack([columns[:, 1:], columns[:, :-1]]))
    np.fill_diagonal(found, 0)
    assert np.abs(found).max() < 5.5 / np.sqrt(1000)


class FakeDevice(list[int]):
    """A stub of ``torch.cuda``; the list has the seeds of all devices."""

    manual_seed = (
        None  # it would seed the current device only; the model may be on another
    )
    manual_seed_all = list.append

    def __init__(self, initialized: bool) -> None:
        self.is_initialized = lambda: initialized


@pytest.mark.parametrize("used", [True, False])
def test_a_device_is_seeded_for_a_step_once_it_is_in_use(
    used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeDevice(used)
    monkeypatch.setattr(env, "device_module", lambda: device)
    seed_step(1, 2, 3)
    assert len(device) == used
    assert torch.initial_seed() not in device


def test_a_seed_of_numpy_is_the_number_that_it_stands_for() -> None:
    assert seed_on_host(3, "step", np.int64(977), 0) == 3031424243
    assert seed_on_host(3, "step", 977, 0) == 3031424243
