import shutil
import sys
import threading
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.summary.writer import event_file_writer

from faults import full_disk
from hooktrain.events import EventStorage, TensorboardXWriter
from hooktrain.utils import comm


@pytest.fixture(autouse=True)
def _files_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count files from 0: within a second TensorBoard reads the tenth before the ninth."""
    monkeypatch.setattr(
        event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0)
    )


def read(folder: Path) -> EventAccumulator:
    return EventAccumulator(
        str(folder), size_guidance={"scalars": 0, "images": 0, "histograms": 0}
    ).Reload()


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(folder).Scalars(name)]


def test_scalars_images_and_histograms_arrive_in_the_file(tmp_path: Path) -> None:
    writer = TensorboardXWriter(tmp_path, window_size=3)
    with EventStorage() as storage:
        for iteration, value in enumerate((9.0, 1.0, 2.0, 6.0)):
            storage.iter = iteration
            storage.put_scalar("loss", value)
        storage.put_scalar("lr", 0.5, smoothing_hint=False, cur_iter=1)
        storage.put_image("photo", torch.rand(3, 4, 6))
        storage.put_image("mask", torch.full((1, 2, 2), 255, dtype=torch.uint8))
        storage.put_image("half", torch.rand(3, 2, 2, dtype=torch.bfloat16))
        storage.put_histogram("weight", torch.arange(12.0).reshape(3, 4), bins=3)
        writer.write()
        assert not storage._vis_data
        assert not storage._histograms
    writer.close()
    events = read(tmp_path)
    assert scalars(tmp_path, "loss") == [(3, 2.0)]
    assert scalars(tmp_path, "lr") == [(1, 0.5)]
    (photo,) = events.Images("photo")
    assert (photo.step, photo.height, photo.width) == (3, 4, 6)
    assert [event.step for event in events.Images("mask")] == [3]
    (histogram,) = events.Histograms("weight")
    value = histogram.histogram_value
    assert (histogram.step, value.num, value.min, value.max) == (3, 12.0, 0.0, 11.0)
    assert (value.sum, value.sum_squares) == (66.0, 506.0)
    assert sum(value.bucket) == 12.0


def test_the_metrics_of_an_iteration_are_one_event(tmp_path: Path) -> None:
    writer = TensorboardXWriter(tmp_path)
    with EventStorage(7) as storage:
        storage.put_scalars(loss=1.0, accuracy=0.5, lr=0.1)
        writer.write()
    writer.close()
    (file,) = tmp_path.iterdir()
    _, event = EventFileLoader(str(file)).Load()  # the first one has the version
    assert event.step == 7
    assert [value.tag for value in event.summary.value] == ["loss", "accuracy", "lr"]


def test_the_writer_of_tensorboard_is_there_at_any_time(tmp_path: Path) -> None:
    writer = TensorboardXWriter(tmp_path / "folder")
    for step in range(2):
        writer.summary_writer.add_scalar("mine", 0.5, step)
        writer.close()
    assert scalars(tmp_path / "folder", "mine") == [(0, 0.5), (1, 0.5)]


def test_a_folder_that_somebody_has_deleted_is_made_again(tmp_path: Path) -> None:
    writer = TensorboardXWriter(tmp_path / "out")
    with EventStorage() as storage:
        for storage.iter in range(2):
            storage.put_scalar("loss", 1.0)
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
            writer.write()
    writer.close()
    assert scalars(tmp_path / "out", "loss") == [(1, 1.0)]


def test_only_the_main_process_writes_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comm, "is_main_process", lambda: False)
    writer = TensorboardXWriter(tmp_path / "tb")
    with EventStorage() as storage:
        storage.put_scalar("loss", 1.0)
        storage.put_image("photo", torch.zeros(1, 2, 2))
        storage.put_histogram("weight", torch.ones(3))
        writer.write()
        assert not storage._vis_data
        assert not storage._histograms
    assert not (tmp_path / "tb").exists()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_after_a_full_disk_it_goes_on_in_another_file(tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    writer = TensorboardXWriter(tmp_path)
    with EventStorage() as storage:
        storage.put_scalar("loss", 1.0)
        writer.write()
        (file,) = tmp_path.iterdir()
        with full_disk(file.stat().st_size):
            for storage.iter in (1, 2, 3):
                storage.put_scalar("loss", 2.0)
                with pytest.raises(OSError, match="File too large"):
                    writer.write()
        writer.write()
    writer.close()
    for thread in set(threading.enumerate()) - threads:
        thread.join()  # its exception belongs to this test, not to the next
    assert scalars(tmp_path, "loss") == [(0, 1.0), (3, 2.0)]


def test_a_resumed_run_writes_what_came_after_the_last_write(tmp_path: Path) -> None:
    with EventStorage() as storage:
        for storage.iter in (0, 2, 4):
            storage.put_scalar("accuracy", storage.iter, smoothing_hint=False)
            if storage.iter == 2:
                TensorboardXWriter(tmp_path / "first").write()
    loaded = EventStorage()
    loaded.load_state_dict(storage.state_dict())
    writer = TensorboardXWriter(tmp_path / "second")
    with loaded:
        writer.rewind(6)
        writer.write()
    writer.close()
    assert scalars(tmp_path / "second", "accuracy") == [(4, 4.0)]


def test_without_the_package_it_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError, match="tensorboard"):
        TensorboardXWriter("output")
