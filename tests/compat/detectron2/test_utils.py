"""Helpers that log less often than they are called, a table, a stopwatch and a seed."""

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hooktrain.compat.detectron2 import (
    CommonMetricPrinter,
    EventStorage,
    TensorboardXWriter,
    close_logger,
    create_small_table,
    get_event_storage,
    log_every_n_seconds,
    log_first_n,
    seed_all_rng,
    setup_logger,
    utils,
)


@pytest.fixture(autouse=True)
def _undo() -> Iterator[None]:
    yield
    utils._calls.clear()
    utils._last_logged_at.clear()


def test_a_logger_may_pass_its_records_on(caplog: pytest.LogCaptureFixture) -> None:
    for is_passed_on in (True, False):
        logger = setup_logger(
            name="of_detectron2", abbrev_name="d2", enable_propagation=is_passed_on
        )
        logger.info("%s", is_passed_on)
    close_logger("of_detectron2")
    assert caplog.messages == ["True"]


def test_a_small_table_has_the_keys_on_top() -> None:
    assert create_small_table({}) == ""
    assert create_small_table({"step": 10, "loss": 0.12345, "name": "x"}) == (
        "|  step  |  loss  |  name  |\n|:------:|:------:|:------:|\n|   10   | 0.123  |   x    |"
    )


def test_log_first_n_stops_after_n_calls_from_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for i in range(5):
        log_first_n(logging.WARNING, f"here {i}", 2)
        log_first_n(logging.WARNING, f"there {i}")
    assert caplog.messages == ["here 0", "there 0", "here 1"]


def test_log_first_n_can_count_equal_messages_at_a_level(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for level, message in ((30, "a"), (30, "b"), (40, "a"), (30, "b")):
        log_first_n(level, message, key="message")
    log_first_n(30, "a", key="message")
    seen = [(record.levelno, record.message) for record in caplog.records]
    assert seen == [(30, "a"), (30, "b"), (40, "a")]


def test_log_first_n_can_count_equal_messages_of_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for message in ("a", "b", "a"):
        log_first_n(logging.WARNING, message, key=("caller", "message"))
    log_first_n(logging.WARNING, "a", key=("caller", "message"))
    assert caplog.messages == ["a", "b", "a"]


def test_log_every_n_seconds_waits_on_a_clock_that_never_jumps(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 0.0)
    for now in (0.0, 1.0, 4.9, 5.0, 9.9, 12.0, 16.9):
        monkeypatch.setattr(time, "monotonic", lambda now=now: now)
        log_every_n_seconds(logging.WARNING, str(now), 5)
    assert caplog.messages == ["0.0", "5.0", "12.0"]


@pytest.mark.parametrize(
    ("module", "logged"), [("mine", "mine"), ("__main__", "hooktrain")]
)
def test_a_file_whose_path_looks_like_the_logger_is_a_caller(
    module: str, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    program = compile("log_first_n(30, text)", "/home/me/utils/logger.py", "exec")
    for text in ("one", "two"):
        exec(program, {"__name__": module, "log_first_n": log_first_n, "text": text})
    assert [(r.name, r.message) for r in caplog.records] == [(logged, "one")]


class OwnPrinter(CommonMetricPrinter):
    """With a ``write`` as copies of detectron2's have it."""

    def __init__(self, max_iter: int) -> None:
        super().__init__()
        self._max_iter = max_iter

    def write(self) -> None:
        storage = get_event_storage()
        if storage.iter != self._max_iter:
            eta = self._get_eta(storage)
            self.logger.info("eta: %s iter: %d", eta, storage.iter)


def test_a_printer_of_ones_own_knows_the_end_and_the_time_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    with EventStorage() as storage:
        printer = OwnPrinter(max_iter=4)
        for storage.iter in (0, 2, 4):
            printer.write()
        assert storage.latest()["eta_seconds"][1] == 2
    assert caplog.messages == ["eta:  iter: 0", "eta: 0:00:00 iter: 2"]


def test_a_writer_has_the_name_that_subclasses_read(tmp_path: Path) -> None:
    writer = TensorboardXWriter(str(tmp_path))
    assert writer._writer is writer.summary_writer
    writer.close()


def test_a_drawn_seed_is_new_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    seed_all_rng()
    seed_all_rng()
    first, second = (int(message.split()[-1]) for message in caplog.messages)
    assert first != second
    drawn = torch.rand(3)
    seed_all_rng(second)
    assert torch.equal(torch.rand(3), drawn)
