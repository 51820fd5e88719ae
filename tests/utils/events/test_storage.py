import contextvars
import logging
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hooktrain.utils.events import EventStorage, get_event_storage, has_event_storage


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
    with pytest.raises(TypeError, match="'x' must be a number or a tensor with one"):
        storage.put_scalar("x", value)
    assert storage.histories() == {}
    assert storage.smoothing_hints() == {}


@pytest.mark.parametrize("value", [torch.ones(2, 3), np.ones((2, 3)), torch.ones(2, 3).to("meta")])
def test_more_than_one_element_is_refused_by_name(value: Any) -> None:
    storage = EventStorage()
    with pytest.raises(TypeError, match="'x' must be a number or a tensor with one"):
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


def test_the_innermost_storage_is_the_current_one() -> None:
    assert not has_event_storage()
    with EventStorage() as outer:
        assert get_event_storage() is outer
        with EventStorage() as inner:
            assert get_event_storage() is inner
        assert get_event_storage() is outer
    assert not has_event_storage()


def test_outside_of_a_storage_the_error_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match="with EventStorage"):
        get_event_storage()


def test_a_storage_is_current_in_its_own_thread_and_context_only() -> None:
    seen: list[bool] = []
    with EventStorage() as storage:
        thread = threading.Thread(target=lambda: seen.append(has_event_storage()))
        thread.start()
        thread.join()
        context = contextvars.copy_context()
    assert seen == [False]
    assert context.run(get_event_storage) is storage
    assert not has_event_storage()


def test_an_exception_leaves_the_storage() -> None:
    with pytest.raises(ZeroDivisionError), EventStorage():
        raise ZeroDivisionError
    assert not has_event_storage()


def test_leaving_storages_out_of_order_is_an_error() -> None:
    outer, inner = EventStorage(), EventStorage()
    with outer:
        inner.__enter__()
        with pytest.raises(RuntimeError, match="the last one entered first"):
            outer.__exit__(None, None, None)
        inner.__exit__(None, None, None)
    with pytest.raises(RuntimeError, match="in its thread"):
        outer.__exit__(None, None, None)


def test_a_name_scope_is_put_before_all_names_and_nests() -> None:
    storage = EventStorage()
    with storage.name_scope("stage0"):
        storage.put_scalar("loss", 1.0)
        with storage.name_scope("head/"):
            storage.put_scalar("loss", 2.0)
            storage.put_image("mask", torch.zeros(1, 2, 2))
            storage.put_histogram("weight", torch.ones(2))
    storage.put_scalar("loss", 3.0)
    assert list(storage.latest()) == ["stage0/loss", "stage0/head/loss", "loss"]
    assert storage.images()[0][0] == "stage0/head/mask"
    assert storage.histograms()[0]["tag"] == "stage0/head/weight"


def test_a_name_scope_ends_with_an_exception() -> None:
    storage = EventStorage()
    with pytest.raises(ZeroDivisionError), storage.name_scope("stage0"):
        raise ZeroDivisionError
    storage.put_scalar("loss", 1.0)
    assert list(storage.latest()) == ["loss"]


def test_images_are_copied_with_their_iteration_and_cleared() -> None:
    storage = EventStorage(4)
    image = torch.rand(3, 2, 5)
    array = np.full((1, 2, 2), 255, dtype=np.uint8)
    expected = image.clone()
    storage.put_image("photo", image)
    storage.put_image("mask", array)
    image.zero_()
    array[:] = 0
    (first, second) = storage.images()
    assert first[0] == "photo"
    assert torch.equal(first[1], expected)
    assert first[2] == 4
    assert torch.equal(second[1], torch.full((1, 2, 2), 255, dtype=torch.uint8))
    storage.clear_images()
    assert storage.images() == []


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *[(s, torch.float32) for s in [(4, 4), (4, 4, 3), (1, 3, 4, 4), (2, 4, 4), (3, 0, 4)]],
        ((3, 4, 4), torch.int64),
    ],
)
def test_an_image_of_another_shape_or_type_is_refused(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    storage = EventStorage()
    with pytest.raises(ValueError, match=r"'photo' must be uint8 .*, of shape \(channels") as error:
        storage.put_image("photo", torch.zeros(shape, dtype=dtype))
    assert f"{dtype}, {shape}" in str(error.value)
    assert storage.images() == []


def test_a_histogram_counts_all_elements() -> None:
    storage = EventStorage(9)
    storage.put_histogram("weight", torch.tensor([[0.0, 1.0, 1.5], [3.0, 4.0, 4.0]]), bins=4)
    assert storage.histograms() == [
        {
            "tag": "weight",
            "min": 0.0,
            "max": 4.0,
            "num": 6,
            "sum": 13.5,
            "sum_squares": 44.25,
            "bucket_limits": [1.0, 2.0, 3.0, 4.0],
            "bucket_counts": [1, 2, 0, 3],
            "global_step": 9,
        }
    ]
    storage.clear_histograms()
    assert storage.histograms() == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.float64])
def test_a_histogram_of_equal_values_of_any_type_has_them_all_in_one_bin(
    dtype: torch.dtype,
) -> None:
    storage = EventStorage()
    storage.put_histogram("weight", torch.full((10, 10), 2, dtype=dtype))
    counts = storage.histograms()[0]["bucket_counts"]
    assert len(counts) == 1000
    assert sorted(counts)[-2:] == [0, 100]


@pytest.mark.parametrize(
    ("values", "bins"), [([], 9), ([1.0, math.nan], 9), ([math.inf, 1.0], 9), ([1.0], 0)]
)
def test_a_histogram_of_nothing_or_of_nan_or_without_bins_is_refused(
    values: list[float], bins: int
) -> None:
    storage = EventStorage()
    with pytest.raises(ValueError, match=r"zero-size|not finite|bins"):
        storage.put_histogram("weight", torch.tensor(values), bins)
    assert storage.histograms() == []


def test_queues_are_bounded_with_one_warning_a_storage(caplog: pytest.LogCaptureFixture) -> None:
    storage = EventStorage()
    with caplog.at_level(logging.WARNING):
        for i in range(64):
            storage.put_image(f"image{i}", torch.zeros(1, 1, 1))
            storage.put_histogram(f"histogram{i}", torch.ones(1), bins=1)
        assert caplog.records == []
        for i in range(64, 70):
            storage.put_image(f"image{i}", torch.zeros(1, 1, 1))
            storage.put_histogram(f"histogram{i}", torch.ones(1), bins=1)
    assert [name for name, _, _ in storage.images()] == [f"image{i}" for i in range(6, 70)]
    assert [h["tag"] for h in storage.histograms()] == [f"histogram{i}" for i in range(6, 70)]
    assert len(caplog.records) == 1
    assert "the oldest are dropped" in caplog.text


def test_a_loaded_storage_gives_the_same_answers(tmp_path: Path, transfers: list[int]) -> None:
    storage = EventStorage()
    for iteration in range(1030):
        storage.iter = iteration
        storage.put_scalar("loss", torch.tensor(1.0 / (iteration + 1)))
        storage.put_scalar("lr", 0.1, smoothing_hint=False)
    storage.put_scalar("accuracy", math.nan, smoothing_hint=False, cur_iter=40)
    torch.save(storage.state_dict(), tmp_path / "state.pth")

    loaded = EventStorage(3)
    loaded.put_scalar("forgotten", torch.tensor(1.0))
    loaded.load_state_dict(torch.load(tmp_path / "state.pth", weights_only=True))
    assert loaded.iter == 1029
    assert list(loaded.latest()) == ["loss", "lr", "accuracy"]
    assert str(loaded.latest()) == str(storage.latest())
    assert str(loaded.latest_with_smoothing_hint()) == str(storage.latest_with_smoothing_hint())
    assert loaded.smoothing_hints() == storage.smoothing_hints()
    assert loaded.count_samples("loss") == storage.count_samples("loss") == 20
    assert loaded.history("loss").values() == storage.history("loss").values()[-1000:]
    assert loaded.history("loss").global_avg() == storage.history("loss").global_avg()
    with pytest.raises(ValueError, match="smoothing_hint=False before"):
        loaded.put_scalar("lr", 0.1)


def test_an_incomplete_state_is_refused_and_changes_nothing() -> None:
    storage = EventStorage(5)
    storage.put_scalar("loss", 1.0)
    state = storage.state_dict()
    del state["metrics"]["loss"]["values"]
    state["iteration"] = 9
    with pytest.raises(KeyError, match="values"):
        storage.load_state_dict(state)
    assert storage.iter == 5
    assert storage.latest() == {"loss": (1.0, 5)}
