"""Helpers that log less often than they are called."""

import logging
import time
from collections.abc import Iterator

import pytest

from hooktrain.utils import logger as logger_module
from hooktrain.utils.logger import (
    close_logger,
    create_small_table,
    log_every_n,
    log_every_n_seconds,
    log_first_n,
)

NAME = "hooktrain_of_this_test"


@pytest.fixture(autouse=True)
def _undo() -> Iterator[None]:
    yield
    close_logger(NAME)
    for counts in (
        logger_module._first_n,
        logger_module._every_n,
        logger_module._last_logged_at,
    ):
        counts.clear()


def test_log_first_n_stops_after_n_calls_from_one_line(caplog: pytest.LogCaptureFixture) -> None:
    for i in range(5):
        log_first_n(logging.WARNING, f"here {i}", 2)
        log_first_n(logging.WARNING, f"there {i}")
    assert caplog.messages == ["here 0", "there 0", "here 1"]


def test_log_first_n_can_count_equal_messages(caplog: pytest.LogCaptureFixture) -> None:
    log_first_n(logging.WARNING, "counted by message", key="message")
    for message in ("counted by message", "another message"):
        log_first_n(logging.WARNING, message, key="message")
    assert caplog.messages == ["counted by message", "another message"]


def test_log_first_n_can_count_equal_messages_from_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for message in ("a", "b", "a"):
        log_first_n(logging.WARNING, message, key=("caller", "message"))
    log_first_n(logging.WARNING, "a", key=("caller", "message"))
    assert caplog.messages == ["a", "b", "a"]


def test_the_level_is_part_of_what_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    for level in (logging.WARNING, logging.ERROR, logging.WARNING):
        log_first_n(level, "hello")
    assert [r.levelname for r in caplog.records] == ["WARNING", "ERROR"]


def test_log_every_n_logs_the_first_of_every_n(caplog: pytest.LogCaptureFixture) -> None:
    for i in range(7):
        log_every_n(logging.WARNING, str(i), 3)
    assert caplog.messages == ["0", "3", "6"]


def test_log_every_1_logs_always(caplog: pytest.LogCaptureFixture) -> None:
    for i in range(3):
        log_every_n(logging.WARNING, str(i))
    assert caplog.messages == ["0", "1", "2"]


def test_the_helpers_do_not_share_counters(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        for helper in (log_first_n, log_every_n, log_every_n_seconds):
            helper(logging.WARNING, helper.__name__, 2)
    expected = ["log_first_n", "log_every_n", "log_every_n_seconds", "log_first_n"]
    assert caplog.messages == expected


def test_log_every_n_seconds_waits_on_a_clock_that_never_jumps(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 0.0)
    for now in (0.0, 1.0, 4.9, 5.0, 9.9, 12.0, 16.9):
        monkeypatch.setattr(time, "monotonic", lambda now=now: now)
        log_every_n_seconds(logging.WARNING, str(now), 5)
    assert caplog.messages == ["0.0", "5.0", "12.0"]


@pytest.mark.parametrize("helper", [log_first_n, log_every_n, log_every_n_seconds])
def test_helpers_log_as_the_line_that_called_them(
    caplog: pytest.LogCaptureFixture, helper: object
) -> None:
    helper(logging.WARNING, "hello")  # type: ignore[operator]
    helper(logging.WARNING, "named", name="somebody")  # type: ignore[operator]
    ours, named = caplog.records
    assert ours.name == __name__
    assert ours.funcName == "test_helpers_log_as_the_line_that_called_them"
    assert named.name == "somebody"


def test_a_script_logs_as_the_package(caplog: pytest.LogCaptureFixture) -> None:
    program = "log_first_n(30, 'hello')"
    exec(
        compile(program, "script.py", "exec"), {"__name__": "__main__", "log_first_n": log_first_n}
    )
    assert caplog.records[0].name == "hooktrain"


def test_a_file_whose_path_looks_like_the_logger_is_a_caller_like_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    program = compile("log_first_n(30, text)", "/home/me/utils/logger.py", "exec")
    for text in ("one", "two"):
        exec(program, {"__name__": "mine", "log_first_n": log_first_n, "text": text})
    assert [(r.name, r.message) for r in caplog.records] == [("mine", "one")]


@pytest.mark.parametrize("helper", [log_first_n, log_every_n])
def test_a_count_below_one_is_refused(helper: object) -> None:
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        helper(logging.WARNING, "hello", 0)  # type: ignore[operator]


@pytest.mark.parametrize("key", ["line", (), ("caller", "line")])
def test_an_unknown_key_is_refused(key: object) -> None:
    with pytest.raises(ValueError, match="key must be 'caller', 'message'"):
        log_first_n(logging.WARNING, "hello", key=key)  # type: ignore[arg-type]


def test_a_small_table_has_the_keys_on_top() -> None:
    assert create_small_table({"step": 10, "loss": 0.12345, "name": "x"}) == (
        "|  step  |  loss  |  name  |\n|:------:|:------:|:------:|\n|   10   | 0.123  |   x    |"
    )


def test_a_table_of_nothing_is_empty() -> None:
    assert create_small_table({}) == ""
