"""Metrics as lines of JSON: written, cut on a resume, read back."""

import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from faults import full_disk
from hooktrain.events import EventStorage, JSONWriter, load_json_metrics
from hooktrain.utils import comm


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.json"


def lines(path: Path) -> list[dict[str, Any]]:
    """The file as strict JSON: no NaN."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    text = path.read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_a_line_has_what_is_new_at_an_iteration(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "metrics.json"
    writer = JSONWriter(str(path), window_size=3)
    with EventStorage() as storage:
        writer.rewind(0)
        writer.write()
        writer.close()
        assert not path.parent.exists()
        for iteration, value in enumerate((9.0, 1.0, 2.0, 6.0)):
            storage.put_scalar("loss", value, cur_iter=iteration)
        storage.put_scalar("b", 2.0, cur_iter=1)
        storage.put_scalar("a", 3.0, cur_iter=3)
        for late in (0.5, 1.5):
            writer.write()
            writer.write()
            storage.put_scalar("late", late, smoothing_hint=False, cur_iter=2)
            writer.close()
            writer.close()
        writer.write()
    writer.close()
    assert path.read_text() == (
        '{"b": 2.0, "iteration": 1}\n{"a": 3.0, "iteration": 3, "loss": 2.0, '
        '"mean_loss": 3.0}\n'
        '{"iteration": 2, "late": 0.5}\n{"iteration": 2, "late": 1.5}\n'
    )


def test_a_folder_that_somebody_has_deleted_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "out" / "metrics.json"
    writer = JSONWriter(path)
    with EventStorage() as storage:
        for storage.iter in range(2):
            shutil.rmtree(path.parent, ignore_errors=True)
            storage.put_scalar("a", 1.0)
            writer.write()
    writer.close()
    assert lines(path) == [{"a": 1.0, "iteration": 1}]


def test_any_name_and_number_comes_back_from_valid_json(path: Path) -> None:
    writer = JSONWriter(path)
    with EventStorage(3) as storage:
        storage.put_scalars(a=math.nan, b=math.inf, c=-math.inf)
        storage.put_scalar('"two\n lines,', 0.1)
        writer.write()
    writer.close()
    assert lines(path) == [
        {"a": "nan", "b": "inf", "c": "-inf", '"two\n lines,': 0.1, "iteration": 3}
    ]
    (line,) = load_json_metrics(path)
    assert math.isnan(line.pop("a"))
    assert line == {"b": math.inf, "c": -math.inf, '"two\n lines,': 0.1, "iteration": 3}


def test_what_could_not_be_written_comes_with_the_next_write(path: Path) -> None:
    writer = JSONWriter(path, window_size=1)
    with EventStorage() as storage:
        storage.put_scalar("loss", 1.0)
        writer.write()
        storage.iter = 1
        storage.put_scalar("loss", 2.0)
        full = pytest.raises(OSError, match=f"File too large: '{path}'")
        with full_disk(path.stat().st_size + 10), full:
            writer.write()
        first = {"iteration": 0, "loss": 1.0, "mean_loss": 1.0}
        assert lines(path) == [first]
        writer.write()
    writer.close()
    assert lines(path) == [first, {"iteration": 1, "loss": 2.0, "mean_loss": 2.0}]


@pytest.mark.parametrize("is_loaded", [False, True])
def test_each_result_is_written_where_evaluations_follow_each_other(
    path: Path, is_loaded: bool
) -> None:
    writer = JSONWriter(path)
    with EventStorage() as storage:
        for storage.iter in range(3):
            storage.put_scalar("lr", 0.1, smoothing_hint=False)
            storage.put_results({"acc": float(storage.iter)}, storage.iter)
        if is_loaded:
            storage.load_state_dict(storage.state_dict())
        writer.write()
    assert lines(path) == [
        {"acc": 0.0, "iteration": 0},
        {"acc": 1.0, "iteration": 1},
        {"acc": 2.0, "iteration": 2, "lr": 0.1},
    ]


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
    assert [h.written for h in storage.histories().values()] == [{}]
    assert [p.name for p in path.parent.iterdir()] == ["metrics.json"]
    assert path.read_text() == "old\n"


def test_a_run_that_starts_later_keeps_the_complete_lines_before_it(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = '{"iteration": 19, "loss": 1.0}\n{"iteration": 29, "loss": "nan"}\n'
    path.write_text(
        good
        + '[1, 2]\n{}\n{"iteration": null}\n'
        + '{"iteration": 30, "loss": 2.0}\n{"iteration": 40, "lo'
    )
    with EventStorage(30):
        JSONWriter(path).rewind(30)
    assert path.read_text() == good
    assert caplog.text.count("is incomplete and left out") == 4
    assert sorted(p.name for p in path.parent.iterdir()) == [".lock", "metrics.json"]


def test_a_row_follows_one_whose_end_of_line_was_lost(path: Path) -> None:
    path.write_text('{"a": 1.0, "iteration": 0}')
    writer = JSONWriter(path)
    with EventStorage(1) as storage:
        writer.rewind(1)
        storage.put_scalar("a", 2.0)
        writer.write()
    assert lines(path) == [{"a": 1.0, "iteration": 0}, {"a": 2.0, "iteration": 1}]


def run(
    path: Path,
    start: int,
    stop: int,
    storage: EventStorage,
    checkpoint: int = -1,
    saved_first: int = -1,
) -> dict[str, Any]:
    """Iterations with a write after every 20th; returns the state after one of them.

    Or the state before it is evaluated and written, as where a checkpointer comes first.
    """
    state: dict[str, Any] = {}
    writer = JSONWriter(path)
    with storage:
        writer.rewind(start)
        for storage.iter in range(start, stop):
            storage.put_scalar("loss", math.sin(storage.iter))
            storage.put_scalar("lr", 1 / (1 + storage.iter), smoothing_hint=False)
            if storage.iter % 6 == 2:
                storage.put_scalar(
                    "accuracy", float(storage.iter), smoothing_hint=False
                )
            if storage.iter % 7 == 6:
                storage.put_scalar(
                    "late", 1.0 * storage.iter, cur_iter=storage.iter - 5
                )
            if storage.iter == saved_first:
                state = storage.state_dict()
                storage.put_scalar("after", float(storage.iter), smoothing_hint=False)
            if storage.iter % 20 == 19:
                writer.write()
            if storage.iter == checkpoint:
                state = storage.state_dict()
    writer.close()
    return state


@pytest.mark.parametrize("checkpoint", [0, 14, 19, 20, 29, 30, 38, 39, 40, 44, 59, 60])
def test_a_resumed_run_ends_with_the_file_of_an_uninterrupted_one_and_says_so(
    checkpoint: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = tmp_path / "whole.json"
    path = tmp_path / "resumed.json"
    with caplog.at_level(logging.INFO):
        run(whole, 0, 100, EventStorage())
        state = run(path, 0, 67, EventStorage(), checkpoint)
        assert caplog.messages == []
        with open(path, "a") as file:
            file.write('{"iteration": 7')  # killed while it wrote
        storage = EventStorage()
        storage.load_state_dict(state)
        kept = state["info"]["resumed.json"]
        cut = path.read_bytes()[kept:].count(b"\n")
        run(path, checkpoint + 1, 100, storage)
    assert path.read_text() == whole.read_text()
    exact = [f"Resumed exactly: {cut} rows computed again are equal"] if cut else []
    told = f"Rows of {path} after the checkpoint, which this run computes again and compares: {cut}"
    assert [m for m in caplog.messages if "incomplete" not in m] == [told, *exact]


def resumed(path: Path, change: str, start: int = 10, end: int = 30) -> EventStorage:
    """Goes on with a run that was killed; each of its iterations puts and writes values."""
    storage = EventStorage(start)
    writer = JSONWriter(path)
    with storage:
        writer.rewind(start)
        for storage.iter in range(start, end):
            bent = change if storage.iter == 17 else ""
            storage.put_scalar("total_loss", 0.5 + (8e-9 if bent == "loss" else 0))
            storage.put_scalar("time", 2.0 if bent else 1.0)
            storage.put_scalar("val/accuracy", math.nan, smoothing_hint=False)
            writer.write()
            if bent == "twice":
                storage.put_scalar("val/accuracy", 1.0, smoothing_hint=False)
                writer.write()
    writer.close()
    return storage


def test_the_first_value_that_differs_after_a_resume_is_named_without_blame(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    for before in (10, 40):  # nothing is compared with rows of a run that began anew
        resumed(path, "", 0, before)
    assert caplog.messages == []
    resumed(path, "")
    rows = "Resumed exactly: 20 rows computed again are equal"
    assert caplog.messages[1:] == [rows]
    caplog.clear()
    # The second run of these is killed as early as it has compared three rows.
    for end in (13, 30):
        resumed(path, "time", end=end)
    assert caplog.messages[1::2] == [rows.replace("20", "3")] * 2
    caplog.clear()
    resumed(path, "twice")  # the file has fewer rows of this iteration
    resumed(path, "twice")
    assert [m for m in caplog.messages if "Not" in m] == []
    caplog.clear()
    resumed(path, "loss")
    assert caplog.messages[0].endswith("compares: 21")
    (warning,) = caplog.messages[1:]
    assert "mean_loss of iteration 17 is 0.500000001, and was 0.5 before" in warning
    assert "configuration" in warning


def test_a_run_that_begins_anew_is_not_compared_with_rows_that_its_writer_has_cut(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_text('{"a": 1.0, "iteration": 1}\n')
    writer = JSONWriter(path)
    with EventStorage() as storage, caplog.at_level(logging.INFO):
        writer.rewind(1)  # it resumes, and fails before it writes
        caplog.clear()
        writer.rewind(0)
        for storage.iter in range(2):
            storage.put_scalar("a", 2.0)
            writer.write()
    assert caplog.messages == []


def test_the_last_row_of_a_run_that_ended_is_not_missed_by_one_that_goes_on(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_text('{"a": 1.0, "iteration": 7}\n{"a": 2.0, "iteration": 9}\n')
    writer = JSONWriter(path)
    with EventStorage(9) as storage, caplog.at_level(logging.INFO):
        writer.rewind(5)
        storage.put_scalar("a", 2.0)
        writer.write()
    assert caplog.messages[1:] == ["Resumed exactly: 1 rows computed again are equal"]


def test_a_metric_that_came_after_a_save_comes_again(path: Path) -> None:
    state: dict[str, Any] = {}
    for _ in range(2):
        writer = JSONWriter(path)
        with EventStorage() as storage:
            if state:
                storage.load_state_dict(state)
                writer.rewind(1)
            else:
                storage.put_scalar("a", 1.0)
                writer.write()
                state = storage.state_dict()
            storage.put_scalar("late", 2.0, cur_iter=0)
            writer.write()
    assert lines(path) == [{"a": 1.0, "iteration": 0}, {"iteration": 0, "late": 2.0}]


def test_a_metric_that_a_resumed_run_no_longer_writes_is_named(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resumed(path, "", 0, 30)
    lines = path.read_text().splitlines()
    lines[15] = lines[15].replace("{", '{"quality": 3.0, ')
    path.write_text("\n".join(lines) + "\n")
    with caplog.at_level(logging.INFO):
        resumed(path, "")
    (warning,) = [m for m in caplog.messages if "xactly" in m]
    assert "quality of iteration 15 is 'missing', and was 3.0 before" in warning


@pytest.mark.parametrize(
    ("name", "reproducible", "is_compared"),
    [
        *(("sentiment/accuracy", True, True), ("memorised", True, True)),
        *(("utility", True, True), ("timely_loss", True, True)),
        *(("eval_time", True, False), ("tokens/s", True, False), ("FPS", True, False)),
        *(("val/latency_ms", True, False), ("max_mem", True, False)),
        *(("rate", True, True), ("rate", False, False)),
    ],
)
def test_measurements_of_the_machine_are_not_compared(
    name: str,
    reproducible: bool,
    is_compared: bool,
    path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    state: dict[str, Any] = {}
    for value, start in ((1.0, 0), (2.0, 1)):
        writer = JSONWriter(path)
        with EventStorage() as storage, caplog.at_level(logging.INFO):
            if start > 0:
                storage.load_state_dict(state)
            writer.rewind(start)
            for storage.iter in range(start, 3):
                storage.put_scalar(name, value, False, reproducible=reproducible)
                writer.write()
                if storage.iter == 0:
                    state = storage.state_dict()
        writer.close()
    (verdict,) = [m for m in caplog.messages if "esumed exactly" in m]
    assert verdict.startswith(f"Not resumed exactly: {name}") == is_compared


@pytest.mark.parametrize("hint", [True, False])
def test_the_mean_loss_is_that_of_the_first_loss_of_the_training(
    hint: bool, path: Path
) -> None:
    with EventStorage() as storage:
        storage.put_results({"val/loss": 7.0}, 0)
        for value in (1.0, 2.0, 6.0):
            storage.put_scalar("loss_a", value, hint)
            storage.put_scalar("loss_b", 9.0, hint)
        JSONWriter(path).write()
    (row,) = lines(path)
    assert row.get("mean_loss") == (3.0 if hint else None)


def test_a_mean_loss_of_the_user_stays(path: Path) -> None:
    with EventStorage() as storage:
        storage.put_scalar("loss", 1.0)
        storage.put_scalar("mean_loss", 5.0, smoothing_hint=False)
        JSONWriter(path).write()
    assert lines(path) == [{"iteration": 0, "loss": 1.0, "mean_loss": 5.0}]


def test_two_files_of_one_name_are_refused(path: Path) -> None:
    with EventStorage():
        JSONWriter(path).rewind(0)
        JSONWriter(path.with_name("rows.json")).rewind(0)
        with pytest.raises(ValueError, match=r"'metrics\.json'"):
            JSONWriter(path.parent / "val" / "metrics.json").rewind(0)


@pytest.mark.parametrize("stop", [40, 67])
def test_what_was_written_right_after_a_save_stays(stop: int, path: Path) -> None:
    whole = path.with_name("whole.json")
    run(whole, 0, 100, EventStorage(), saved_first=39)
    state = run(path, 0, stop, EventStorage(), saved_first=39)
    storage = EventStorage()
    storage.load_state_dict(state)
    run(path, 40, 100, storage)
    assert path.read_text() == whole.read_text()
    assert [line["iteration"] for line in lines(path) if "after" in line] == [39]


def test_a_result_that_came_once_more_around_a_save_is_there_twice(path: Path) -> None:
    state: dict[str, Any] = {}
    writer = JSONWriter(path)
    with EventStorage() as storage:
        for _ in range(2):
            storage.put_results({"accuracy": 1.0}, 0)
            state = storage.state_dict()
            writer.write()
    twice = path.read_text()
    with EventStorage() as storage:
        storage.load_state_dict(state)
        JSONWriter(path).rewind(1)
    assert path.read_text() == twice
    assert lines(path) == [{"accuracy": 1.0, "iteration": 0}] * 2


def test_the_size_of_the_file_in_an_earlier_checkpoint_is_used(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = run(path, 0, 67, EventStorage(), 60)
    size = state["info"].pop(path.name)
    path.write_bytes(b"")
    storage = EventStorage()
    storage.load_state_dict({**state, "file_sizes": {path.name: size}})
    with storage:
        JSONWriter(path).rewind(61)
    assert f"has 0 of {size} bytes" in caplog.text


@pytest.mark.parametrize("left", [0, 100, None])
def test_what_a_file_has_lost_is_left_out_and_named(
    left: int | None, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = run(path, 0, 67, EventStorage(), 60)
    before = path.read_bytes()
    path.unlink() if left is None else path.write_bytes(before[:left])
    storage = EventStorage()
    storage.load_state_dict(state)
    run(path, 61, 80, storage)
    complete = before[: left or 0].splitlines(keepends=True)[:-1]
    error = caplog.records[-1]
    assert error.levelname == "ERROR"
    assert error.message.startswith(
        "METRICS ARE LOST, if the checkpoint is of a run in"
    )
    kept = len(before[: left or 0])
    assert error.message.endswith(f"has {kept} of {state['info'][path.name]} bytes")
    rest = lines(path)[len(complete) :]
    assert path.read_bytes().startswith(b"".join(complete))
    assert rest[0] == {"iteration": 62, "accuracy": 62.0}
    assert rest[-1].keys() == {"iteration", "loss", "mean_loss", "lr"}


def test_lines_that_are_torn_are_left_out_with_a_warning(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_bytes(b'{"iteration": 1}\n\xff\xfe\n{"ite')
    assert load_json_metrics(path) == [{"iteration": 1}]
    assert caplog.text.count("is incomplete and left out") == 2
    assert "line 2 is" in caplog.text
    with pytest.raises(FileNotFoundError):
        load_json_metrics(path.with_name("other.json"))
