import math
import os
from pathlib import Path

import pytest
from json_toys import lines

from hooktrain.utils import comm
from hooktrain.utils.events import EventStorage, JSONWriter, json_writer, load_json_metrics


def test_a_line_has_sorted_keys_and_the_smoothed_values(path: Path) -> None:
    writer = JSONWriter(path, window_size=3)
    with EventStorage() as storage:
        for iteration, value in enumerate((9.0, 1.0, 2.0, 6.0)):
            storage.iter = iteration
            storage.put_scalar("total_loss", value)
            storage.put_scalar("lr", value, smoothing_hint=False)
        writer.write()
    writer.close()
    assert path.read_text() == '{"iteration": 3, "lr": 6.0, "total_loss": 2.0}\n'


def test_lines_of_one_write_are_in_order_of_iteration_and_never_repeated(path: Path) -> None:
    writer = JSONWriter(path)
    with EventStorage() as storage:
        storage.put_scalar("a", 1.0, cur_iter=19)
        storage.put_scalar("b", 2.0, cur_iter=17)
        storage.put_scalar("c", 3.0, cur_iter=19)
        writer.write()
        writer.write()
        storage.put_scalar("a", 4.0, cur_iter=39)
        writer.write()
    writer.close()
    assert lines(path) == [
        {"b": 2.0, "iteration": 17},
        {"a": 1.0, "c": 3.0, "iteration": 19},
        {"a": 4.0, "iteration": 39},
    ]


def test_a_value_older_than_the_last_write_is_written_once(path: Path) -> None:
    writer = JSONWriter(path)
    with EventStorage() as storage:
        storage.put_scalar("loss", 1.0, cur_iter=19)
        writer.write()
        storage.put_scalar("late", 2.0, cur_iter=5)
        writer.write()
        writer.write()
    writer.close()
    assert lines(path) == [{"iteration": 19, "loss": 1.0}, {"iteration": 5, "late": 2.0}]


def test_nan_and_infinities_are_valid_json_and_come_back(path: Path) -> None:
    writer = JSONWriter(path)
    with EventStorage(3) as storage:
        storage.put_scalars(a=math.nan, b=math.inf, c=-math.inf, d=0.1)
        writer.write()
    writer.close()
    assert lines(path) == [
        {"a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 0.1, "iteration": 3}
    ]
    (line,) = load_json_metrics(path)
    assert math.isnan(line.pop("a"))
    assert line == {"b": math.inf, "c": -math.inf, "d": 0.1, "iteration": 3}


def test_a_metric_cannot_be_named_iteration(path: Path) -> None:
    writer = JSONWriter(path)
    with EventStorage() as storage:
        storage.put_scalar("iteration", 1.0)
        with pytest.raises(ValueError, match="'iteration'"):
            writer.write()
    assert not path.exists()


def test_the_file_is_made_by_the_first_write_with_news(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "metrics.json"
    writer = JSONWriter(str(path))
    with EventStorage() as storage:
        writer.write()
        writer.close()
        assert not path.parent.exists()
        storage.put_scalar("loss", 1.0)
        writer.write()
    writer.close()
    assert lines(path) == [{"iteration": 0, "loss": 1.0}]


def test_a_write_after_close_goes_on(path: Path) -> None:
    writer = JSONWriter(path)
    with EventStorage() as storage:
        for iteration in range(2):
            storage.put_scalar("loss", float(iteration), cur_iter=iteration, smoothing_hint=False)
            writer.write()
            writer.close()
            writer.close()
    assert lines(path) == [{"iteration": 0, "loss": 0.0}, {"iteration": 1, "loss": 1.0}]


def test_a_write_can_be_read_at_once_and_closing_brings_it_to_the_disk(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        real(descriptor)
        synced.append(path.read_text())

    monkeypatch.setattr(os, "fsync", fsync)
    writer = JSONWriter(path)
    with EventStorage() as storage:
        storage.put_scalar("loss", 1.0)
        writer.write()
    assert path.read_text() == '{"iteration": 0, "loss": 1.0}\n'
    assert synced == []
    writer.close()
    assert synced == ['{"iteration": 0, "loss": 1.0}\n']


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux' full device")
def test_what_could_not_be_written_is_still_news_and_comes_once(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_real, full = json_writer._open_to_append, [Path("/dev/full")]
    monkeypatch.setattr(
        json_writer, "_open_to_append", lambda p: open_real(full.pop() if full else p)
    )
    writer = JSONWriter(path)
    with EventStorage() as storage:
        storage.put_scalar("loss", 1.0)
        with pytest.raises(OSError, match="No space left"):
            writer.write()
        writer.write()
    writer.close()
    assert lines(path) == [{"iteration": 0, "loss": 1.0}]


def test_only_the_main_process_touches_the_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_text("old\n")
    monkeypatch.setattr(comm, "is_main_process", lambda: False)
    writer = JSONWriter(path)
    with EventStorage() as storage:
        storage.put_scalar("loss", 1.0)
        for iteration in (0, 5):
            writer.rewind(iteration)
            writer.write()
    assert [p.name for p in path.parent.iterdir()] == ["metrics.json"]
    assert path.read_text() == "old\n"
