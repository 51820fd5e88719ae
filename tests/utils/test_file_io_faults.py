"""Faults of the disk while a file is written atomically."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from file_io_toys import fail_at_write, names, write

import hooktrain
from hooktrain.utils.file_io import atomic_write, sweep_temporary_files

WITH_PACKAGE = {**os.environ, "PYTHONPATH": str(Path(hooktrain.__file__).parent.parent)}


def start(program: str, *args: object) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", program, *map(str, args)]
    return subprocess.Popen(command, env=WITH_PACKAGE, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def dead_pid() -> int:
    """The id of a process that has ended a moment ago."""
    process = start("")
    process.communicate()
    return process.pid


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_told_with_the_path_and_the_free_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1234))
    fail_at_write(monkeypatch, 1, OSError(number, "full"))
    with pytest.raises(OSError, match="1,234 bytes free") as caught, atomic_write(path) as file:
        file.write(b"new")
    assert caught.value.errno == number
    assert str(path) in str(caught.value)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a.bin"]


def test_a_full_disk_is_an_os_error_also_where_torch_makes_another_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.pth"
    path.write_bytes(b"old")
    for n in range(1, 6):
        fail_at_write(monkeypatch, n, OSError(errno.ENOSPC, "full"))
        with pytest.raises(OSError, match="no space to write") as caught, atomic_write(path) as f:
            torch.save({"a": torch.zeros(1000), "b": torch.ones(1000)}, f)
        assert caught.value.errno == errno.ENOSPC
        assert path.read_bytes() == b"old"
        assert names(tmp_path) == ["model.pth"]


def test_an_interrupt_is_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    interrupt = KeyboardInterrupt()
    interrupt.__context__ = OSError(errno.ENOSPC, "full")
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "a.bin", then=interrupt)


WRITES_TOO_MUCH = """
import resource, sys
from hooktrain.utils.file_io import atomic_write
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    with atomic_write(sys.argv[1]) as file:
        file.write(b"x" * 2000)
except OSError as error:
    print(error.errno, error)
"""


def test_a_real_limit_on_file_size_gives_the_clear_error_and_keeps_the_old_file(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    output, _ = start(WRITES_TOO_MUCH, path).communicate(timeout=30)
    assert output.startswith(f"{errno.EFBIG} [Errno {errno.EFBIG}] no space to write {path}: ")
    assert output.endswith(" bytes free\n")
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a.bin"]


WRITES_FOR_EVER = """
import sys
from hooktrain.utils.file_io import atomic_write
for i in range(10**9):
    with atomic_write(sys.argv[1]) as file:
        for _ in range(64):
            file.write(bytes([i % 256]) * 16384)
    if i == 0:
        print("started", flush=True)
"""


def test_a_writer_that_is_killed_at_any_time_leaves_a_complete_file(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    for i in range(10):
        with start(WRITES_FOR_EVER, path) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "started\n"
            time.sleep(0.0037 * i)  # when within a write it strikes is up to chance
            writer.send_signal(signal.SIGKILL)
        content = path.read_bytes()
        assert len(content) == 64 * 16384
        assert len(set(content)) == 1
        assert all(p.name.startswith(".a.bin.tmp-") for p in sweep_temporary_files(tmp_path))
        assert names(tmp_path) == ["a.bin"]


def test_what_a_dead_process_left_is_swept_and_listed(tmp_path: Path, dead_pid: int) -> None:
    left_over = tmp_path / f".a.bin.tmp-{dead_pid}-0123abcd"
    left_over.touch()
    assert sweep_temporary_files(tmp_path) == [left_over]
    assert names(tmp_path) == []


def test_what_another_living_process_writes_is_not_swept(tmp_path: Path) -> None:
    theirs = f".a.bin.tmp-{os.getppid()}-0123abcd"
    (tmp_path / theirs).touch()
    assert sweep_temporary_files(tmp_path) == []
    assert names(tmp_path) == [theirs]


def test_what_this_process_writes_is_not_swept(tmp_path: Path) -> None:
    with atomic_write(tmp_path / "a.bin") as file:
        file.write(b"one")
        assert sweep_temporary_files(tmp_path) == []
    assert (tmp_path / "a.bin").read_bytes() == b"one"


def test_what_a_dead_process_with_the_id_of_this_one_left_is_swept(tmp_path: Path) -> None:
    left_over = tmp_path / f".a.bin.tmp-{os.getpid()}-0123abcd"
    left_over.touch()
    assert sweep_temporary_files(str(tmp_path)) == [left_over]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells them apart")
def test_a_killed_process_that_its_parent_has_not_asked_about_is_dead(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with process:
        left_over = tmp_path / f".a.bin.tmp-{process.pid}-0123abcd"
        left_over.touch()
        assert sweep_temporary_files(tmp_path) == []
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # leaves it a zombie
        assert sweep_temporary_files(tmp_path) == [left_over]


def test_a_process_of_another_user_counts_as_living(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int, number: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    (tmp_path / ".a.bin.tmp-1-0123abcd").touch()
    monkeypatch.setattr(os, "kill", refuse)
    assert sweep_temporary_files(tmp_path) == []


def test_files_of_other_names_are_not_swept(tmp_path: Path, dead_pid: int) -> None:
    others = sorted(
        [
            "model.pth",
            f"a.bin.tmp-{dead_pid}-0123abcd",
            f".a.bin.tmp-{dead_pid}-0123abcd.bak",
            f".a.bin.tmp-{dead_pid}",
            f".tmp-{dead_pid}-0123abcd",
        ]
    )
    for name in others:
        (tmp_path / name).touch()
    assert sweep_temporary_files(tmp_path) == []
    assert names(tmp_path) == others
