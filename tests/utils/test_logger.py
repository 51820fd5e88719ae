import functools
import io
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from termcolor import colored

from hooktrain.utils import logger as logger_module
from hooktrain.utils.logger import (
    close_logger,
    setup_logger,
)

NAME = "hooktrain_of_this_test"


TIME = r"\d\d/\d\d \d\d:\d\d:\d\d"


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


@pytest.fixture
def colors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that has colours."""
    always_colored = functools.partial(colored, force_color=True)
    monkeypatch.setattr(logger_module, "colored", always_colored)


def test_a_line_on_the_terminal_has_time_name_and_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    setup_logger(name=NAME, color=False).info("hello")
    assert re.fullmatch(rf"\[{TIME}\] {NAME} INFO: hello\n", capsys.readouterr().out)


def test_debug_messages_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logger(name=NAME).debug("details")
    assert "details" in capsys.readouterr().out


def test_colours_mark_time_and_name_and_levels_from_warning_on(
    capsys: pytest.CaptureFixture[str], colors: None
) -> None:
    logger = setup_logger(name=NAME)
    for level in (logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL):
        logger.log(level, "hello")
    header = rf"\x1b\[32m\[{TIME} {NAME}\]:\x1b\[0m "
    info, warning, error, critical = capsys.readouterr().out.splitlines()
    assert re.fullmatch(header + "hello", info)
    assert re.fullmatch(header + r"\x1b\[5m\x1b\[31mWARNING\x1b\[0m hello", warning)
    assert re.fullmatch(header + r"\x1b\[4m\x1b\[5m\x1b\[31mERROR\x1b\[0m hello", error)
    assert re.fullmatch(header + r"\x1b\[4m\x1b\[5m\x1b\[31mCRITICAL\x1b\[0m hello", critical)


def test_without_a_terminal_there_are_no_escape_codes(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logger(name=NAME).error("hello")
    assert "\x1b" not in capsys.readouterr().out


def test_names_are_abbreviated_on_the_terminal_and_whole_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logger(tmp_path, name=NAME, abbrev_name="ht")
    logging.getLogger(f"{NAME}.engine").info("hello")
    assert " ht.engine]: hello" in capsys.readouterr().out
    assert f"] {NAME}.engine INFO: hello" in (tmp_path / "log.txt").read_text()


def test_a_name_that_only_begins_alike_is_not_abbreviated() -> None:
    formatter = logger_module._ColorFormatter("ab", "x")
    record = logging.LogRecord("abc", logging.INFO, "", 0, "hello", None, None)
    assert formatter.format(record).endswith(" abc]: hello")


def test_a_traceback_follows_its_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = setup_logger(tmp_path, name=NAME)
    try:
        raise ValueError("cause")
    except ValueError:
        logger.exception("failed")
    for text in (capsys.readouterr().out, (tmp_path / "log.txt").read_text()):
        assert text.count("failed\nTraceback") == 1
        assert text.endswith("ValueError: cause\n")


def test_setting_up_twice_logs_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logger(tmp_path, name=NAME)
    setup_logger(tmp_path, name=NAME)
    setup_logger(str(tmp_path / "log.txt"), name=NAME, color=False, abbrev_name="x").info("hello")
    assert capsys.readouterr().out.count("hello") == 1
    assert (tmp_path / "log.txt").read_text().count("hello") == 1


def test_setting_up_again_closes_the_file_before(tmp_path: Path) -> None:
    logger = setup_logger(tmp_path / "one.txt", name=NAME)
    (before,) = [h for h in logger.handlers if isinstance(h, logging.FileHandler)]
    stream = before.stream
    setup_logger(tmp_path / "two.txt", name=NAME).info("hello")
    assert stream.closed
    assert (tmp_path / "one.txt").read_text() == ""
    assert "hello" in (tmp_path / "two.txt").read_text()


def test_handlers_of_others_stay(tmp_path: Path) -> None:
    logger, theirs = logging.getLogger(NAME), io.StringIO()
    handlers = [logging.StreamHandler(theirs), logging.FileHandler(tmp_path / "their.txt")]
    for handler in handlers:
        logger.addHandler(handler)
    setup_logger(tmp_path, name=NAME)
    setup_logger(tmp_path, name=NAME).info("hello")
    close_logger(NAME)
    assert logger.handlers == handlers
    assert theirs.getvalue() == "hello\n"
    assert (tmp_path / "their.txt").read_text() == "hello\n"
    for handler in handlers:
        logger.removeHandler(handler)
        handler.close()


def test_closing_goes_back_to_the_defaults_of_logging(tmp_path: Path) -> None:
    logger = setup_logger(tmp_path, name=NAME)
    assert (logger.level, logger.propagate) == (logging.DEBUG, False)
    close_logger(NAME)
    assert (logger.level, logger.propagate, logger.handlers) == (logging.NOTSET, True, [])


@pytest.mark.parametrize("output", ["log.txt", "run.log"])
def test_a_bare_file_name_is_a_file_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    monkeypatch.chdir(tmp_path)
    setup_logger(output, name=NAME).info("hello")
    assert "hello" in (tmp_path / output).read_text()


def test_a_folder_is_created_and_gets_a_log(tmp_path: Path) -> None:
    setup_logger(tmp_path / "a/b", name=NAME).info("hello")
    assert "hello" in (tmp_path / "a/b/log.txt").read_text()


def test_a_second_run_appends(tmp_path: Path) -> None:
    setup_logger(tmp_path, name=NAME).info("first")
    close_logger(NAME)
    setup_logger(tmp_path, name=NAME).info("second")
    first, second = (tmp_path / "log.txt").read_text().splitlines()
    assert first.endswith("first")
    assert second.endswith("second")


def test_other_ranks_write_to_files_of_their_own_and_not_to_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logger(tmp_path, distributed_rank=3, name=NAME).info("hello")
    assert capsys.readouterr().out == ""
    assert [p.name for p in tmp_path.iterdir()] == ["log.txt.rank3"]
    assert "hello" in (tmp_path / "log.txt.rank3").read_text()


def test_the_terminal_can_be_left_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    setup_logger(tmp_path, name=NAME, configure_stdout=False).info("hello")
    assert capsys.readouterr().out == ""


def test_lines_go_to_what_stdout_is_at_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    logger, later = setup_logger(name=NAME), io.StringIO()
    monkeypatch.setattr(sys, "stdout", later)
    logger.info("hello")
    assert "hello" in later.getvalue()


def test_records_reach_the_loggers_above_only_if_asked(caplog: pytest.LogCaptureFixture) -> None:
    setup_logger(name=NAME).info("not propagated")
    setup_logger(name=NAME, enable_propagation=True).info("propagated")
    assert caplog.messages == ["propagated"]


def test_two_loggers_can_share_a_file(tmp_path: Path) -> None:
    other = f"{NAME}_too"
    setup_logger(tmp_path, name=NAME).info("one")
    setup_logger(tmp_path, name=other).info("two")
    logging.getLogger(NAME).info("three")
    close_logger(other)
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split(": ")[-1] for line in lines] == ["one", "two", "three"]
