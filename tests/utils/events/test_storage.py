import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hooktrain.utils.events import EventStorage


def test_a_scalar_is_stamped_with_the_current_iteration_or_the_one_given() -> None:
    storage = EventStorage(start_iter=7)
    storage.put_scalar("lr", 0.5)
    storage.step()
    storage.put_scalar("lr", 0.25)
    storage.iter = 20
    storage.put_scalar("lr", 0.125, cur_iter=3)
    assert storage.history("lr").values() == [(0.5, 7), (0.25, 8), (0.125, 3)]
    assert storage.latest() == {"lr": (0.125, 3)}
    assert storage.iter == storage.iteration == 20


def test_several_scalars_are_put_at_once() -> None:
    storage = EventStorage(2)
    storage.put_scalars(loss=1.0, accuracy=0.5, smoothing_hint=False, cur_iter=1)
    assert storage.latest() == {"loss": (1.0, 1), "accuracy": (0.5, 1)}
    assert storage.smoothing_hints() == {"loss": False, "accuracy": False}


@pytest.mark.parametrize(
    "value",
    [
        1,
        True,
        1.0,
        np.float32(1),
        np.float64(1),
        np.int64(1),
        np.bool_(True),
        np.ones(1),
        torch.tensor(1),
        torch.tensor(True),
        torch.ones(1, 1, dtype=torch.bfloat16),
        torch.ones((), requires_grad=True),
    ],
)
def test_every_kind_of_number_becomes_a_float(value: Any) -> None:
    storage = EventStorage()
    storage.put_scalar("x", value)
    ((stored, _),) = storage.history("x").values()
    assert type(stored) is float
    assert stored == 1.0


@pytest.mark.parametrize("value", ["1", None, [1.0], 1j, torch.tensor(1j), np.complex64(1)])
def test_what_is_no_real_number_is_refused_by_name(value: Any) -> None:
    storage = EventStorage()
    with pytest.raises(TypeError, match="'x' must be a real number"):
        storage.put_scalar("x", value)
    assert storage.histories() == {}
    assert storage.smoothing_hints() == {}


@pytest.mark.parametrize("value", [torch.ones(2, 3), np.ones((2, 3)), torch.ones(2, 3).to("meta")])
def test_more_than_one_element_is_refused_by_name_and_shape(value: Any) -> None:
    storage = EventStorage()
    with pytest.raises(ValueError, match=r"'x' must have exactly one element.*\(2, 3\)"):
        storage.put_scalar("x", value)
    assert storage.histories() == {}


def test_another_smoothing_hint_is_refused_before_anything_is_stored() -> None:
    storage = EventStorage()
    storage.put_scalar("lr", 0.5, smoothing_hint=False)
    with pytest.raises(ValueError, match="'lr' was put with smoothing_hint=False before"):
        storage.put_scalar("lr", 0.25)
    assert storage.history("lr").values() == [(0.5, 0)]
    assert storage.smoothing_hints() == {"lr": False}


def test_latest_with_smoothing_hint_is_the_median_of_the_last_iterations_where_hinted() -> None:
    storage = EventStorage()
    for iteration in range(30):
        storage.iter = iteration
        storage.put_scalar("loss", float(iteration**2))
        storage.put_scalar("lr", float(iteration), smoothing_hint=False)
    # The squares of 25 ... 29, and of 10 ... 29.
    assert storage.latest_with_smoothing_hint(5)["loss"] == (27.0**2, 29)
    assert storage.latest_with_smoothing_hint()["loss"] == ((19.0**2 + 20.0**2) / 2, 29)
    assert storage.latest_with_smoothing_hint(5)["lr"] == (29.0, 29)


def test_count_samples_counts_the_values_of_the_last_iterations() -> None:
    storage = EventStorage()
    for iteration in (0, 5, 24):
        storage.put_scalar("loss", 0.0, cur_iter=iteration)
    assert storage.count_samples("loss") == 2
    assert storage.count_samples("loss", window_size=19) == 1


@pytest.mark.parametrize("read", [EventStorage.count_samples, EventStorage.history])
def test_an_unknown_name_suggests_the_nearest_and_creates_nothing(
    read: Callable[[EventStorage, str], Any],
) -> None:
    storage = EventStorage()
    storage.put_scalar("total_loss", 1.0)
    with pytest.raises(KeyError, match="'totl_loss'; did you mean 'total_loss'"):
        read(storage, "totl_loss")
    assert list(storage.histories()) == ["total_loss"]


def test_a_tensor_on_a_device_is_not_read_when_it_is_put() -> None:
    storage = EventStorage()
    # A tensor without data: reading it is an error.
    storage.put_scalar("loss", torch.ones((), device="meta"))
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        storage.latest()


def test_all_pending_tensors_come_in_one_transfer(transfers: list[int]) -> None:
    storage = EventStorage()
    for iteration in range(20):
        storage.iter = iteration
        storage.put_scalars(a=torch.tensor(iteration), b=torch.tensor([iteration / 2]), c=1.5)
    assert transfers == []
    assert storage.history("a").values() == [(float(i), i) for i in range(20)]
    assert storage.history("b").values() == [(i / 2, i) for i in range(20)]
    assert storage.latest() == {"a": (19.0, 19), "b": (9.5, 19), "c": (1.5, 19)}
    assert transfers == [40]


def test_a_later_write_into_the_tensor_does_not_change_the_metric(transfers: list[int]) -> None:
    storage = EventStorage()
    for dtype in (torch.float32, torch.float64):
        total = torch.ones((), dtype=dtype)
        storage.put_scalar("total", total)
        total.add_(1)
    assert storage.history("total").values() == [(1.0, 0), (1.0, 0)]


def test_values_from_a_device_are_exact_in_every_type(transfers: list[int]) -> None:
    storage = EventStorage()
    values = [
        torch.tensor(2**40 + 1),
        torch.tensor(0.1, dtype=torch.float64),
        torch.tensor(0.1),
        torch.tensor(0.1, dtype=torch.bfloat16, requires_grad=True),
        torch.tensor(True),
        torch.tensor(math.nan),
    ]
    for i, value in enumerate(values):
        storage.put_scalar(f"x{i}", value)
    stored = [value for value, _ in storage.latest().values()]
    assert stored[:5] == [v.item() for v in values[:5]]
    assert math.isnan(stored[5])


def test_a_number_does_not_overtake_a_pending_tensor(transfers: list[int]) -> None:
    storage = EventStorage()
    storage.put_scalar("loss", 1.0, cur_iter=0)
    storage.put_scalar("loss", torch.tensor(2.0), cur_iter=1)
    storage.put_scalar("loss", 3.0, cur_iter=2)
    storage.put_scalar("loss", torch.tensor(4.0), cur_iter=3)
    assert storage.history("loss").values() == [(1.0, 0), (2.0, 1), (3.0, 2), (4.0, 3)]


def test_the_queue_of_pending_tensors_is_bounded(transfers: list[int]) -> None:
    storage = EventStorage()
    value = torch.tensor(1.0)
    for _ in range(4095):
        storage.put_scalar("loss", value)
    assert transfers == []
    storage.put_scalar("loss", value)
    assert transfers == [4096]
    assert len(storage.history("loss")) == 4096


def test_a_pending_metric_has_a_smoothing_hint_already(transfers: list[int]) -> None:
    storage = EventStorage()
    storage.put_scalar("loss", torch.tensor(1.0))
    with pytest.raises(ValueError, match="smoothing_hint=True before"):
        storage.put_scalar("loss", torch.tensor(2.0), smoothing_hint=False)
    assert storage.history("loss").values() == [(1.0, 0)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_putting_a_cuda_tensor_does_not_synchronise() -> None:
    storage = EventStorage()
    value = torch.full((), 0.5, device="cuda")
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        storage.put_scalar("loss", value)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert storage.latest() == {"loss": (0.5, 0)}


def test_the_iteration_of_the_latest_value_is_known_without_reading_it() -> None:
    storage = EventStorage(3)
    assert storage.latest_iter("loss") is None
    storage.put_scalar("loss", 1.0)
    assert storage.latest_iter("loss") == 3
    storage.latest()
    assert storage.latest_iter("loss") == 3
    storage.put_scalar("loss", 1.0, cur_iter=5)
    assert storage.latest_iter("loss") == 5
