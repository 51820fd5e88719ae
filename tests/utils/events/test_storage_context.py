"""The current storage, scopes, images, histograms and state."""

import contextvars
import logging
import math
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from hooktrain.utils.events import EventStorage, get_event_storage, has_event_storage


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
        with pytest.raises(RuntimeError, match="must be left first"):
            outer.__exit__(None, None, None)
        inner.__exit__(None, None, None)
    with pytest.raises(RuntimeError, match="must be left"):
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


@pytest.mark.parametrize("shape", [(4, 4), (4, 4, 3), (1, 3, 4, 4), (2, 4, 4), (3, 0, 4)])
def test_an_image_of_another_shape_is_refused_by_name_and_shape(shape: tuple[int, ...]) -> None:
    storage = EventStorage()
    with pytest.raises(ValueError, match=r"'photo' must have the shape \(channels") as error:
        storage.put_image("photo", torch.zeros(shape))
    assert str(shape) in str(error.value)
    assert storage.images() == []


def test_an_image_of_another_type_is_refused() -> None:
    storage = EventStorage()
    with pytest.raises(TypeError, match=r"'photo' must be uint8 .* torch.int64"):
        storage.put_image("photo", torch.zeros(3, 4, 4, dtype=torch.int64))
    with pytest.raises(TypeError, match="'photo' must be a tensor or an array"):
        storage.put_image("photo", "photo.png")  # type: ignore[arg-type]


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


@pytest.mark.parametrize("values", [torch.ones(0), torch.tensor([1.0, math.nan])])
def test_a_histogram_of_nothing_or_nan_is_refused_by_name(values: Tensor) -> None:
    with pytest.raises(ValueError, match="'weight' needs finite values"):
        EventStorage().put_histogram("weight", values)


def test_a_histogram_without_bins_is_refused() -> None:
    with pytest.raises(ValueError, match="bins=0"):
        EventStorage().put_histogram("weight", torch.ones(2), bins=0)


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
    for iteration in range(60):
        storage.iter = iteration
        storage.put_scalar("loss", torch.tensor(1.0 / (iteration + 1)))
        storage.put_scalar("lr", 0.1, smoothing_hint=False)
    storage.put_scalar("accuracy", math.nan, smoothing_hint=False, cur_iter=40)
    torch.save(storage.state_dict(tail=30), tmp_path / "state.pth")

    loaded = EventStorage(3)
    loaded.put_scalar("forgotten", torch.tensor(1.0))
    loaded.load_state_dict(torch.load(tmp_path / "state.pth", weights_only=True))
    assert loaded.iter == 59
    assert list(loaded.latest()) == ["loss", "lr", "accuracy"]
    assert str(loaded.latest()) == str(storage.latest())
    assert str(loaded.latest_with_smoothing_hint()) == str(storage.latest_with_smoothing_hint())
    assert loaded.smoothing_hints() == storage.smoothing_hints()
    assert loaded.count_samples("loss") == storage.count_samples("loss") == 20
    assert loaded.history("loss").values() == storage.history("loss").values()[-30:]
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


def test_a_state_needs_a_tail() -> None:
    storage = EventStorage()
    storage.put_scalar("loss", 1.0)
    with pytest.raises(ValueError, match="at least 1, but got 0"):
        storage.state_dict(tail=0)
