import logging
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hooktrain.utils.env import get_rng_state, preserved_rng_state, seed_all_rng, set_rng_state


def draw() -> tuple[float, float, float, list[float]]:
    """From each generator; the number of normal draws is odd, so that one is held back in each."""
    torch_values = torch.randn(3).tolist()
    return random.gauss(0, 1), random.random(), float(np.random.randn()), torch_values


def test_the_same_seed_gives_the_same_numbers_in_every_generator() -> None:
    assert seed_all_rng(7) == 7
    first = draw()
    seed_all_rng(7)
    assert draw() == first
    seed_all_rng(8)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_the_seed_is_that_of_the_libraries_themselves() -> None:
    seed_all_rng(7)
    ours = (random.random(), np.random.rand(), torch.rand(1).item())
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    assert ours == (random.random(), np.random.rand(), torch.rand(1).item())


def test_a_drawn_seed_is_returned_logged_and_new_each_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="hooktrain.utils.env"):
        seeds = [seed_all_rng() for _ in range(3)]
    assert len(set(seeds)) == 3
    assert [str(seed) in message for seed, message in zip(seeds, caplog.messages, strict=True)]
    after_drawing = draw()
    seed_all_rng(seeds[-1])
    assert draw() == after_drawing


def test_a_given_seed_is_not_logged_and_the_environment_stays_as_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = dict(os.environ)
    with caplog.at_level(logging.DEBUG):
        seed_all_rng(1)
    assert caplog.messages == []
    assert dict(os.environ) == before


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_out_of_range_is_refused_before_anything_is_seeded(seed: int) -> None:
    seed_all_rng(0)
    expected = draw()
    seed_all_rng(0)
    with pytest.raises(ValueError, match=f"got {seed}"):
        seed_all_rng(seed)
    assert draw() == expected


def test_the_largest_seed_works() -> None:
    assert seed_all_rng(2**32 - 1) == 2**32 - 1


def test_a_restored_state_continues_every_generator_bit_for_bit(tmp_path: Path) -> None:
    seed_all_rng(3)
    draw()  # leaves half of a pair of normal numbers behind in python and numpy
    torch.save(get_rng_state(), tmp_path / "state.pth")
    expected = [draw() for _ in range(400)]  # past the 624 words of a Mersenne twister
    seed_all_rng(4)
    draw()
    set_rng_state(torch.load(tmp_path / "state.pth", weights_only=True))
    assert [draw() for _ in range(400)] == expected


def test_taking_the_state_uses_up_no_random_number() -> None:
    seed_all_rng(3)
    expected = draw()
    seed_all_rng(3)
    get_rng_state()
    assert draw() == expected


def test_a_state_is_a_copy_that_later_draws_do_not_change() -> None:
    seed_all_rng(3)
    state = get_rng_state()
    first = draw()
    draw()
    set_rng_state(state)
    assert draw() == first


def test_lists_in_place_of_tuples_are_accepted() -> None:
    state = get_rng_state()
    version, internal, gauss = state["python"]
    expected = draw()
    set_rng_state({**state, "python": [version, list(internal), gauss]})
    assert draw() == expected


class FakeDevice:
    """Stands for `torch.cuda`: a generator that may not be in use yet."""

    def __init__(self, initialized: bool) -> None:
        self.initialized = initialized
        self.state = torch.arange(16, dtype=torch.uint8)

    def is_initialized(self) -> bool:
        return self.initialized

    def get_rng_state(self) -> torch.Tensor:
        assert self.initialized, "taking a state must not initialise a device"
        return self.state

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.state = state


def use_device(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    accelerator = SimpleNamespace(
        is_available=lambda: True, current_accelerator=lambda: torch.device("cuda")
    )
    monkeypatch.setattr(torch, "accelerator", accelerator)
    monkeypatch.setattr(torch, "get_device_module", {"cuda": module}.__getitem__)


def test_the_generator_of_a_device_in_use_is_saved_and_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = FakeDevice(initialized=True)
    use_device(monkeypatch, device)
    saved = get_rng_state()
    device.state = torch.zeros(16, dtype=torch.uint8)
    set_rng_state(saved)
    assert torch.equal(device.state, torch.arange(16, dtype=torch.uint8))


def test_a_device_that_was_not_used_is_not_woken_up(monkeypatch: pytest.MonkeyPatch) -> None:
    use_device(monkeypatch, FakeDevice(initialized=False))
    assert get_rng_state().keys() == {"python", "numpy", "torch"}


def test_the_state_of_a_missing_device_is_dropped_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    state = get_rng_state()
    expected = draw()
    set_rng_state({**state, "cuda": torch.zeros(16, dtype=torch.uint8)})
    assert draw() == expected
    assert "'cuda'" in caplog.text
    assert caplog.records[0].levelno == logging.WARNING


def test_random_numbers_go_on_as_if_nothing_was_drawn_inside_also_after_an_error() -> None:
    seed_all_rng(5)
    expected = draw()
    seed_all_rng(5)

    def draw_and_fail() -> None:
        with preserved_rng_state():
            draw()
            raise KeyError

    with pytest.raises(KeyError):
        draw_and_fail()
    assert draw() == expected
