"""Metrics as a table: written, cut on a resume. What it shares with JSON is tested there."""

import csv
import math
from pathlib import Path
from typing import Any

import pytest

from hooktrain.utils.events import CSVWriter, EventStorage


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.csv"


def test_each_value_has_a_line_below_one_header_also_of_a_metric_that_comes_later(
    path: Path,
) -> None:
    writer = CSVWriter(path, window_size=3)
    with EventStorage() as storage:
        for storage.iter, value in enumerate((1.0, 9.0, 2.0)):
            storage.put_scalar("loss", value)
        writer.write()
        storage.put_scalar('a "new", one', math.nan, smoothing_hint=False)
        storage.put_scalar("iteration", math.inf)
        writer.write()
    writer.close()
    assert path.read_text() == (
        'iteration,name,value\n2,loss,2.0\n2,"a ""new"", one",nan\n2,iteration,inf\n'
    )
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[1] == {"iteration": "2", "name": 'a "new", one', "value": "nan"}


def run(
    path: Path, start: int, storage: EventStorage, checkpoint: int
) -> dict[str, Any]:
    writer = CSVWriter(path)
    state: dict[str, Any] = {}
    with storage:
        writer.rewind(start)
        for storage.iter in range(start, 60):
            storage.put_scalar("a, loss", math.sin(storage.iter))
            if storage.iter % 6 == 2:
                storage.put_scalar(
                    "accuracy", float(storage.iter), smoothing_hint=False
                )
            if storage.iter % 20 == 19:
                writer.write()
            if storage.iter == checkpoint:
                state = storage.state_dict()
    writer.close()
    return state


def test_a_resumed_run_ends_with_the_file_of_an_uninterrupted_one_and_a_new_run_keeps_it(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = run(path, 0, EventStorage(), checkpoint=30)
    whole = path.read_text()
    with open(path, "ab") as file:
        file.write(b"59,accuracy\n\0\0\0\n39,a")  # as a kill or a power cut leaves it
    storage = EventStorage()
    storage.load_state_dict(state)
    run(path, 31, storage, checkpoint=-1)
    assert path.read_text() == whole
    assert "left out 3 lines" in caplog.text

    run(path, 0, EventStorage(), checkpoint=-1)
    assert path.read_text() == path.with_name("metrics.csv.1").read_text() == whole
