import contextvars
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hooktrain.events import (
    EventStorage,
    HistoryBuffer,
    JSONWriter,
    get_event_storage,
    has_event_storage,
    load_json_metrics,
)

# HistoryBuffer


def filled(*values: float, max_length: int = 10_000) -> HistoryBuffer:
    history = HistoryBuffer(max_length)
    for value in values:
        history.update(value)
    return history


def test_median_and_avg_agree_with_numpy_over_every_window() -> None:
    values = np.random.default_rng(0).normal(size=11).tolist()
    history = filled(*values)
    for window in range(1, 14):
        recent = values[-window:]
        assert history.median(window) == np.median(recent)
        assert history.avg(window) == pytest.approx(np.mean(recent), rel=1e-14)
    assert history.global_avg() == pytest.approx(np.mean(values), rel=1e-14)


def test_the_global_average_recovers_from_a_nan_and_an_infinity() -> None:
    assert filled(1.0, math.nan, math.inf, -math.inf, 3.0).global_avg() == 2.0
    assert math.isnan(filled(math.nan).global_avg())


def test_windows_of_iterations_end_at_the_last_value() -> None:
    history = HistoryBuffer()
    for iteration in (0, 10, 10, 29):
        history.update(float(iteration), iteration)
    assert [len(history.recent(w)) for w in (1, 19, 20, 29, 30)] == [1, 1, 3, 3, 4]
    assert [history.avg(w) for w in (19, 20, 30)] == [29.0, 49 / 3, 12.25]
    assert [history.median(w) for w in (19, 20, 30)] == [29.0, 10.0, 10.0]
    assert history.since(10) == [(10.0, 10), (10.0, 10), (29.0, 29)]
    assert history.since(30) == []
    assert history.since(-1) == history.values()


# Scalars


def test_a_scalar_is_stamped_with_the_current_iteration_or_the_one_given() -> None:
    storage = EventStorage(start_iter=7)
    storage.put_scalar("lr", 0.5)
    storage.step()
    storage.put_scalars(lr=0.25)
    storage.iter = 20
    storage.put_scalars(lr=0.125, cur_iter=3)
    storage.put_scalars(accuracy=0.5, smoothing_hint=False)
    assert storage.history("lr").values() == [(0.5, 7), (0.25, 8), (0.125, 3)]
    assert storage.latest() == {"lr": (0.125, 3), "accuracy": (0.5, 20)}
    assert storage.smoothing_hints() == {"lr": True, "accuracy": False}
    assert storage.iter == storage.iteration == 20


ONES = [1, True, 1.0, np.float32(1), np.int64(1), np.bool_(True), np.ones(1)]
TENSORS = {
    1.0: torch.tensor(True),
    2.0**40 + 1: torch.tensor(2**40 + 1),
    0.1: torch.tensor(0.1, dtype=torch.float64),
    0.10009765625: torch.full((1, 1), 0.1, dtype=torch.bfloat16, requires_grad=True),
}


@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.parametrize(
    ("value", "expected"),
    [*((one, 1.0) for one in ONES), *((v, k) for k, v in TENSORS.items())],
)
def test_every_kind_of_number_becomes_the_exact_float(
    value: Any, expected: float, place: str, request: pytest.FixtureRequest
) -> None:
    if place == "device":
        request.getfixturevalue("transfers")
    storage = EventStorage()
    storage.put_scalar("x", value)
    ((stored, _),) = storage.history("x").values()
    assert type(stored) is float
    assert stored == expected


@pytest.mark.parametrize(
    "value",
    [
        *("1", None, [1.0], 1j, torch.tensor(1j), np.complex64(1)),
        *(torch.ones(2, 3), np.ones((2, 3)), torch.ones(2, 3).to("meta")),
    ],
)
def test_what_is_not_one_real_number_is_refused_by_name(value: Any) -> None:
    storage = EventStorage()
    with pytest.raises(TypeError, match="'x'"):
        storage.put_scalar("x", value)
    assert storage.histories() == {}


@pytest.mark.parametrize("third", [32, 1, 0.5, None])
def test_a_number_of_samples_is_no_smoothing_hint(third: Any) -> None:
    storage = EventStorage()
    message = f"third argument.*'acc'.*not {third!r}.*no weight"
    with pytest.raises(TypeError, match=message):
        storage.put_scalar("acc", 0.5, third)
    with pytest.raises(TypeError, match=message):
        storage.put_scalars(acc=0.5, smoothing_hint=third)
    assert storage.latest() == {}
    storage.put_scalar("acc", 0.5, False)
    assert storage.smoothing_hints() == {"acc": False}


def test_the_first_smoothing_hint_of_a_metric_stays() -> None:
    storage = EventStorage()
    storage.put_scalar("lr", 0.5, smoothing_hint=False)
    storage.put_scalar("lr", 0.25)
    assert storage.smoothing_hints() == {"lr": False}
    assert storage.history("lr").values() == [(0.5, 0), (0.25, 0)]


def test_latest_with_smoothing_hint_is_a_median_where_hinted() -> None:
    storage = EventStorage()
    for storage.iter in range(30):
        storage.put_scalar("loss", float(storage.iter**2))
        storage.put_scalar("lr", float(storage.iter), smoothing_hint=False)
        if storage.iter in (0, 5, 24):
            storage.put_scalar("rare", 0.0)
    # The squares of 25 ... 29, and of 10 ... 29.
    assert storage.latest_with_smoothing_hint(5)["loss"] == (27.0**2, 29)
    assert storage.latest_with_smoothing_hint()["loss"] == ((19.0**2 + 20.0**2) / 2, 29)
    assert storage.latest_with_smoothing_hint(5)["lr"] == (29.0, 29)
    assert storage.count_samples("rare") == 2
    assert storage.count_samples("rare", window_size=19) == 1


@pytest.mark.parametrize("read", [EventStorage.count_samples, EventStorage.history])
def test_an_unknown_name_is_a_key_error(
    read: Callable[[EventStorage, str], Any],
) -> None:
    storage = EventStorage()
    storage.put_scalar("total_loss", 1.0)
    with pytest.raises(KeyError, match="'totl_loss'"):
        read(storage, "totl_loss")
    assert list(storage.histories()) == ["total_loss"]


def test_all_pending_tensors_come_in_one_transfer_in_order(
    transfers: list[int],
) -> None:
    storage, total = EventStorage(), torch.zeros((), dtype=torch.float64)
    for storage.iter in range(20):
        storage.put_scalars(a=torch.tensor(storage.iter), c=1.5)
        storage.put_scalar("b", torch.tensor([storage.iter / 2]))
        storage.put_scalar("total", total if storage.iter % 2 else storage.iter)
        total += 1  # a write that comes later does not change the metric
    assert transfers == []
    assert storage.history("a").values() == [(float(i), i) for i in range(20)]
    assert storage.history("b").values() == [(i / 2, i) for i in range(20)]
    assert storage.history("total").values() == [(float(i), i) for i in range(20)]
    assert storage.latest()["c"] == (1.5, 19)
    assert transfers == [50]


def test_the_queue_of_pending_tensors_is_bounded(transfers: list[int]) -> None:
    storage = EventStorage()
    value = torch.tensor(1.0)
    for _ in range(4095):
        storage.put_scalar("loss", value)
    assert transfers == []
    storage.put_scalar("loss", value)
    assert transfers == [4096]


def test_a_name_scope_ends_with_an_exception() -> None:
    storage = EventStorage()
    with pytest.raises(ZeroDivisionError), storage.name_scope("stage0"):  # noqa: PT012
        storage.put_scalar("loss", 1.0)
        with storage.name_scope("head/"):
            storage.put_scalar("loss", 2.0)
            storage.put_image("mask", torch.zeros(1, 2, 2))
            storage.put_histogram("weight", torch.ones(2))
        raise ZeroDivisionError
    storage.put_scalar("loss", 3.0)
    assert list(storage.latest()) == ["stage0/loss", "stage0/head/loss", "loss"]
    assert storage._vis_data[0][0] == "stage0/head/mask"
    assert storage._histograms[0]["tag"] == "stage0/head/weight"


# The current storage


def test_the_innermost_storage_is_the_current_one_also_after_an_exception() -> None:
    with EventStorage() as outer:
        assert get_event_storage() is outer
        with pytest.raises(ZeroDivisionError), EventStorage() as inner:  # noqa: PT012
            assert get_event_storage() is inner
            raise ZeroDivisionError
        assert get_event_storage() is outer
    assert not has_event_storage()
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


# Images and histograms


@pytest.mark.parametrize(
    "array", [torch.rand(3, 2, 5), np.full((1, 2, 2), 255, dtype=np.uint8)]
)
def test_images_are_copied_with_their_iteration(array: Any) -> None:
    storage, expected = EventStorage(4), torch.as_tensor(array).clone()
    storage.put_image("photo", array)
    array[:] = 0
    ((name, image, iteration),) = storage._vis_data
    assert (name, iteration) == ("photo", 4)
    assert torch.equal(image, expected)
    storage.clear_images()
    assert not storage._vis_data


@pytest.mark.parametrize("shape", [(4, 4), (4, 4, 3), (1, 3, 4, 4), (2, 4, 4)])
def test_an_image_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    storage = EventStorage()
    with pytest.raises(ValueError, match="'photo'") as error:
        storage.put_image("photo", torch.zeros(shape))
    assert str(shape) in str(error.value)
    assert not storage._vis_data


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_histogram_counts_all_elements(dtype: torch.dtype) -> None:
    storage = EventStorage(9)
    values = torch.tensor([[0.0, 1.0, 1.5], [3.0, 4.0, 4.0]], dtype=dtype)
    storage.put_histogram("weight", values, bins=4)
    assert list(storage._histograms) == [
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
    assert not storage._histograms


def test_the_last_64_images_are_kept() -> None:
    storage = EventStorage()
    for i in range(65):
        storage.put_image(f"image{i}", torch.zeros(1, 1, 1))
    names = [name for name, _, _ in storage._vis_data]
    assert names == [f"image{i}" for i in range(1, 65)]


def test_a_metric_that_comes_after_a_result_of_its_name_gives_that_another_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.json"
    writer = JSONWriter(path)
    with EventStorage() as storage, caplog.at_level("INFO"):
        for storage.iter in range(4):
            storage.put_results(
                {"acc": 10.0 + storage.iter, "eval/acc": 20.0}, storage.iter
            )
            writer.write()
        assert caplog.messages == []
        for storage.iter in range(4, 6):
            storage.put_scalar("acc", storage.iter)
            storage.put_results({"acc": 10.0 + storage.iter}, storage.iter)
            writer.write()
        loaded = EventStorage()
        loaded.load_state_dict(storage.state_dict())
    rows = load_json_metrics(path)
    assert [row["acc"] for row in rows] == [10.0, 11.0, 12.0, 13.0, 4.0, 4.5]
    assert [row.get("eval/acc") for row in rows] == [20.0] * 4 + [None] * 2
    assert [row.get("eval/eval/acc") for row in rows] == [None] * 4 + [14.0, 15.0]
    assert [row["iteration"] for row in rows] == [0, 1, 2, 3, 4, 5]
    for each in (storage, loaded):
        assert each.history("eval/acc").values() == [(20.0, i) for i in range(4)]
        assert each.results().keys() == {"acc", "eval/acc"}
        assert each.results()["acc"] is each.history("eval/eval/acc")
        assert each.history("eval/eval/acc").latest() == 15.0
        assert each.history("acc").latest() == 5.0
    (message,) = caplog.messages
    assert "'acc'" in message
    assert "'eval/eval/acc'" in message


# The state


def test_a_loaded_storage_gives_the_same_answers(
    tmp_path: Path, transfers: list[int]
) -> None:
    storage = EventStorage()
    for storage.iter in range(1030):
        storage.put_scalar("loss", torch.tensor(1.0 / (storage.iter + 1)))
        storage.put_scalar("lr", 0.1, smoothing_hint=False)
    storage.put_scalar("accuracy", math.nan, smoothing_hint=False, cur_iter=40)
    torch.save(storage.state_dict(), tmp_path / "state.pth")

    loaded = EventStorage(3)
    loaded.put_scalar("forgotten", torch.tensor(1.0))
    loaded.load_state_dict(torch.load(tmp_path / "state.pth", weights_only=True))
    assert loaded.iter == 1029
    assert list(loaded.latest()) == ["loss", "lr", "accuracy"]
    smoothed = [str(s.latest_with_smoothing_hint()) for s in (loaded, storage)]
    assert smoothed[0] == smoothed[1]
    assert loaded.smoothing_hints() == storage.smoothing_hints()
    assert loaded.history("loss").values() == storage.history("loss").values()[-1000:]
    assert loaded.history("loss").global_avg() == storage.history("loss").global_avg()


def test_a_state_of_an_earlier_revision_has_the_counts_of_writers_and_both_kinds_in_one_dict(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.json"
    with EventStorage() as storage:
        storage.put_scalar("loss", 1.0)
        storage.put_scalar("acc", 5.0, smoothing_hint=False)
        storage.put_scalar("eta_seconds", 9.0, smoothing_hint=False)
        JSONWriter(path).write()
        state = storage.state_dict()
    for history in state["metrics"].values():
        del history["written"], history["result"], history["reproducible"]
    counts = {"loss": 1, "acc": 1, "eta_seconds": 1}
    state["written_counts"] = {"metrics.json": counts}
    with EventStorage() as loaded:
        loaded.load_state_dict(state)
        loaded.iter = 1
        loaded.put_results({"acc": 6.0}, 1)
        JSONWriter(path).write()
    rows = load_json_metrics(path)
    assert [(row["iteration"], row["acc"]) for row in rows] == [(0, 5.0), (1, 6.0)]
    assert list(loaded.results()) == ["acc"]


def test_a_result_that_is_named_like_a_column_of_the_files_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    storage = EventStorage(3)
    storage.put_results({"mean_loss": 123.0, "accuracy": 0.5}, 3)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "'mean_loss'" in warning
    assert "'eval/mean_loss'" in warning
    assert storage.latest() == {"eval/mean_loss": (123.0, 3), "accuracy": (0.5, 3)}


def test_two_results_of_one_name_in_one_iteration_are_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    storage = EventStorage()
    for iteration in (3, 7, 11):
        storage.put_results({"twice": 0.5, "once": 0.5}, iteration)
        storage.put_results({"once": 0.5}, iteration)  # the same weights and data
    assert caplog.messages == []
    for iteration in (15, 19):
        storage.put_results({"twice": 0.5}, iteration)
        storage.put_results({"twice": 0.75}, iteration)
    [message] = caplog.messages
    assert "'twice'" in message


def test_a_value_beside_one_that_the_trainer_records_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    storage = EventStorage()
    for storage.iter in range(4):
        storage.put_scalar("accuracy", 0.5)  # of each accumulated batch
        storage.put_scalar("accuracy", 0.75)
        storage.put_scalar("time", 0.5)
    storage.latest()
    assert caplog.messages == []
    for storage.iter in range(4, 8):
        storage.put_scalar("data_time", 0.5)
        storage.put_scalar("data_time", 0.75)
        storage.latest()
    [message] = caplog.messages
    assert "'data_time'" in message


def test_what_projects_of_detectron2_read_of_a_storage_is_complete() -> None:
    storage = EventStorage(7)
    storage.put_scalar("loss", 1.0)
    storage.put_scalar("loss", 3.0)
    storage.put_image("photo", torch.zeros(1, 1, 1))
    assert storage._latest_scalars == {"loss": (3.0, 7)}
    assert storage._history["loss"].avg(2) == 2.0
    assert storage._history["loss"]._data[-1] == (3.0, 7)
    assert [name for name, _, _ in storage._vis_data] == ["photo"]


def test_a_result_that_is_named_like_a_column_of_the_files_gets_another_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    storage = EventStorage(3)
    with caplog.at_level("INFO"):
        storage.put_results({"mean_loss": 123.0, "accuracy": 0.5}, 3)
    (message,) = caplog.messages
    assert "'mean_loss'" in message
    assert "'eval/mean_loss'" in message
    assert storage.latest() == {"eval/mean_loss": (123.0, 3), "accuracy": (0.5, 3)}
