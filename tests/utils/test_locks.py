import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hooktrain.utils.file_io import is_locked, lock_folder, locked_file

HOLD = """
import sys
from hooktrain.utils.file_io import lock_folder
lock_folder(sys.argv[1])
print("locked", flush=True)
sys.stdin.read()
"""
FORK = """
import os, signal, sys
from hooktrain.utils.file_io import lock_folder
lock_folder(sys.argv[1])
begun, begin = os.pipe()
child = os.fork()
if child == 0:
    os.write(begin, b"1")
    signal.pause()
os.read(begun, 1)
print(child, flush=True)
sys.stdin.read()
"""


def test_a_folder_in_use_by_another_run_is_refused_until_that_is_gone(
    tmp_path: Path,
) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert other.stdin is not None
    assert other.stdout is not None
    try:
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(
            RuntimeError, match=rf"in use by another run \(process {other.pid} on "
        ):
            lock_folder(tmp_path)
    finally:
        other.kill()
        other.wait()
        other.stdin.close()
        other.stdout.close()
    lock_folder(tmp_path)


def test_the_same_process_may_lock_again_and_copy_the_folder(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to("out")
    lock_folder(tmp_path / "out")
    lock_folder(str(tmp_path / "link"))
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    command = [sys.executable, "-c", HOLD, str(tmp_path / "link")]
    other = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert "in use by another run" in other.stderr


def test_a_child_does_not_keep_the_lock_of_a_parent_that_is_gone(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", FORK, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        child = int(other.stdout.readline())
        try:
            other.kill()
            other.wait()
            lock_folder(tmp_path)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_file_is_locked_as_long_as_its_block_and_gone_afterwards(
    tmp_path: Path,
) -> None:
    path = tmp_path / "file.lock"
    assert not is_locked(path)
    with locked_file(path):
        assert is_locked(path)
    assert list(tmp_path.iterdir()) == []
    path.touch()
    assert not is_locked(path)


@pytest.mark.parametrize("name", ["ENOSYS", "ENOLCK", "EOPNOTSUPP"])
def test_a_file_system_without_locks_is_told_of_and_the_run_goes_on(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(getattr(errno, name), "injected")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(fcntl, "lockf", refuse)
    lock_folder(tmp_path)
    assert (
        f"{tmp_path} cannot be locked ([Errno {getattr(errno, name)}] injected)"
        in caplog.text
    )


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        lock_folder(tmp_path / "missing")
