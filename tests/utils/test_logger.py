"""Records on the terminal and in files."""

import io
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hooktrain.utils import comm
from hooktrain.utils.logger import close_logger, log_once, setup_logger

NAME = "hooktrain_of_this_test"
TIME = r"\d\d:\d\d:\d\d"
DATE = r"\d{4}-\d\d-\d\d"


@pytest.fixture(autouse=True)
def _undo() -> Iterator[None]:
    yield
    close_logger(NAME)


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("quiet", f"WARNING {TIME} warning"),
        ("normal", f"{TIME} info|WARNING {TIME} warning"),
        ("debug", f"{TIME} debug|{TIME} info|WARNING {TIME} warning"),
    ],
)
def test_a_level_chooses_what_the_terminal_shows(
    level: str, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logger(tmp_path / "a/b", name=NAME, color=False, level=level)
    for name in ("debug", "info", "warning"):
        getattr(logging.getLogger(f"{NAME}.engine"), name)(name)
    lines = [f"{line}\n" for line in shown.split("|")]
    assert re.fullmatch("".join(lines), capsys.readouterr().out)
    levels = ("DEBUG: debug", "INFO: info", "WARNING: warning")
    lines = [rf"\[{DATE} {TIME}\] {NAME}.engine {line}\n" for line in levels]
    assert re.fullmatch("".join(lines), (tmp_path / "a/b/log.txt").read_text())


def test_setting_up_again_replaces_what_was_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = setup_logger(tmp_path, name=NAME)
    (before,) = [h for h in logger.handlers if isinstance(h, logging.FileHandler)]
    stream = before.stream
    logger.info("first")
    setup_logger(str(tmp_path / "log.txt"), name=NAME, color=False).info("second")
    setup_logger(tmp_path / "two.txt", name=NAME, configure_stdout=False).info("third")
    assert stream.closed
    assert [line[-6:] for line in capsys.readouterr().out.splitlines()] == [
        " first",
        "second",
    ]
    assert [p.read_text().count("\n") for p in sorted(tmp_path.iterdir())] == [2, 1]
    assert (logger.level, logger.propagate) == (logging.DEBUG, False)
    close_logger(NAME)
    assert (logger.level, logger.propagate, logger.handlers) == (
        logging.NOTSET,
        True,
        [],
    )


def test_handlers_of_others_stay(tmp_path: Path) -> None:
    logger, theirs = logging.getLogger(NAME), io.StringIO()
    handlers = [
        logging.StreamHandler(theirs),
        logging.FileHandler(tmp_path / "their.txt"),
    ]
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


@pytest.mark.parametrize(
    ("output", "rank", "file"),
    [("run.log", 0, "run.log"), (".", 0, "log.txt"), (".", 3, "log.txt.rank3")],
)
def test_each_of_128_ranks_has_a_file_and_the_first_the_terminal(
    output: str,
    rank: int,
    file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    setup_logger(output, distributed_rank=rank, name=NAME).info("hello")
    assert [path.name for path in tmp_path.iterdir()] == [file]
    assert "hello" in (tmp_path / file).read_text()
    assert ("hello" in capsys.readouterr().out) == (rank == 0)
    setup_logger("many", distributed_rank=127, name=NAME)
    setup_logger("many", distributed_rank=128, name=NAME).warning("not read")
    assert [path.name for path in Path("many").iterdir()] == ["log.txt.rank127"]
    assert capsys.readouterr() == ("", "")


def test_without_a_rank_it_is_that_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(comm, "get_rank", lambda: 2)
    setup_logger(tmp_path, name=NAME).info("hello")
    monkeypatch.undo()
    monkeypatch.setenv("RANK", "1")  # set by torchrun; there is no process group yet
    setup_logger(tmp_path, name=NAME).info("hello")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["log.txt.rank1", "log.txt.rank2"]
    assert capsys.readouterr() == ("", "")


def test_lines_go_to_what_stdout_is_at_the_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logger, later = setup_logger(name=NAME), io.StringIO()
    monkeypatch.setattr(sys, "stdout", later)
    logger.info("hello")
    assert later.getvalue().endswith(" hello\n")
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("encoding", "shown"), [("ascii", r"Gr\xf6\xdfe"), ("utf-8", "Größe")]
)
def test_what_the_terminal_cannot_show_is_escaped(
    encoding: str,
    shown: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    written = io.BytesIO()
    terminal = io.TextIOWrapper(written, encoding=encoding, write_through=True)
    monkeypatch.setattr(sys, "stdout", terminal)
    setup_logger(tmp_path, name=NAME, color=False).warning("%s: 1", "Größe")
    line = written.getvalue().decode(encoding)
    assert re.fullmatch(rf"WARNING {TIME} {re.escape(shown)}: 1\n", line)
    assert (tmp_path / "log.txt").read_text("utf-8").endswith(": Größe: 1\n")
    assert capsys.readouterr().err == ""  # no traceback of logging


LOGS_500_LINES = """
import os, resource, sys
from hooktrain.utils.logger import setup_logger

def log_to(folder, largest, stdout):
    if stdout is None:
        sys.stdout = None
        os.close(1)
    else:
        os.dup2(stdout, 1)
    log = setup_logger(folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
    for number in range(500):
        log.info("line %d", number)
    print("printed", flush=True)

read, closed_pipe = os.pipe()
os.close(read)
for folder, largest, stdout in [
    ("closed pipe", 10**6, closed_pipe),
    ("full terminal", 10**6, os.open("/dev/full", os.O_WRONLY)),
    ("no stdout", 10**6, None),
    ("full disk", 2000, 1),
]:
    if os.fork() == 0:
        log_to(folder, largest, stdout)
        sys.exit()  # a fork, since a new interpreter takes seconds to start
    print(folder, os.wait()[1], file=sys.stderr)
"""


def test_lines_that_cannot_be_written_are_one_line_elsewhere(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOGS_500_LINES],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.splitlines() == [
        "closed pipe 0",
        "full terminal 0",
        "no stdout 0",
        "full disk 0",
    ]
    logs = {path.parent.name: path.read_text() for path in tmp_path.glob("*/log.txt")}
    expected = {
        "closed pipe": (logs["closed pipe"], ["Broken pipe"]),
        "full terminal": (logs["full terminal"], ["No space left"]),
        "no stdout": (logs["no stdout"], []),
        "full disk": (done.stdout, ["File too large"]),
    }
    for text, errors in expected.values():
        assert text.count("line ") == 500
        found = [
            line.split("ERROR")[1] for line in text.splitlines() if "ERROR" in line
        ]
        assert len(found) == len(errors)
        for line, error in zip(found, errors, strict=True):
            assert error in line


def test_a_message_is_logged_once_for_each_logger_level_and_value(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    logger, other = logging.getLogger(f"{NAME}.a"), logging.getLogger(f"{NAME}.b")
    for _ in range(2):
        for log in (logger.info, logger.warning, other.warning):
            for value in ("loss", "accuracy"):
                log_once(log, "%r is late", value)
    assert caplog.record_tuples == [
        (f"{NAME}.a", logging.INFO, "'loss' is late"),
        (f"{NAME}.a", logging.INFO, "'accuracy' is late"),
        (f"{NAME}.a", logging.WARNING, "'loss' is late"),
        (f"{NAME}.a", logging.WARNING, "'accuracy' is late"),
        (f"{NAME}.b", logging.WARNING, "'loss' is late"),
        (f"{NAME}.b", logging.WARNING, "'accuracy' is late"),
    ]
