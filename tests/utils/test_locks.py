import errno
import fcntl
import multiprocessing
import shutil
import signal
import subprocess
import sys
import time
from io import FileIO
from pathlib import Path

import pytest

from hooktrain.utils.locks import lock_folder, try_lock

HOLD = """
import sys
from hooktrain.utils.locks import lock_folder
lock_folder(sys.argv[1])
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_folder_in_use_by_another_run_is_refused_until_that_is_gone(tmp_path: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdin is not None
    assert other.stdout is not None
    try:
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(RuntimeError, match=rf"in use by another run \(process {other.pid} on "):
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
    other = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert "in use by another run" in other.stderr


def test_a_child_does_not_keep_the_lock_of_a_parent_that_is_gone(tmp_path: Path) -> None:
    with FileIO(tmp_path / "lock", "w") as file:
        assert try_lock(file)
        child = multiprocessing.get_context("fork").Process(target=signal.pause)
        child.start()
        time_out = time.monotonic() + 30
    try:
        with FileIO(tmp_path / "lock", "r+") as file:
            while not try_lock(file):  # until the child has begun
                assert time.monotonic() < time_out
    finally:
        child.kill()
        child.join()
        child.close()


@pytest.mark.parametrize("name", ["ENOSYS", "ENOLCK", "EOPNOTSUPP"])
def test_a_file_system_without_locks_is_told_of_and_the_run_goes_on(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(getattr(errno, name), "injected")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(fcntl, "lockf", refuse)
    lock_folder(tmp_path)
    assert f"{tmp_path} cannot be locked ([Errno {getattr(errno, name)}] injected)" in caplog.text


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        lock_folder(tmp_path / "missing")
